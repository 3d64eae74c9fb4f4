"""The control page of a rank, and mailboxes that carry payloads of any length.

A rank's control segment holds its state, the reason of its abort, an alarm that peers raise, and
two mailboxes of two slots each. A slot is a tag, a length and bytes; it is full when its tag is
the one that the reader waits for. All ranks post round k into slot k mod 2. Round k + 2 may
overwrite it: a rank that posts k + 2 has seen every rank's post of k + 1, and a rank posts k + 1
only after it has read all of round k. The mailbox of subsets serves one rendezvous after another,
whose tags have nothing in common: who leaves one makes sure before that its last round was read.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence

from ringcoll.bootstrap.contract import named
from ringcoll.errors import MachineError, MismatchError
from ringcoll.fabric.liveness import State
from ringcoll.host.fence import Fence

# Words, a cache line each.
_STATE, _SINCE, _REASON, _ALARM, _EXITING, _LEFT = 0, 8, 16, 24, 32, 40
_TEXT, _TEXT_BYTES = 512, 3584
_CALLS = 4096  # offset of the control plane's mailbox
_CALLS_SLOT = 16 << 10
_SUBSETS = _CALLS + 2 * _CALLS_SLOT  # offset of the mailbox through which subsets meet
_SUBSETS_SLOT = 4 << 10
CONTROL_BYTES = _SUBSETS + 2 * _SUBSETS_SLOT

_SLOT_HEADER = 16  # tag, length
# Length of the whole payload, collectives that the rank has entered, length of `what`.
_FIRST = struct.Struct("<QQH")
_WHAT_BYTES = 1024


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

    def posted(self) -> list[bytes]:
        """What both slots hold, whatever its tags."""
        found = [self.read(words[0]) for words in self._words if words[0]]
        return [payload for payload in found if payload is not None]

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
        # A watchdog may declare while the rank's thread does, or a signal handler in the middle.
        self._declaring = threading.RLock()
        self.calls = Mailbox(memory[_CALLS:_SUBSETS], fence)
        self.subsets = Mailbox(memory[_SUBSETS:CONTROL_BYTES], fence)

    @property
    def state(self) -> State:
        """What the rank has declared."""
        value = self.words[_STATE]
        return State(value) if value <= State.PEER_LOST else State.ABORTED

    @property
    def since(self) -> int:
        """When it declared that, in nanoseconds of the host's monotonic clock."""
        return self.words[_SINCE]

    @property
    def reason(self) -> str:
        """Why it aborted."""
        if self._fence:
            self._fence()
        length = min(self.words[_REASON], _TEXT_BYTES)
        return bytes(self._text[:length]).decode("utf-8", "replace")

    def declare(self, state: State, reason: str = "") -> None:
        """Leave the open state; the first declaration counts, but for a later departure."""
        text = reason.encode("utf-8", "replace")[:_TEXT_BYTES]
        with self._declaring:
            if state.left:
                self.words[_LEFT] = 1
            if self.state is not State.OPEN:
                return
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
    def left(self) -> bool:
        """Whether the rank has closed or exited, even if it has failed before."""
        return self.words[_LEFT] != 0

    @property
    def exiting(self) -> bool:
        """Whether this rank's process is about to enter MPI_Finalize."""
        return self.words[_EXITING] != 0

    def exit(self) -> None:
        """Declare that this process is about to enter MPI_Finalize."""
        self.words[_EXITING] = 1


# Waits for (ready, ranks still missing).
Wait = Callable[[Callable[[], bool], Callable[[], list[int]]], None]


