"""Messages along rails: the exchanges of a call's slices with ranks of other nodes.

A slice has up to two exchanges, of partial sums and of results. Each kind has a staging lane of its
own, and while some slices are on the network the stream works on others. The host only moves the
data: kernels reduce what has arrived.

The ranks compare signatures before a call's first slice, so the messages of a slice need no hello:
of one pair and lane they arrive in the order in which both ends cut the call, and a posted receive
is the credit. (As sends and receives with their hellos an exchange of 64 bytes between two
processes of one host took 0.7 ms instead of 0.03.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from ringcoll.arguments.calls import Call
from ringcoll.errors import Error
from ringcoll.executors.cuda_nodes.carry import Exchange, Flow, carry
from ringcoll.executors.cuda_nodes.executor import CudaNodesExecutor
from ringcoll.executors.cuda_nodes.lane import StagingLane
from ringcoll.executors.cuda_nodes.pieces import ALIGN, StagingCopy
from ringcoll.fabric.mpi import KINDS, SLICES
from ringcoll.views import start_of

Array = npt.NDArray[Any]

Enqueue = Callable[[int], None]
"""Enqueues work on a stream."""

PARTIALS, RESULTS = range(KINDS)
"""The kinds of exchanges: of partial sums, and of results."""


@dataclass(frozen=True, slots=True)
class RailLimits:
    """The size of slices on the rails, and how many are under way; the same on all ranks.

    2 nodes of 2 H200, 256 MiB: an all_reduce took 45 ms in shares of 8 MiB with 2 slots, 49 with 3,
    51 with 4; 56, 53 and 49 in shares of 4 MiB, 57, 56 and 58 in those of 16 MiB. Messages alone
    take longer, too, the more memory they go through, and every slice has costs of its own
    (``benchmarks/results/gpu_nodes_4_figures.json``). MPI alone took 36 ms on that machine; on that
    of ``gpu_nodes_4.json`` it took 49, and the all_reduce 60.

    Args:
        share: the most bytes that a rank sends along its rail in a slice, to all other nodes
            together.

    """

    share: int = 8 << 20
    slots: int = 2


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a call, in the order in which a stream gets its parts."""

    before: tuple[Enqueue, ...] = ()  # inside the node
    partials: Exchange | None = None  # along the rail
    fold: tuple[Enqueue, ...] = ()  # reduces the partial sums
    results: Exchange | None = None  # along the rail, or with all ranks of other nodes
    after: tuple[Enqueue, ...] = ()  # inside the node


class Exchanges:
    """One rank's messages along its rail."""

    def __init__(
        self, executor: CudaNodesExecutor, failure: Callable[[], Error | None], limits: RailLimits
    ) -> None:
        self.limits = limits
        self._executor, self._failure = executor, failure
        self._slot_bytes = 2 * limits.share + 2 * ALIGN * executor.fabric.nranks
        self._lanes: list[StagingLane] = []

    def _lane(self, kind: int) -> StagingLane:
        while len(self._lanes) < KINDS:
            self._lanes.append(self._executor.lane(self.limits.slots, self._slot_bytes))
        return self._lanes[kind]

    def load(self, timeout: float) -> None:
        """Load the kernels for calls with a timeout, in seconds."""
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
        """The messages of slice ``number``: (peer, array) each, staged in the slot of the slice.

        An array that goes to several peers is copied to the slot once.
        """
        slot, end = self._lane(kind).slot(number), 0
        staged: list[list[tuple[int, Array]]] = [[], []]
        copies: list[dict[int, StagingCopy]] = [{}, {}]
        for parts, found, messages in zip(staged, copies, (sends, recvs), strict=True):
            for peer, array in messages:
                start = start_of(array)
                if start not in found:
                    found[start] = StagingCopy(start, end, array.nbytes)
                    end = -(-(end + array.nbytes) // ALIGN) * ALIGN
                begin = found[start].offset
                parts.append((peer, slot[begin : begin + array.nbytes]))
        to_host, to_device = (tuple(found.values()) for found in copies)
        return Exchange(call.signature(), tuple(staged[0]), tuple(staged[1]), to_host, to_device)

    # -- the stream's side -------------------------------------------------------------------------

    def enqueue(self, slices: Sequence[Slice], timeout: float, stream: int) -> None:
        """Enqueue slices in turns: the next one begins, an older one is folded, the oldest ends.

        The stream waits for an exchange only when all slots are in use.
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
        self._executor.thread.run(lambda: carry(self._executor, self._failure, flows, timeout))
        ahead, many = self.limits.slots - 1, len(slices)
        for step in range(many + 2 * ahead):
            folded, ended = step - ahead, step - 2 * ahead
            if step < many:
                _enqueue_all(slices[step].before, stream)
                self._put(PARTIALS, step, slices[step].partials, timeout, stream)
            if 0 <= folded < many:
                self._take(PARTIALS, folded, slices[folded].partials, timeout, stream)
                _enqueue_all(slices[folded].fold, stream)
                self._put(RESULTS, folded, slices[folded].results, timeout, stream)
            if ended >= 0:
                self._take(RESULTS, ended, slices[ended].results, timeout, stream)
                _enqueue_all(slices[ended].after, stream)

    def _put(
        self, kind: int, number: int, exchange: Exchange | None, timeout: float, stream: int
    ) -> None:
        if exchange is not None:
            lane = self._lane(kind)
            lane.put(number, exchange.to_host, lane.launches(timeout)[0], stream)

    def _take(
        self, kind: int, number: int, exchange: Exchange | None, timeout: float, stream: int
    ) -> None:
        if exchange is not None:
            lane = self._lane(kind)
            lane.take(number, exchange.to_device, lane.launches(timeout)[1], stream)


def _enqueue_all(parts: Sequence[Enqueue], stream: int) -> None:
    for enqueue in parts:
        enqueue(stream)
