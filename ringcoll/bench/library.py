"""A library whose calls are timed: ringcoll, or a peer beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from ringcoll.bench.cases import Case

__all__ = ["Library", "Operation", "Place"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank's input and output of one call lie.

    Args:
        in_place: they share memory.
        input: what the rank contributes; None where it contributes nothing.
        output: what it receives; None where it receives nothing.
        whole: in place, the larger buffer that holds both.

    """

    in_place: bool
    input: Array | None
    output: Array | None
    whole: Array | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """A call that is ready to be timed, and where its result will lie."""

    call: Callable[[], object]
    output: Array | None


class Library(Protocol):
    """Something that runs collectives on a rank's buffers."""

    name: str

    def algorithm(self, case: Case) -> str:
        """What runs it."""

    def operation(self, case: Case, place: Place) -> Operation | None:
        """The call; None where the library has no such call."""

    def unable(self, case: Case) -> str | None:
        """Why it has no call for this at all; None if it has one."""
