"""Large calls that check themselves; as a program one rank on its own GPU.

``large.py FOLDER copy``: the first calls run by kernels, those after all ranks have mapped SCRATCH
by copy engines. ``large.py FOLDER sm``: kernels stage plain memory, in short slices at first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ringcoll
from ringcoll.bench.gpu import captured
from ringcoll.tuner.measured import COPIED_BYTES, LARGE_BYTES, LARGE_CHAIN_BYTES
from tests.gpu.ranks import on

__all__ = ["checked"]

NAMES = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
ROUNDS, SOON = 7, 4
"""Calls of a kind in a row; from the fourth on copy engines run all, whoever came first."""


class Values:
    """Numbers that sums keep exact, another set for each seed and rank."""

    def __init__(self, xp: Any, most: int) -> None:
        self._numbers = xp.arange(most, dtype="int32")

    def of(self, count: int, rank: int, seed: int) -> Any:
        """``count`` of them."""
        return (self._numbers[:count] * 7 + 13 * rank + 31 * seed) % 1009


def cases(comm: Any, name: str, nbytes: int, values: Values) -> tuple[Callable[..., None], Any]:
    """A call of these arrays, and what it must give."""
    n, me, xp = comm.nranks, comm.rank, comm.xp
    whole = nbytes // 4 // n * n
    part = whole // n

    def sums(count: int, seed: int) -> Any:
        return sum(values.of(count, rank, seed) for rank in range(n))

    def place(array: Any, rank: int) -> Any:
        return array[rank * part : (rank + 1) * part]

    def wanted(seed: int) -> Any:
        if name in ("all_reduce", "reduce"):
            return sums(whole, seed) if name == "all_reduce" or me == n - 1 else None
        if name == "reduce_scatter":
            return place(sums(whole, seed), me)
        if name == "broadcast":
            return values.of(whole, n - 1, seed)
        every = range(n)
        if name == "all_gather":
            return xp.concatenate([values.of(part, rank, seed) for rank in every])
        return xp.concatenate([place(values.of(whole, rank, seed), me) for rank in every])

    def call(send: Any, recv: Any, **how: Any) -> None:
        rooted = {"root": n - 1} if name in ("reduce", "broadcast") else {}
        if name == "broadcast":
            comm.broadcast(send if me == n - 1 else None, recv, **rooted, **how)
        elif name == "reduce":
            comm.reduce(send, recv if me == n - 1 else None, **rooted, **how)
        else:
            getattr(comm, name)(send, recv, **how)

    sizes = {"all_gather": (part, whole), "reduce_scatter": (whole, part)}
    return call, (sizes.get(name, (whole, whole)), wanted)


def checked(comm: Any, calls: Sequence[tuple[str, int]], **how: Any) -> list[list[bool]]:
    """For each collective, of so many bytes, and call, whether it had the SCRATCH of large calls.

    Every result is compared. ``how``: options.
    """
    found = []
    with on(comm), comm.xp.cuda.Stream(non_blocking=True) as stream:
        for name, size in calls:
            values = Values(comm.xp, size // 4)
            call, (counts, wanted) = cases(comm, name, size, values)
            used = []
            for seed in range(ROUNDS):
                # Fresh arrays: plain, symmetric (at one place on all ranks, as engine="copy" wants
                # them), and a part of a larger one in turns.
                if seed % 3 == 1:
                    send, recv = (comm.empty(count, "int32") for count in counts)
                else:
                    send, recv = (
                        comm.xp.empty(count + 3, "int32")[seed % 2 :][:count] for count in counts
                    )
                send[:] = values.of(counts[0], comm.rank, seed)
                recv.fill(-1)
                call(send, recv, **how)
                small = comm.xp.full(100, comm.rank, "int32")
                comm.all_reduce(small)
                stream.synchronize()
                used.append(comm._state.cuda.async_errors.last is not None and in_use(comm))
                expected = wanted(seed)
                assert expected is None or bool((recv == expected).all()), (name, seed)
                assert (small == sum(range(comm.nranks))).all()
            graph = captured(stream, partial(call, send, recv, **how), 2)
            for seed in (50, 51):
                send[:] = values.of(counts[0], comm.rank, seed)
                recv.fill(-1)
                graph.launch(stream)
                stream.synchronize()
                expected = wanted(seed)
                assert expected is None or bool((recv == expected).all()), (name, seed)
            found.append(used)
    return found


def in_use(comm: Any) -> bool:
    """Whether large calls have SCRATCH of their own now."""
    scratch = comm._state.cuda.large_scratch
    return scratch is not None and bool(scratch.in_use)


def main(folder: Path, engine: str) -> None:
    """One rank: what :func:`checked` finds, in a file."""
    with ringcoll.init(device="cuda", timeout=20, register=engine == "copy") as comm:
        if engine == "copy":
            found = checked(comm, [(name, COPIED_BYTES.value) for name in NAMES], engine="copy")
        else:
            found = checked(comm, [(name, LARGE_BYTES.value) for name in NAMES])
            found += checked(comm, list(LARGE_CHAIN_BYTES.by.items()))
    lines = "\n".join(" ".join(str(int(each)) for each in row) for row in found)
    (folder / str(comm.rank)).write_text(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
