"""Messages along rails: the exchanges of a call's slices with ranks of other nodes.

A slice has up to two exchanges, of partial sums and of results. Each kind has a lane of its own,
and while some slices are on the network the stream works on others. Host memory only carries:
kernels fold what has arrived.

The ranks compare signatures before a call's first slice, so the messages of a slice need no hello:
of one pair and lane they arrive in the order in which both ends cut the call, and a posted receive
is the credit. (As sends and receives with their hellos an exchange of 64 bytes between two
processes of one host took 0.7 ms instead of 0.03.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from ringcoll.arguments.calls import Call
from ringcoll.errors import Error
from ringcoll.executors.cuda.params import start_of
from ringcoll.executors.cuda_nodes.carry import Exchange, Flow, carry
from ringcoll.executors.cuda_nodes.executor import CudaNodesExecutor
from ringcoll.executors.cuda_nodes.lane import Lane
from ringcoll.executors.cuda_nodes.pieces import ALIGN, Move
from ringcoll.fabric.mpi import KINDS, SLICES

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Figures:
    """How calls are cut for the rails; the same on all ranks.

    2 nodes of 2 H200, 256 MiB: an all_reduce took 45 ms in shares of 8 MiB with 2 slots, 49 with 3,
    51 with 4; 56, 53 and 49 in shares of 4 MiB, 57, 56 and 58 in those of 16 MiB. Messages alone
    take longer, too, the more memory they go through, and every slice has costs of its own
    (``benchmarks/results/gpu_nodes_4_figures.json``).

    Args:
        share: the most bytes that a rank sends along its rail in a slice, to all other nodes
            together.

    """

    share: int = 8 << 20
    slots: int = 2


class Parts(Protocol):
    """A slice as this module sees it; see :class:`ringcoll.executors.cuda_nodes.slices.Slice`."""

    @property
    def inside(self) -> tuple[Callable[[int], None], ...]:
        """Enqueued before the first exchange."""

    @property
    def partials(self) -> Exchange | None:
        """The first exchange."""

    @property
    def fold(self) -> tuple[Callable[[int], None], ...]:
        """Enqueued between the two."""

    @property
    def results(self) -> Exchange | None:
        """The second."""

    @property
    def outside(self) -> tuple[Callable[[int], None], ...]:
        """Enqueued after it."""


class Exchanges:
    """One rank's messages along its rail."""

    def __init__(
        self, executor: CudaNodesExecutor, failure: Callable[[], Error | None], figures: Figures
    ) -> None:
        self.figures = figures
        self._executor, self._failure = executor, failure
        self._slot = 2 * figures.share + 2 * ALIGN * executor.fabric.nranks
        self._lanes: list[Lane] = []

    def _lane(self, kind: int) -> Lane:
        while len(self._lanes) < KINDS:
            self._lanes.append(self._executor.lane(self.figures.slots, self._slot))
        return self._lanes[kind]

    def ready(self, timeout: float) -> None:
        """Have the kernels for calls of a timeout in seconds."""
        for kind in range(KINDS):
            self._lane(kind).launches(timeout)

    def exchange(
        self,
        kind: int,
        number: int,
        call: Call,
        sends: Sequence[tuple[int, Array]],
        recvs: Sequence[tuple[int, Array]],
    ) -> Exchange:
        """The messages of a slice, of partial sums (kind 0) or of results (kind 1)."""
        slot, at = self._lane(kind).slot(number), 0
        ways: list[list[tuple[int, Array]]] = [[], []]
        moves: list[dict[int, Move]] = [{}, {}]
        for way, found, messages in zip(ways, moves, (sends, recvs), strict=True):
            for peer, array in messages:
                start = start_of(array)
                if start not in found:
                    found[start] = Move(start, at, array.nbytes)
                    at = -(-(at + array.nbytes) // ALIGN) * ALIGN
                begin = found[start].slot
                way.append((peer, slot[begin : begin + array.nbytes]))
        into, out = (tuple(found.values()) for found in moves)
        return Exchange(call.signature(), tuple(ways[0]), tuple(ways[1]), into, out)

    # -- the stream's side -------------------------------------------------------------------------

    def enqueue(self, slices: Sequence[Parts], timeout: float, stream: int) -> None:
        """Enqueue slices: one begins, one before it is folded, and one before that ends.

        A slice is awaited when as many others have begun as there are slots.
        """
        if not slices:
            return
        flows = []
        for kind, parts in enumerate(
            ([part.partials for part in slices], [part.results for part in slices])
        ):
            lane, exchanges = self._lane(kind), [part for part in parts if part is not None]
            flows.append(Flow(lane, SLICES + kind, lane.enqueued, exchanges))
            lane.enqueued += len(exchanges)
        self._executor.owner.job(lambda: carry(self._executor, self._failure, flows, timeout))
        ahead, many = self.figures.slots - 1, len(slices)
        for step in range(many + 2 * ahead):
            folded, ended = step - ahead, step - 2 * ahead
            if step < many:
                _each(slices[step].inside, stream)
                self._put(0, step, slices[step].partials, timeout, stream)
            if 0 <= folded < many:
                self._take(0, folded, slices[folded].partials, timeout, stream)
                _each(slices[folded].fold, stream)
                self._put(1, folded, slices[folded].results, timeout, stream)
            if ended >= 0:
                self._take(1, ended, slices[ended].results, timeout, stream)
                _each(slices[ended].outside, stream)

    def _put(self, kind: int, number: int, found: Exchange | None, timeout: float, to: int) -> None:
        if found is not None:
            lane = self._lane(kind)
            lane.put(number, found.into, lane.launches(timeout)[0], to)

    def _take(
        self, kind: int, number: int, found: Exchange | None, timeout: float, to: int
    ) -> None:
        if found is not None:
            lane = self._lane(kind)
            lane.take(number, found.out, lane.launches(timeout)[1], to)


def _each(enqueue: Sequence[Callable[[int], None]], stream: int) -> None:
    for part in enqueue:
        part(stream)
