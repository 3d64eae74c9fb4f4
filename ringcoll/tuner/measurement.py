"""A measured figure, by which calls are chosen, and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Where and when figures were measured; ``record`` is "" where none is kept."""

    machine: str
    date: str
    record: str = ""

    def __str__(self) -> str:
        kept = f", {self.record}" if self.record else ""
        return f"{self.machine}, {self.date}{kept}"


@dataclass(frozen=True, slots=True, eq=False)
class Measured(Generic[T]):
    """A figure: ``of`` a collective that ``by`` names, else ``value``."""

    value: T
    source: Source
    figures: str
    by: Mapping[str, T] = field(default_factory=dict)

    def of(self, collective: str) -> T:
        """The figure of a collective."""
        return self.by.get(collective, self.value)


@dataclass(frozen=True, slots=True, eq=False)
class BySize:
    """When size chooses a protocol: in calls of ``up_to`` bytes that none before it takes.

    ``samples``: sizes of calls that it takes of any collective, one for each kernel that size
    decides; kernels are compiled ahead for these, for the last one behind any call of its kind.
    """

    up_to: Measured[int]
    samples: tuple[int, ...]
