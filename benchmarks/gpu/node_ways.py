"""The ways to carry a call between nodes, and what one rank measures of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.crossing import crossing
from benchmarks.gpu.report import size_text
from ringcoll.collectives import COLLECTIVES
from ringcoll.executors.cuda_nodes.exchange import RailLimits

__all__ = ["Rank", "Way", "ways_of"]

REPEATS = 7
SEED = 1
PIECE = 4 << 20
NARROW: dict[str, Any] = {"accumulate": "dtype"}


def unlike(collective: str, x: Any, rank: int, nranks: int) -> int:
    """Elements of a rank that are not what the call should have left there."""
    import cupy

    from benchmarks.gpu.deterministic import unequal
    from benchmarks.gpu.library import as_bits, bits_of, pattern

    if collective == "reduce" and rank != 0:
        return 0
    if collective != "all_to_all":
        return unequal(x, nranks, SEED)
    each = x.size // nranks
    mine = slice(rank * each, (rank + 1) * each)
    right = [as_bits(pattern(peer, x.size, SEED)[mine]) for peer in range(nranks)]
    return int(cupy.count_nonzero(bits_of(x) != cupy.concatenate(right)))


class Free:
    """A lane whose stream takes and brings at once."""

    def __init__(self, slots: int) -> None:
        self.slots, self.taken = slots, 0

    def posted(self, number: int) -> bool:
        """Whether a slot is free."""
        return number < self.taken + self.slots

    def done(self, number: int) -> None:
        """It is now."""
        self.taken = number + 1


@dataclass(frozen=True, slots=True)
class Way:
    """One way to carry a call, or as many bytes.

    Args:
        name: in the table.
        nbytes: of the array.
        sent: bytes that the busiest rank sends to other nodes or gets from them.
        call: what is timed.
        before: goes before each call, not timed.
        wrong: elements of this rank that a first call did not leave right.
        explain: what ringcoll says of it, line by line.
        close: lets go of what only this way needs.

    """

    name: str
    nbytes: int
    sent: int
    call: Callable[[], object]
    before: Callable[[], object] = lambda: None
    wrong: int = 0
    explain: tuple[str, ...] = ()
    close: Callable[[], object] = lambda: None


class Rank:
    """What one rank measures.

    Args:
        per_node: ranks of each node.
        nbytes: of the array.

    """

    def __init__(self, per_node: int, nbytes: int) -> None:
        import ringcoll

        self.comm: Any = ringcoll.init(device="cuda", timeout=60.0)
        self.nbytes, self.nodes, self.per_node = nbytes, self.comm.nnodes, per_node
        self.partial = 4 if per_node > 1 else 2  # bytes: what is one rank's own crosses as it is
        self.comm._settle()
        self.rail = [
            node * per_node + self.comm.local_rank
            for node in range(self.nodes)
            if node != self.comm.node
        ]

    def seconds(self, ways: Sequence[Way]) -> list[float]:
        """Median over repeats of the slowest rank's time of each way, all in turns."""
        import numpy as np
        from mpi4py import MPI

        world, times = MPI.COMM_WORLD, np.zeros((REPEATS + 1, len(ways)))
        for turn in times:
            for number, way in enumerate(ways):
                way.before()
                world.Barrier()
                started = time.perf_counter()
                way.call()
                turn[number] = time.perf_counter() - started
        world.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
        return [float(median) for median in np.median(times[1:], axis=0)]

    def crossing(self, collective: str, nbytes: int, partial: int) -> int:
        """Bytes that the busiest rank sends or gets."""
        return max(
            crossing(collective, rank, self.nodes, self.per_node, nbytes, partial).most
            for rank in range(self.comm.nranks)
        )

    def call(
        self,
        name: str,
        collective: str,
        nbytes: int,
        partial: int,
        options: dict[str, Any],
        limits: RailLimits | None = None,
    ) -> Way:
        """A call of ringcoll's; ``limits``: by others than the usual."""
        from benchmarks.gpu.deterministic import fill

        comm = self.comm
        if limits is not None:
            comm = comm.split(0)
            comm._state.set_rail_limits(limits)
        x: Any = self.comm.empty(nbytes // 2, "bfloat16")
        fill(x, comm.rank, SEED)
        run = getattr(comm, collective)
        run(x, **options)
        comm.synchronize()
        wrong = unlike(collective, x, comm.rank, comm.nranks)
        x.data.memset(0, x.nbytes)  # zero, however often it is summed

        def call() -> None:
            run(x, **options)
            comm.synchronize()

        explain = () if options or limits else tuple(comm.explain(collective, nbytes).splitlines())
        close = comm.close if limits is not None else lambda: None
        sent = self.crossing(collective, nbytes, partial)
        return Way(name, nbytes, sent, call, wrong=wrong, explain=explain, close=close)

    def messages(self, name: str, limits: RailLimits) -> Way:
        """The messages of an all_reduce, without a stream that brings them and waits for them."""
        from ringcoll.executors.cuda_nodes.carry import Exchange, Flow, carry
        from ringcoll.fabric.mpi import SLICES

        staging = self.comm._state.cuda
        whole = self.nbytes // 2 * self.partial // self.per_node  # a rank's partial sums
        slices = -(-whole // limits.share)
        piece = whole // slices // self.nodes
        sizes = piece, piece * 2 // self.partial
        views = [[self.pinned(size, self.rail) for _ in range(limits.slots)] for size in sizes]

        def exchanges(slots: list[list[Any]]) -> list[Exchange]:
            def way(slot: list[Any], side: int) -> tuple[Any, ...]:
                return tuple((peer, view[side]) for peer, view in zip(self.rail, slot, strict=True))

            ways = [(way(slot, 0), way(slot, 1)) for slot in slots]
            turns = (ways[number % limits.slots] for number in range(slices))
            return [Exchange("messages", sends, recvs, (), ()) for sends, recvs in turns]

        kinds = [exchanges(slots) for slots in views]

        def call() -> None:
            flows = [
                Flow(Free(limits.slots), SLICES + kind, 0, found)
                for kind, found in enumerate(kinds)
            ]
            carry(staging, lambda: None, flows, 60.0)

        return Way(name, self.nbytes, self.crossing("all_reduce", self.nbytes, self.partial), call)

    def pinned(self, nbytes: int, peers: Sequence[int]) -> list[Any]:
        """Pinned memory to send from and to receive in, for each of some ranks."""
        import numpy as np

        from ringcoll.cuda.memory import host_mapped

        ordinal = int(self.comm.device.partition(":")[2])
        kept = [host_mapped(2 * nbytes, ordinal=ordinal) for _ in peers]
        return [np.frombuffer(memory.host, np.uint8).reshape(2, nbytes) for memory in kept]

    def mpi(self, collective: str, *, fresh: bool = False) -> Way:
        """Nonblocking messages of mpi4py between pinned buffers.

        Args:
            collective: whose bytes.
            fresh: each has memory of its own, which a copy has just written.

        """
        import cupy
        from mpi4py import MPI

        place = self.comm.rank, self.nodes, self.per_node
        found = crossing(collective, *place, self.nbytes, self.partial)
        peers, world = list(found.sends), MPI.COMM_WORLD
        most = max(*found.sends.values(), *found.recvs.values())
        views = self.pinned(most if fresh else PIECE, peers)

        def call() -> None:
            for at in range(0, most, PIECE):
                requests, first = [], at if fresh else 0
                for peer, view in zip(peers, views, strict=True):
                    come, go = (
                        max(0, min(PIECE, way[peer] - at)) for way in (found.recvs, found.sends)
                    )
                    if come:
                        into = view[1][first : first + come]
                        requests.append(world.Irecv([into, MPI.BYTE], peer))
                    if go:
                        out = view[0][first : first + go]
                        requests.append(world.Isend([out, MPI.BYTE], peer))
                MPI.Request.Waitall(requests)

        wide = self.crossing(collective, self.nbytes, self.partial)
        if not fresh:
            return Way("mpi4py", self.nbytes, wide, call)
        zeros = cupy.zeros(most, cupy.uint8)

        def write() -> None:
            for view in views:
                for half in view:
                    zeros.get(out=half)

        return Way("mpi4py, fresh", self.nbytes, wide, call, write)


def ways_of(rank: Rank, collective: str, sweep: Sequence[RailLimits]) -> Iterator[Way]:
    """The usual ways, or those of some limits."""
    nbytes, partial = rank.nbytes, rank.partial
    yield rank.mpi(collective)
    yield rank.mpi(collective, fresh=True)
    for limits in sweep:
        name = f"{size_text(limits.share)} x {limits.slots}"
        yield rank.call(name, collective, nbytes, partial, {}, limits)
        if collective == "all_reduce":
            yield rank.messages(f"  messages {name}", limits)
    if sweep:
        return
    yield rank.call("default", collective, nbytes, partial, {})
    for most in (16, 64):
        yield rank.call(f"max_sms={most}", collective, nbytes, partial, {"max_sms": most})
    if COLLECTIVES[collective].reduces:
        yield rank.call("accumulate=dtype", collective, nbytes, 2, NARROW)
    if collective == "all_reduce":
        yield rank.messages("messages alone", RailLimits())
    yield rank.call("staged", collective, nbytes >> 4, 4, {"slices": 4})
