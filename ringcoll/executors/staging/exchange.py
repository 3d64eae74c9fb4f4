"""Messages along rails: slices of a call go to ranks of other nodes and come from them.

A slice has up to two exchanges, of partial sums and of results. Each kind has a lane of its own,
and while one slice is on the network the stream works on its neighbours. Host memory only carries:
what comes is folded by kernels.

The ranks have met before a call's first slice and make the same one, so that a slice is nothing
but its messages: of one pair they come in the order in which both ends cut the call, a posted
receive is a free slot, and no hello goes with them. (As calls between two ranks, with all that
these check, an exchange of 64 bytes took 0.7 ms between two processes of one host, so 0.03 ms.)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from ringcoll.arguments.calls import Call
from ringcoll.bootstrap.contract import named
from ringcoll.errors import AbortedError, ClosedError, Error
from ringcoll.executors.cuda.params import start_of
from ringcoll.executors.staging.executor import Staging, await_stream
from ringcoll.executors.staging.lane import Lane
from ringcoll.executors.staging.pieces import ALIGN, Move
from ringcoll.transports.mpi import SLICES

__all__ = ["Exchange", "Exchanges", "Parts"]

_SLOTS = 2
_LANES = 2
_SPIN_SECONDS = 10e-3
"""So long the host polls without a nap, from the last message on that has ended."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages to other ranks and from them, by way of a slot.

    Args:
        what: the call that they belong to, in words.
        sends: to whom, and which bytes of the slot.
        recvs: from whom, and to where in the slot.
        into: copies from the device, before them.
        out: copies to the device, after them.

    """

    what: str
    sends: tuple[tuple[int, Array], ...]
    recvs: tuple[tuple[int, Array], ...]
    into: tuple[Move, ...]
    out: tuple[Move, ...]


class Parts(Protocol):
    """A slice as this module sees it; see :class:`ringcoll.executors.staging.layers.Slice`."""

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
    """One rank's messages along its rail.

    Args:
        staging: of the communicator.
        failure: what has gone wrong inside the node.
        nbytes: of the messages that an exchange sends, at most, and of those that it receives.

    """

    def __init__(self, staging: Staging, failure: Callable[[], Error | None], nbytes: int) -> None:
        self._staging, self._failure = staging, failure
        self._slot = 2 * nbytes + 2 * ALIGN * staging.fabric.nranks
        self._lanes: list[Lane] = []

    def _lane(self, kind: int) -> Lane:
        while len(self._lanes) < _LANES:
            self._lanes.append(self._staging.lane(_SLOTS, self._slot))
        return self._lanes[kind]

    def ready(self, timeout: float) -> None:
        """Have the kernels for calls of a timeout in seconds."""
        for kind in range(_LANES):
            self._lane(kind).launches(timeout)

    def exchange(
        self,
        kind: int,
        number: int,
        call: Call,
        sends: Sequence[tuple[int, Array]],
        recvs: Sequence[tuple[int, Array]],
    ) -> Exchange:
        """The messages of a slice.

        Args:
            kind: 0: of partial sums; 1: of results.
            number: of the slice in its call.
            call: whose they are, for messages of errors.
            sends: to whom, and which elements of the device; the same may go to several.
            recvs: from whom, and to where.

        """
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
        return Exchange(call.describe(), tuple(ways[0]), tuple(ways[1]), into, out)

    # -- the stream's side -------------------------------------------------------------------------

    def enqueue(self, slices: Sequence[Parts], timeout: float, stream: int) -> None:
        """Enqueue slices: one begins, the one before is folded, and that before it ends."""
        if not slices:
            return
        bases = [self._lane(kind).enqueued for kind in range(_LANES)]
        for part in slices:
            for kind, exchange in enumerate((part.partials, part.results)):
                self._lane(kind).enqueued += exchange is not None
        self._staging.owner.job(lambda: self._carry(slices, bases, timeout))
        for step in range(len(slices) + 2):
            if step < len(slices):
                _each(slices[step].inside, stream)
                self._put(0, step, slices[step].partials, timeout, stream)
            if 1 <= step <= len(slices):
                self._take(0, step - 1, slices[step - 1].partials, timeout, stream)
                _each(slices[step - 1].fold, stream)
                self._put(1, step - 1, slices[step - 1].results, timeout, stream)
            if step >= 2:
                self._take(1, step - 2, slices[step - 2].results, timeout, stream)
                _each(slices[step - 2].outside, stream)

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

    # -- the host's side, on the communicator's thread ---------------------------------------------

    def _carry(self, slices: Sequence[Parts], bases: Sequence[int], timeout: float) -> None:
        """In the order in which the stream puts them."""
        for step in range(len(slices) + 1):
            if step < len(slices):
                self._go(0, bases[0] + step, slices[step].partials, timeout)
            if step >= 1:
                self._go(1, bases[1] + step - 1, slices[step - 1].results, timeout)

    def _go(self, kind: int, number: int, exchange: Exchange | None, timeout: float) -> None:
        if exchange is None:
            return
        staging, lane = self._staging, self._lane(kind)
        await_stream(lane, number, staging.fabric, staging.owner)
        error = self._failure()
        if error is not None:
            raise error
        staging.fabric.check()
        self._exchange(exchange, timeout)
        lane.done(number)

    def _exchange(self, exchange: Exchange, timeout: float) -> None:
        """Send and receive, and wait for the end of both."""
        fabric = self._staging.fabric
        messages = fabric.messages
        if messages is None:
            raise ClosedError(f"rank {fabric.rank} has closed this communicator")
        # Receives first: what is awaited need not be kept aside.
        pending = [
            *((peer, messages.receive(array, peer, SLICES)) for peer, array in exchange.recvs),
            *((peer, messages.send(array, peer, SLICES)) for peer, array in exchange.sends),
        ]
        began = last = time.monotonic()

        def ready() -> bool:
            over = self._staging.owner.over()
            if over is not None:
                raise AbortedError(f"rank {fabric.rank}: given up") from over
            pending[:] = [(peer, transfer) for peer, transfer in pending if not transfer.done()]
            return not pending

        def peers() -> list[int]:
            return sorted({peer for peer, _ in pending})

        def describe() -> str:
            return (
                f"{exchange.what} on rank {fabric.rank}: waited {time.monotonic() - began:.3g} s "
                f"for messages to or from {named(peers())}, which entered the call and stopped "
                f"inside it"
            )

        # Messages move while MPI is called: naps would hold them up as long as they go on.
        left = len(pending)
        while not ready():
            now = time.monotonic()
            if len(pending) < left:
                left, last = len(pending), now
            if now - last > _SPIN_SECONDS:
                deadline = fabric.deadline(timeout)
                fabric.wait(ready, deadline=deadline, describe=describe, peers=peers)
                return
            os.sched_yield()


def _each(enqueue: Sequence[Callable[[int], None]], stream: int) -> None:
    for part in enqueue:
        part(stream)
