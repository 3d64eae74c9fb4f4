"""Messages along rails: slices of a call go to ranks of other nodes and come from them.

A slice has up to two exchanges, of partial sums and of results. Each kind has a lane of its own,
and while one slice is on the network the stream works on its neighbours. Host memory only carries:
what comes is folded by kernels.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from ringcoll.arguments.calls import Call
from ringcoll.dtypes import DType
from ringcoll.errors import Error
from ringcoll.executors.cuda.params import start_of
from ringcoll.executors.drive import drive
from ringcoll.executors.pairs import Pairs
from ringcoll.executors.staging.executor import Staging, await_stream
from ringcoll.executors.staging.lane import Lane
from ringcoll.executors.staging.pieces import ALIGN, Move

__all__ = ["Exchange", "Exchanges", "Parts", "Wait"]

_SLOTS = 2
_LANES = 2
_SPIN_SECONDS = 2e-3
"""So long the host polls without a nap, from the last thing on that has happened."""

Array = npt.NDArray[Any]

Wait = Callable[[Callable[[], bool], float], None]
"""Takes (ready, seconds); returns when it is, raises when a rank is lost, aborted or late."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages to other ranks and from them, by way of a slot.

    Args:
        calls: sends and receives of host memory.
        into: copies from the device, before them.
        out: copies to the device, after them.

    """

    calls: tuple[Call, ...]
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
        host: pairs of the ranks' host memory; the communicator's thread alone runs them.
        wait: of these.
        failure: what has gone wrong inside the node.
        nbytes: of the messages that an exchange sends, at most, and of those that it receives.

    """

    def __init__(
        self,
        staging: Staging,
        host: Pairs,
        wait: Wait,
        failure: Callable[[], Error | None],
        nbytes: int,
    ) -> None:
        self._staging, self._host, self._wait, self._failure = staging, host, wait, failure
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
        dtype: DType,
        sends: Sequence[tuple[int, Array]],
        recvs: Sequence[tuple[int, Array]],
    ) -> Exchange:
        """The messages of a slice.

        Args:
            kind: 0: of partial sums; 1: of results.
            number: of the slice in its call.
            call: whose they are, for messages of errors.
            dtype: of the elements.
            sends: to whom, and which elements of the device; the same may go to several.
            recvs: from whom, and to where.

        """
        slot, at = self._lane(kind).slot(number), 0
        calls = list[Call]()
        moves: tuple[dict[int, Move], dict[int, Move]] = {}, {}
        for side, (way, messages) in enumerate(zip(moves, (sends, recvs), strict=True)):
            for peer, array in messages:
                start = start_of(array)
                if start not in way:
                    way[start] = Move(start, at, array.nbytes)
                    at = -(-(at + array.nbytes) // ALIGN) * ALIGN
                begin = way[start].slot
                view = slot[begin : begin + array.nbytes].view(dtype.numpy)
                calls.append(
                    Call(
                        "send",
                        call.rank,
                        None if side else view,
                        view if side else None,
                        array.size,
                        dtype,
                        nbytes=array.nbytes,
                        peer=peer,
                        terms=call.describe(),
                    )
                )
        return Exchange(tuple(calls), tuple(moves[0].values()), tuple(moves[1].values()))

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
        try:
            tasks = [self._host.task([call], timeout) for call in exchange.calls]
            drive(tasks, lambda ready: self._spin(ready, timeout))
        finally:
            self._host.running.clear()
        lane.done(number)

    def _spin(self, ready: Callable[[], bool], timeout: float) -> None:
        """Messages move while MPI is called: naps would hold them up as long as they go on."""
        until = time.monotonic() + _SPIN_SECONDS
        while time.monotonic() < until:
            if ready():
                return
            os.sched_yield()
        self._wait(ready, timeout)


def _each(enqueue: Sequence[Callable[[int], None]], stream: int) -> None:
    for part in enqueue:
        part(stream)
