"""Messages, and v-variants that are sends and receives, kept by shape: alone or in a group."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringcoll.arguments.calls import Call
from ringcoll.communicator.cpu.waiting import wait_for
from ringcoll.communicator.failures import more_frames
from ringcoll.executors.cpu.small_calls import SmallCalls
from ringcoll.executors.drive import drive
from ringcoll.executors.pair_calls import ActivePairCall
from ringcoll.executors.point_to_point import Pairs
from ringcoll.executors.shared_state import MESSAGES
from ringcoll.fabric import Fabric
from ringcoll.views import address_of, start_of

if TYPE_CHECKING:
    from ringcoll.communicator.cpu.progress import Progress
    from ringcoll.communicator.rank import RankState

_Piece = tuple[int, slice] | None
"""Which of the buffers, sendbuf and recvbuf, an array lies in, and where, in elements."""


Left = tuple["Exchange", Any, Any, Sequence[tuple[int, bool]], str]
"""Sends and receives that the compiled part has entered: what is kept of them, ``sendbuf`` and
``recvbuf``, of each message its epoch and whether it has ended, and the name of their call."""


@dataclass(slots=True, eq=False)
class Exchange:
    """Checked sends and receives without their arrays, and the options of their call."""

    calls: Sequence[tuple[Call, _Piece, _Piece]]
    timeout: float | None
    later: bool
    taken: int = 0  # see SmallCalls.add_exchange

    def on(self, sendbuf: Any, recvbuf: Any) -> list[Call]:
        """The calls on other arrays of the same shape that share no memory."""
        if sendbuf is not None and sendbuf.ndim != 1:
            sendbuf = sendbuf.reshape(-1)
        if recvbuf is not None and recvbuf.ndim != 1:
            recvbuf = recvbuf.reshape(-1)
        flat = sendbuf, recvbuf
        return [
            call.on(
                None if send is None else flat[send[0]][send[1]],
                None if recv is None else flat[recv[0]][recv[1]],
            )
            for call, send, recv in self.calls
        ]

    def seconds(self, own: float | None, fabric: Fabric) -> float:
        """What a wait may take, with a timeout of the call's own, or without: None."""
        seconds = self.timeout if own is None else own
        return fabric.timeout if seconds is None else seconds

    def messages_on(self, sendbuf: Any, recvbuf: Any) -> list[Call]:
        """The same without the segment that the rank sends to itself."""
        calls = self.on(sendbuf, recvbuf)
        return [call for call in calls if call.send is None or call.recv is None]


def keep(
    calls: Sequence[Call], buffers: Sequence[Any], timeout: float | None, *, later: bool
) -> Exchange:
    """What is kept of calls on two numpy arrays that share no memory."""
    kept = [
        (
            call.on(None, None),
            _piece(call.send, buffers, (0, 1)),
            _piece(call.recv, buffers, (1, 0)),
        )
        for call in calls
    ]
    return Exchange(kept, timeout, later)


def _piece(array: Any, buffers: Sequence[Any], order: Sequence[int]) -> _Piece:
    start = start_of(array)
    for number in order:  # an empty array, which lies nowhere, is of the first
        buffer = buffers[number]
        if array is None or buffer is None:
            continue
        at = start - address_of(buffer) if start else 0
        if 0 <= at < max(1, buffer.nbytes):
            first = at // array.itemsize
            return number, slice(first, first + array.size)
    return None


@dataclass(slots=True, eq=False)
class GroupedExchange:
    """A kept call in a group; ``call``: name, sendbuf, recvbuf, ends and options."""

    kept: Exchange
    call: tuple[str, Any, Any, Any, dict[str, Any]]
    small: SmallCalls | None

    def calls(self) -> list[Call]:
        """Its sends and receives."""
        _, sendbuf, recvbuf, _, _ = self.call
        return self.kept.on(sendbuf, recvbuf)

    def learn(self) -> None:
        """After it has been made: let the compiled part take it, where that does not know it."""
        if self.small is not None and self.kept.taken != self.small.whole:
            self.small.add_exchange(MESSAGES, self.kept, self.call)


def made_at_once(
    progress: Progress, grouped: Sequence[GroupedExchange], seconds: float | None
) -> bool:
    """Let the compiled part make all messages of a rank's group, with one timeout, if it can."""
    small = grouped[0].small
    if small is None:
        return False
    made = small.exchange_group(tuple([each.call for each in grouped]), seconds)
    if made is not True and made is not False:
        progress.end(made)
    return made is not False


def run_exchange(state: RankState, calls: Sequence[Call], timeout: float | None) -> None:
    """Run sends and receives of one rank, each of another pair or direction."""
    if state.closed or state.inherited or state.broken is not None:  # saves a call
        state.usable()
    pairs: Any = state.pairs
    seconds, begun = state.fabric.timeout if timeout is None else timeout, False
    try:
        state.fabric.check()
        begun = len(calls) > 1  # a refused call alone has no effect on other ranks
        left = _begin(pairs, calls, seconds)
        if left:
            _end(state, left, seconds)
    except BaseException as error:
        limit = more_frames(error)
        try:
            state.raise_settled(error, begun=begun)
        finally:
            sys.setrecursionlimit(limit)


def go_on(state: RankState, left: Sequence[Left], seconds: float | None) -> bool:
    """Run what the compiled part has entered and could not end, in the order of the calls.

    ``seconds`` is a timeout of the call's own.
    """
    pairs: Any = state.pairs
    [(kept, sendbuf, recvbuf, halves, _)] = left
    timeout = kept.seconds(seconds, state.fabric)
    _end(state, pairs.resume(kept.messages_on(sendbuf, recvbuf), halves, timeout), timeout)
    return True


def _end(state: RankState, left: Sequence[ActivePairCall], seconds: float) -> None:
    pairs: Any = state.pairs
    tasks = [pairs.half(half) for half in left]
    drive(tasks, lambda ready: wait_for([state], ready, seconds))


def _begin(pairs: Pairs, calls: Sequence[Call], timeout: float) -> list[ActivePairCall]:
    """Enter the calls, and end those that can within some microseconds; returns the rest.

    A send that fits moves at once. The rank's own segment is last: no other waits for it.
    """
    left: list[ActivePairCall] = []
    own: list[Call] = []
    for call in calls:
        if call.send is not None and call.recv is not None:
            own.append(call)
            continue
        half = ActivePairCall(call, timeout)
        pairs.enter(half)
        if not pairs.finish(half):
            left.append(half)
    for call in own:
        if call.recv is not None:
            call.recv[...] = call.send
    return pairs.spin(left, pairs.finish) if left else left
