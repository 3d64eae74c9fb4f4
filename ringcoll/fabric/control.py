"""The control page of a rank, and mailboxes that carry payloads of any length.

A rank's control segment holds its state, the reason of its abort, an alarm that peers raise, and
two mailboxes of two slots each. A slot is a tag, a length and bytes; it is full when its tag is
the one that the reader waits for. All ranks post round k into slot k mod 2. Round k + 2 may
overwrite it: a rank that posts k + 2 has seen every rank's post of k + 1, and a rank posts k + 1
only after it has read all of round k.
"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from itertools import count

from ringcoll.bootstrap.contract import named
from ringcoll.errors import (
    AbortedError,
    DeadlineError,
    Error,
    MachineError,
    MismatchError,
    RankLostError,
)
from ringcoll.host.fence import Fence

__all__ = ["CONTROL_BYTES", "Control", "Exchange", "Mailbox", "State", "sides"]

_STATE, _SINCE, _REASON, _ALARM, _EXITING = 0, 8, 16, 24, 32  # words, a cache line each
_TEXT, _TEXT_BYTES = 512, 3584
_CALLS = 4096  # offset of the control plane's mailbox
_CALLS_SLOT = 16 << 10
_SUBSETS = _CALLS + 2 * _CALLS_SLOT  # offset of the mailbox through which subsets meet
_SUBSETS_SLOT = 4 << 10
CONTROL_BYTES = _SUBSETS + 2 * _SUBSETS_SLOT

_SLOT_HEADER = 16  # tag, length
_FIRST = struct.Struct("<QH")  # length of the whole payload, length of `what`
_WHAT_BYTES = 1024
_TOLD = re.compile(r"rank \d+ aborted: ")


class State(IntEnum):
    """What a rank has said about itself; a rank that has said OPEN may yet be dead.

    EXITED: it ended or dropped its fabric without closing it. From ABORTED on it has given up:
    EXPIRED: a deadline has passed; UNLIKE: the ranks made different calls; BEREFT: it needs a rank
    that is lost.
    """

    OPEN = 0
    CLOSED = 1
    EXITED = 2
    ABORTED = 3
    EXPIRED = 4
    UNLIKE = 5
    BEREFT = 6

    @property
    def given_up(self) -> bool:
        """Whether the others must not wait for the rank, whatever it was to do."""
        return self >= State.ABORTED

    @property
    def left(self) -> bool:
        """Whether the rank takes part no more, without having given up."""
        return self in (State.CLOSED, State.EXITED)

    def error(self, who: str, reason: str) -> Error:
        """What the others raise when ``who`` has given up."""
        if _TOLD.match(reason):  # by another, of whom ``who`` had heard
            return _ERRORS[self](reason)
        verb = "aborted" if self is State.ABORTED else "gave up"
        return _ERRORS[self](f"{who} {verb}: {reason}")

    @staticmethod
    def of(error: type[BaseException]) -> State:
        """The state of a rank that gives up by an error of this class."""
        return next((state for state, kind in _ERRORS.items() if kind is error), State.ABORTED)


_ERRORS: Mapping[State, type[Error]] = {
    State.ABORTED: AbortedError,
    State.EXPIRED: DeadlineError,
    State.UNLIKE: MismatchError,
    State.BEREFT: RankLostError,
}


class Mailbox:
    """Two slots of one rank: written by that rank, read by all."""

    def __init__(self, memory: memoryview, fence: Fence | None) -> None:
        half = len(memory) // 2
        self._bytes = (memory[:half], memory[half:])
        self._words = tuple(part.cast("Q") for part in self._bytes)
        self._fence = fence
        self.capacity = half - _SLOT_HEADER

    def post(self, tag: int, payload: bytes | memoryview) -> None:
        """Fill the slot of ``tag``."""
        words, data = self._words[tag & 1], self._bytes[tag & 1]
        words[0] = 0
        if self._fence:
            self._fence()
        words[1] = len(payload)
        data[_SLOT_HEADER : _SLOT_HEADER + len(payload)] = payload
        if self._fence:
            self._fence()
        words[0] = tag

    def full(self, tag: int) -> bool:
        """Whether the slot of ``tag`` holds it."""
        return self._words[tag & 1][0] == tag

    def read(self, tag: int) -> bytes | None:
        """What was posted under ``tag``; None if it is not there, or no longer."""
        words, data = self._words[tag & 1], self._bytes[tag & 1]
        if words[0] != tag:
            return None
        if self._fence:
            self._fence()
        payload = bytes(data[_SLOT_HEADER : _SLOT_HEADER + min(words[1], self.capacity)])
        if self._fence:
            self._fence()
        return payload if words[0] == tag else None

    def clear(self) -> None:
        """Empty both slots."""
        for words in self._words:
            words[0] = 0


class Control:
    """The control segment of one rank."""

    def __init__(self, memory: memoryview, fence: Fence | None) -> None:
        self.words = memory[:_TEXT].cast("Q")
        self.alarm = self.words[_ALARM : _ALARM + 1]  # not zero: there is an abort to be read
        self._text = memory[_TEXT : _TEXT + _TEXT_BYTES]
        self._fence = fence
        self.calls = Mailbox(memory[_CALLS:_SUBSETS], fence)
        self.subsets = Mailbox(memory[_SUBSETS:CONTROL_BYTES], fence)

    @property
    def state(self) -> State:
        """What the rank has said."""
        value = self.words[_STATE]
        return State(value) if value <= State.BEREFT else State.ABORTED

    @property
    def since(self) -> int:
        """When it said so, in nanoseconds of the host's monotonic clock."""
        return self.words[_SINCE]

    @property
    def reason(self) -> str:
        """Why it aborted."""
        if self._fence:
            self._fence()
        length = min(self.words[_REASON], _TEXT_BYTES)
        return bytes(self._text[:length]).decode("utf-8", "replace")

    def say(self, state: State, reason: str = "") -> None:
        """Leave the open state; the first word counts."""
        if self.state is not State.OPEN:
            return
        text = reason.encode("utf-8", "replace")[:_TEXT_BYTES]
        self._text[: len(text)] = text
        self.words[_REASON] = len(text)
        self.words[_SINCE] = time.monotonic_ns()
        if self._fence:
            self._fence()
        self.words[_STATE] = state

    def alert(self) -> None:
        """Raise this rank's alarm."""
        self.alarm[0] = 1

    @property
    def exiting(self) -> bool:
        """Whether this rank's process is about to enter MPI_Finalize."""
        return self.words[_EXITING] != 0

    def exit(self) -> None:
        """Say that this process is about to enter MPI_Finalize."""
        self.words[_EXITING] = 1


