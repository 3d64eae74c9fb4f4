"""First calls of GPU ranks on several nodes whose kernels compile for long: ``... WORD``."""

from concurrent.futures import Future

import numpy as np

from tests.nodes.programs.gpus import Plain, begin, fake_gpus
from tests.processes.programs.verdict import Checks, say


class Slow:
    """A compiler in the background that makes the kernels of calls only when it is told."""

    def __init__(self) -> None:
        self._own: dict[str, Future[bytes]] = {}
        self._made: Future[bytes] = Future()
        self._made.set_result(b"")

    def compile_next(self, text: str, *_for: object) -> Future[bytes]:
        """What a call needs."""
        return self._own.setdefault(text, Future())

    def compile_ahead(self, text: str, *_for: object) -> Future[bytes]:
        """What a call has asked for before, or a generic kernel."""
        return self._own.get(text, self._made)

    def finish(self) -> None:
        """Make all that was asked for."""
        for kernel in self._own.values():
            if not kernel.done():
                kernel.set_result(b"")


def main() -> None:
    checks, slow = Checks(), Slow()
    with fake_gpus() as gpus:
        compiles = {"compile_next": slow.compile_next, "compile_ahead": slow.compile_ahead}
        vars(gpus).update(compiles, generic=True, stored=lambda *_text: False)

        def runs_generic(comm, op) -> bool:
            """Whether an all_reduce of these ranks runs by generic kernels."""
            before, x = len(gpus.ran), Plain(comm, np.ones(9001))
            comm.all_reduce(x.array, op=op)
            comm.synchronize()
            x.check(np.full(9001, comm.nranks if op == "sum" else 1))
            checks.count += 1
            return any("run_generic" in text for text in gpus.ran[before:])

        with begin(kernel_wait=1e-3) as whole:
            own = whole._state.fabric.nodes[whole.rank]
            with whole.split(own) as part:
                for name, comm, op in (("whole", whole, "sum"), ("part", part, "max")):
                    checks.true(f"{name}: the first call", runs_generic(comm, op))
                    slow.finish()
                    whole.barrier()
                    runs_generic(comm, op)  # finds nothing running, and loads
                    checks.true(f"{name}: a later call", not runs_generic(comm, op))
            rank = whole.rank
    say(rank, count=checks.count, failures=checks.failures)


if __name__ == "__main__":
    main()
