"""Records of the CPU executor: what a call runs, its rows bound to memory, the call under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.arguments.calls import Call
from ringcoll.executors.contract import Given
from ringcoll.executors.rows import Place
from ringcoll.executors.shared_state import Hello
from ringcoll.launch import Launch, Layout
from ringcoll.plan import Buffer, Plan
from ringcoll.views import view_at

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class CpuChoice:
    """What a call runs: the algorithm's plan, its launch and where its elements lie."""

    plan: Plan
    launch: Launch
    layout: Layout


Select = Callable[[Call, frozenset[Buffer], bool, int], CpuChoice]
"""(call, mapped, in place, bytes of a SCRATCH half) -> choice; pure, equal on all ranks."""


@dataclass(slots=True)
class BoundRows:
    """A program bound to memory for one half of SCRATCH."""

    total: bool
    lanes: list[Callable[[], Any]]
    """Each gives the rows of a lane: a kept tuple, or a fresh iterator."""
    messages: frozenset[int] = frozenset()
    """The indices of the lanes whose rows are messages between nodes."""
    sources: frozenset[int] = frozenset()
    """The ranks of other nodes from which messages come."""
    user: dict[tuple[int, Buffer], Array] = field(default_factory=dict)
    """The arrays of the call, which lanes of many rows bind anew each time."""
    places: list[Place] = field(default_factory=list)

    def place(self, rank: int, buffers: Mapping[Buffer, Array]) -> None:
        """Let the rows work on other arrays of this rank, of the same shape."""
        given: dict[tuple[Buffer, bool], Array] = {}
        for buffer, array in buffers.items():
            self.user[rank, buffer] = given[buffer, False] = array
            given[buffer, True] = array.view(np.uint8)
        for found, k, key, part in self.places:
            found[k] = given[key][part]


@dataclass(slots=True)
class CpuCall:
    """A checked call of this rank with what is kept for the next call of its shape."""

    call: Call  # with the arrays of the last one
    select: Select
    signature: int
    signature_text: str
    agrees: bool
    hello: Hello
    alike: bool = False
    bound: dict[tuple[object, ...], BoundRows] = field(default_factory=dict)
    timeout: float = 60.0
    changes: int = 0

    given: Given = (0, 0, 0, 0)  # of the arrays to which its rows are bound
    anywhere: bool = False  # whether it does not matter which memory peers reach

    def place(self, rank: int, given: Given) -> None:
        """Bind the rows to the arrays at other addresses."""
        call = self.call
        send, recv = (
            array if array is None or not at else view_at(at, array.nbytes, array.dtype)
            for array, at in zip((call.send, call.recv), given, strict=False)
        )
        self.call, self.given = replace(call, send=send, recv=recv), given
        if given[2:] != (self.hello.send, self.hello.recv) and not self.anywhere:
            self.hello = replace(self.hello, send=given[2], recv=given[3])
        sides = (Buffer.INPUT, send), (Buffer.OUTPUT, recv)
        buffers = {side: array for side, array in sides if array is not None}
        for bound in self.bound.values():
            bound.place(rank, buffers)


@dataclass(slots=True)
class PlacedCall:
    """A prepared call and the addresses of its buffers, which are bound when it runs."""

    ready: CpuCall
    given: Given

    @property
    def timeout(self) -> float:
        """Seconds that a wait of it may take."""
        return self.ready.timeout


@dataclass(slots=True)
class ActiveCall:
    """A call under way."""

    prepared: CpuCall
    epoch: int
    bound: BoundRows | None = None
