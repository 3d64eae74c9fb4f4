"""Records of the CPU executor: what a call runs, its rows bound to memory, the call under way."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.arguments.calls import Call
from ringcoll.bounded import evict
from ringcoll.executors.binding import RowArrays, UserPart
from ringcoll.executors.contract import Given
from ringcoll.executors.cpu.recount import Recount
from ringcoll.executors.rows import Row
from ringcoll.executors.shared_state import ANY_COUNT, Hello
from ringcoll.plan import Buffer
from ringcoll.tuner.choice import Choice, Limits
from ringcoll.views import view_at

Array = npt.NDArray[Any]


_NOTHING: Array = np.empty(0, np.uint8)

COUNTS = 16
"""Rows that a prepared call keeps: by the half of SCRATCH, and by the count."""

PLACES = 64
"""The same where peers' buffers take part: by the half, and by where these lie."""


def signature_of(digest: int, count: int) -> int:
    """The word that peers compare: ranks with other counts differ in it; 0 is none."""
    return (digest + count) % (1 << 64) or 1


Chosen = Callable[[Call, Choice], None]
"""What the communicator does with each new choice of a call: it logs it."""


@dataclass(slots=True, eq=False)
class BoundRows:
    """A program bound to memory for one half of SCRATCH."""

    total: bool
    lanes: list[Iterable[Row]]
    """The rows of each lane: a tuple, or what binds them anew each time."""
    messages: frozenset[int] = frozenset()
    """The indices of the lanes whose rows are messages between nodes."""
    sources: frozenset[int] = frozenset()
    """The ranks of other nodes from which messages come."""
    user: dict[tuple[int, Buffer], Array] = field(default_factory=dict)
    """The arrays of the call, which lanes of many rows bind anew each time."""
    user_parts: list[UserPart] = field(default_factory=list)
    works: list[RowArrays] = field(default_factory=list)
    """What rows that move data do, in their order."""

    given: Given = ()  # the arrays at hand
    recount: Recount | None = None  # where the rows may be given another count
    count: int = 0
    again: bool = False  # whether their count has come again: they stay with it
    spare: Hashable = None  # by what a call that is not kept leaves its rows to the next one

    def move_to(self, call: Call, given: Given) -> None:
        """Let the rows work on the arrays of a call of the same shape."""
        self.given = ()  # an interrupt below leaves all to be done again
        user = {Buffer.INPUT: call.send, Buffer.OUTPUT: call.recv}
        for buffer, array in user.items():
            if array is not None:
                self.user[call.rank, buffer] = array
        seen: dict[tuple[Buffer, bool], Array] = {}
        for found, k, key, part in self.user_parts:
            whole = seen.get(key)
            if whole is None:
                whole = self.user[call.rank, key[0]]
                seen[key] = whole = whole.view(np.uint8) if key[1] else whole
            found[k] = whole[part]
        self.given = given

    def leave(self) -> None:
        """Let go of the arrays of a call."""
        self.given = ()
        self.user.clear()
        for found, k, _, _ in self.user_parts:
            found[k] = _NOTHING


@dataclass(slots=True, eq=False)
class CpuCall:
    """A checked call of this rank with what is kept for the next call of its shape.

    It serves all ``counts``: those for which the same plan runs in as many slices. A launch is
    given one of them with its addresses, and patches what depends on either.
    """

    call: Call  # with the arrays and the count of the last one
    limits: Limits  # without the memory, which the hellos name
    staged: Limits  # with the memory that is assumed where the ranks do not wait for hellos
    options: str  # of the signature
    digest: int  # of the signature without the count
    signature_text: str  # with ANY_COUNT where the hello has the count
    agrees: bool
    hello: Hello
    chosen: Chosen | None = None
    bound: dict[tuple[object, ...], BoundRows] = field(default_factory=dict)
    timeout: float = 60.0  # unless a launch has its own
    changes: int = 0

    given: Given = ()  # of its arrays
    any_class: bool = False  # whether it does not matter which memory peers reach
    shown: str = ""  # what errors and works say of it, with ANY_COUNT
    counts: range = range(0)  # others than its own that it serves, known once rows are bound
    spare: dict[int, BoundRows] = field(default_factory=dict)
    """By the half of SCRATCH the rows of a count that had not come before."""
    taken: dict[int, None] = field(default_factory=dict)
    """Counts whose rows others have now: they get rows of their own when they come again."""
    each: tuple[int, int, int] = (0, 0, 0)  # bytes of both arrays and of the call for a count of 1
    once: bool = False  # whether it is not kept

    def shown_on(self, given: Given | None) -> str:
        """What errors and works say of a launch."""
        count = given[4] if given is not None and len(given) > 4 else self.call.count
        return self.shown.replace(ANY_COUNT, f"count={count}", 1)

    def has_come(self, count: int) -> bool:
        """Whether a count has rows, or has had some."""
        return count in self.taken or (0, count) in self.bound or (1, count) in self.bound

    def take(self, half: int) -> BoundRows | None:
        """Patch rows of another count for that of the call, which has not come or come rarely.

        None: it is to have rows of its own.
        """
        rows, count = self.spare.get(half), self.call.count
        if rows is None or rows.again or count in self.taken:
            if len(self.bound) < COUNTS:
                return None
            rows = next((rows for key, rows in self.bound.items() if key[0] == half), None)
        # First: an exception may leave them half patched.
        if rows is None or rows.recount is None or self.bound.pop((half, rows.count), None) is None:
            return None
        before = rows.count
        if not rows.recount.to(count):
            self.bound[half, before] = rows
            return None
        rows.count, rows.given, rows.again = count, (), False
        self.taken.pop(count, None)
        self.taken[before] = None
        if len(self.taken) > 4 * COUNTS:
            del self.taken[next(iter(self.taken))]
        self.bound[half, count] = self.spare[half] = rows
        return rows

    def keep(self, key: tuple[Any, ...], rows: BoundRows) -> None:
        """Keep rows for the next call; they may go to another count unless theirs comes again."""
        if rows.recount is not None and rows.count not in self.taken:
            self.spare[key[0]] = rows
        evict(self.bound, COUNTS if self.counts else PLACES)
        self.bound[key] = rows

    def move_to(self, given: Given) -> None:
        """Take the arrays at other addresses, to which rows are bound when they are to run."""
        call = self.call  # nobody else has it
        send, recv, start, end = call.send, call.recv, given[0], given[1]
        self.given = ()  # an error below leaves all to be done again
        sent, received = 0 if send is None else send.nbytes, 0 if recv is None else recv.nbytes
        if len(given) > 4 and given[4] != call.count:
            count, (sent, received, nbytes) = given[4], self.each
            sent, received = count * sent, count * received
            call.count, hello = 0, self.hello
            hello.count, hello.signature = count, signature_of(self.digest, count)
            call.nbytes, call.count = count * nbytes, count
        if send is not None and start:
            send = call.send = view_at(start, sent, send.dtype)
        if recv is not None and end:
            same = end == start and sent == received
            call.recv = send if same else view_at(end, received, recv.dtype)
        if not self.any_class:
            self.hello = replace(self.hello, send=given[2], recv=given[3])
        self.given = given


@dataclass(slots=True)
class ActiveCall:
    """A call under way."""

    prepared: CpuCall
    epoch: int
    signature: int  # the prepared call may be of another count before it is compared
    timeout: float  # seconds that a wait of it may take
    bound: BoundRows | None = None
