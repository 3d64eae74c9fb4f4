"""Records of the CPU executor: what a call runs, its rows bound to memory, the call under way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.arguments.calls import Call
from ringcoll.executors.binding import Binding, UserPart
from ringcoll.executors.contract import Given
from ringcoll.executors.rows import (
    Row,
)
from ringcoll.executors.shared_state import Hello
from ringcoll.plan import Buffer
from ringcoll.tuner.choice import Choice, Limits
from ringcoll.views import view_at

Array = npt.NDArray[Any]


Chosen = Callable[[Call, Choice], None]
"""What the communicator does with each new choice of a call: it logs it."""


@dataclass(slots=True)
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

    given: Given = (0, 0, 0, 0)  # the arrays at hand
    binding: Binding | None = None  # where the rows may be given another count

    def move_to(self, call: Call, given: Given) -> None:
        """Let the rows work on the arrays of a call of the same shape."""
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


@dataclass(slots=True)
class CpuCall:
    """A checked call of this rank with what is kept for the next call of its shape."""

    call: Call  # with the arrays of the last one
    limits: Limits  # without the memory, which the hellos name
    staged: Limits  # with the memory that is assumed where the ranks do not wait for hellos
    options: str  # of the signature
    signature: int
    signature_text: str
    agrees: bool
    hello: Hello
    chosen: Chosen | None = None
    bound: dict[tuple[object, ...], BoundRows] = field(default_factory=dict)
    timeout: float = 60.0
    changes: int = 0

    given: Given = (0, 0, 0, 0)  # of its arrays
    any_class: bool = False  # whether it does not matter which memory peers reach
    shown: str = ""  # what errors and works say of it
    spare: bool = False  # whether its rows may go to another count: it may never come again

    def move_to(self, given: Given) -> None:
        """Take the arrays at other addresses, to which rows are bound when they are to run."""
        call = self.call  # nobody else has it
        send, recv, (start, end, _, _) = call.send, call.recv, given
        if send is not None and start:
            call.send = view_at(start, send.nbytes, send.dtype)
        if recv is not None and end:
            same = end == start and send is not None and recv.nbytes == send.nbytes
            call.recv = call.send if same else view_at(end, recv.nbytes, recv.dtype)
        if not self.any_class:
            self.hello = replace(self.hello, send=given[2], recv=given[3])
        self.given = given  # last: an error before it leaves all to be done again


@dataclass(slots=True)
class ActiveCall:
    """A call under way."""

    prepared: CpuCall
    epoch: int
    bound: BoundRows | None = None