# Waits until a rank's slot is full: (ready, ranks still missing).
Wait = Callable[[Callable[[], bool], Callable[[], list[int]]], None]


class Exchange:
    """Rounds of posts and reads among ranks that know each other's mailboxes.

    Args:
        boxes: one per rank.
        rank: this rank.
        base: tags start above it; the same on every rank.

    """

    def __init__(self, boxes: Sequence[Mailbox], rank: int, base: int = 0) -> None:
        self._boxes = boxes
        self._rank = rank
        self._tags = count(base + 1)  # they alternate between the slots and are never 0

    def allgather(self, payload: bytes, what: str, wait: Wait) -> list[bytes]:
        """Every rank's payload, in rank order.

        Args:
            payload: any length; long ones go in several rounds.
            what: the call, compared among the ranks.
            wait: returns when its first argument does; raises on loss or deadline.

        Raises:
            MismatchError: the ranks came for different calls; on every rank alike.

        """
        mine = what.encode()[:_WHAT_BYTES]
        capacity = self._boxes[self._rank].capacity
        rest = memoryview(payload)
        first = _FIRST.pack(len(payload), len(mine)) + mine
        room = capacity - len(first)
        parts = self._round(first + bytes(rest[:room]), wait)
        rest = rest[room:]
        lengths, calls, received = [], [], []
        for part in parts:
            length, named_bytes = _FIRST.unpack_from(part)
            start = _FIRST.size + named_bytes
            lengths.append(length)
            calls.append(part[_FIRST.size : start].decode("utf-8", "replace"))
            received.append([part[start:]])
        if len(set(calls)) > 1:
            raise MismatchError(f"the ranks make different calls: {sides(calls)}")
        longest = max(lengths)
        for _ in range(-(-max(0, longest - room) // capacity)):
            for pieces, part in zip(received, self._round(rest[:capacity], wait), strict=True):
                pieces.append(part)
            rest = rest[capacity:]
        return [b"".join(pieces) for pieces in received]

    def _round(self, payload: bytes | memoryview, wait: Wait) -> list[bytes]:
        tag = next(self._tags)
        self._boxes[self._rank].post(tag, payload)
        missing = list(range(len(self._boxes)))

        def ready() -> bool:
            while missing and self._boxes[missing[-1]].full(tag):
                missing.pop()
            return not missing

        def absent() -> list[int]:
            return [rank for rank in missing if not self._boxes[rank].full(tag)]

        wait(ready, absent)
        parts = [box.read(tag) for box in self._boxes]
        if any(part is None for part in parts):
            raise MachineError("a peer has overwritten its mailbox before it was read")
        return [part for part in parts if part is not None]


def sides(calls: Sequence[str]) -> str:
    """Who makes which call, for messages."""
    groups: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        groups.setdefault(call, []).append(rank)
    return "; ".join(f"{named(ranks)}: {call!r}" for call, ranks in groups.items())
