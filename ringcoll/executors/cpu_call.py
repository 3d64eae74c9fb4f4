"""Records of the CPU executor: what a call runs, its rows bound to memory, the call under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ringcoll.arguments.calls import Call
from ringcoll.executors.shared_state import Hello
from ringcoll.launch import Launch, Layout
from ringcoll.plan import Buffer, Plan


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


@dataclass(slots=True)
class CpuCall:
    """A checked call of this rank with what is kept for the next call with the same arrays."""

    call: Call
    select: Select
    signature: int
    signature_text: str
    agrees: bool
    hello: Hello
    alike: bool = False
    bound: dict[tuple[object, ...], BoundRows] = field(default_factory=dict)
    timeout: float = 60.0
    changes: int = 0

    anywhere: ClassVar[bool] = False  # its rows are bound to these addresses alone


@dataclass(slots=True)
class ActiveCall:
    """A call under way."""

    prepared: CpuCall
    epoch: int
    bound: BoundRows | None = None
