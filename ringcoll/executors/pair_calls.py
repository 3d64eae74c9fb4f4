"""Records of point-to-point: what is kept of a message's shape, and a half of a call under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from ringcoll.arguments.calls import Call
from ringcoll.executors.rows import Signal, Wait
from ringcoll.executors.shared_state import Hello, Words

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Landing:
    """The one row of each message of a pair that fits its landing zone, for one parity of epochs.

    What it waits for and posts depends on no count; its work is a copy from or to the zone.
    """

    waits: tuple[Wait, ...]
    signals: tuple[Signal, ...]
    zone: Array


@dataclass(slots=True, eq=False)
class PreparedPair:
    """What depends on the shape of a message, and not on where its array lies."""

    hello: Hello
    text: str
    own: int
    """The index of the pair in this rank's words."""
    other: int
    """The same in the peer's words."""
    landings: list[Landing | None]
    """By epoch & 1, once known, the same for all messages of the pair that fit; else empty."""


@dataclass(slots=True, eq=False)
class ActivePairCall:
    """One half of a pair's call under way on this rank; its epoch is 0 before it has entered."""

    call: Call
    timeout: float
    epoch: int = 0
    prepared: PreparedPair | None = None
    awaited: Sequence[tuple[Words, int, int]] = ()
    """Words, index and value of what its one row waits for; empty until it is polled."""
    landing: Landing | None = None

    @property
    def sends(self) -> bool:
        """Whether this rank is the sender."""
        return self.call.send is not None


def shape_of(call: Call, *, sends: bool) -> tuple[object, ...]:
    """What the preparation of a message depends on."""
    return (
        call.peer,
        sends,
        call.count,
        call.dtype.name,
        call.exact,
        call.shown,
        call.custom_signature,
        call.tag if call.matched else "",
    )