class Exchange:
    """Rounds of posts and reads among ranks that map each other's mailboxes.

    Tags start above ``base``, which is the same on every rank.
    """

    def __init__(self, boxes: Sequence[Mailbox], rank: int, base: int = 0) -> None:
        self._boxes = boxes
        self._rank = rank
        self._tag = base  # of the last round; they alternate between the slots and are never 0
        self._has_read = False  # whether this rank has read all of the last round

    def allgather(self, payload: bytes, what: str, wait: Wait, entered: int = 0) -> list[bytes]:
        """Every rank's payload, in rank order; long ones go in several rounds.

        ``what``, the call, is compared among the ranks; ``wait`` raises on loss or deadline.
        ``entered`` is for :meth:`ahead` of the others.
        """
        capacity = self._boxes[self._rank].capacity
        rest = memoryview(payload)
        first = _header(len(payload), what, entered)
        room = capacity - len(first)
        parts = self._round(first + bytes(rest[:room]), wait)
        rest = rest[room:]
        lengths, calls, received = [], [], []
        for part in parts:
            length, _, call, first = _unpacked(part)
            lengths.append(length)
            calls.append(call)
            received.append([first])
        compare_calls(calls)
        longest = max(lengths)
        for _ in range(-(-max(0, longest - room) // capacity)):
            for pieces, part in zip(received, self._round(rest[:capacity], wait), strict=True):
                pieces.append(part)
            rest = rest[capacity:]
        return [b"".join(pieces) for pieces in received]

    def ahead(self) -> dict[int, tuple[str, int, bytes]]:
        """Who has come to the next exchange: call, collectives entered before, and payload."""
        tag, found = self._tag + 1, {}
        for rank, box in enumerate(self._boxes):
            part = box.read(tag) if rank != self._rank and box.full(tag) else None
            if part is not None:
                _, entered, call, payload = _unpacked(part)
                found[rank] = call, entered, payload
        return found

    def fail(self, report: bytes, what: str, wait: Wait) -> None:
        """Report a failure, and return when all ranks have read what this one has posted.

        After it the mailbox may be emptied, which must come before any other post there. A short
        ``report`` is what :meth:`allgather` of a rank returns that has not failed itself.
        """
        if not self._has_read:
            return  # a rank is late or lost, and none can count on another

        def gone_on(box: Mailbox) -> bool:
            # Who has posted again, or left and emptied its mailbox, has read the round before.
            return box.full(self._tag) or not box.full(self._tag - 1)

        # Those that fail alike need no report, but nobody knows whether all do.
        for payload in (_header(len(report), what) + report, b""):
            self._post(payload)
            self._await(gone_on, wait)

    def _round(self, payload: bytes | memoryview, wait: Wait) -> list[bytes]:
        self._post(payload)
        tag = self._tag
        self._await(lambda box: box.full(tag), wait)
        parts = [box.read(tag) for box in self._boxes]
        if any(part is None for part in parts):
            raise MachineError("a peer has overwritten its mailbox before it was read")
        self._has_read = True
        return [part for part in parts if part is not None]

    def _post(self, payload: bytes | memoryview) -> None:
        self._tag, self._has_read = self._tag + 1, False
        self._boxes[self._rank].post(self._tag, payload)

    def _await(self, come: Callable[[Mailbox], bool], wait: Wait) -> None:
        """Wait until this holds of the mailboxes, of each at one time or another."""
        missing = list(range(len(self._boxes)))

        def ready() -> bool:
            while missing and come(self._boxes[missing[-1]]):
                missing.pop()
            return not missing

        wait(ready, lambda: [rank for rank in missing if not come(self._boxes[rank])])


def _header(nbytes: int, what: str, entered: int = 0) -> bytes:
    """What goes before a payload of so many bytes."""
    mine = what.encode()[:_WHAT_BYTES]
    return _FIRST.pack(nbytes, entered, len(mine)) + mine


def _unpacked(part: bytes) -> tuple[int, int, str, bytes]:
    """Length of the whole payload, collectives entered, the call, and the payload's first part."""
    length, entered, named_bytes = _FIRST.unpack_from(part)
    start = _FIRST.size + named_bytes
    return length, entered, part[_FIRST.size : start].decode("utf-8", "replace"), part[start:]


def compare_calls(calls: Sequence[str]) -> None:
    """Raise :class:`MismatchError` if the ranks, in order, came for different calls."""
    groups: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        groups.setdefault(call, []).append(rank)
    if len(groups) > 1:
        sides = "; ".join(f"{named(ranks)}: {call!r}" for call, ranks in groups.items())
        raise MismatchError(f"the ranks make different calls: {sides}")
