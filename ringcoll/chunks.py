"""What a plan names instead of memory: chunks of ranks' buffers, without a size in bytes."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Buffer(Enum):
    """Which memory of a rank a chunk lies in.

    A chunk of WIRE is one message on its way to the rank: written once by a rank of another node,
    read once by the rank itself. :mod:`ringcoll.lower.network` makes them, algorithms do not.
    """

    INPUT = "I"
    OUTPUT = "O"
    SCRATCH = "S"
    WIRE = "W"

    # Members are singletons; the default hash of an Enum is a Python call, this one is C.
    __hash__ = object.__hash__

    def __init__(self, letter: str) -> None:
        self.letter = letter  # ``value`` is a Python call too

    @property
    def given(self) -> bool:
        """Whether it is the caller's memory."""
        return self is Buffer.INPUT or self is Buffer.OUTPUT


class Chunk(NamedTuple):
    """``size`` consecutive chunks of one buffer of one rank, from ``index``. Never bytes."""

    rank: int
    buffer: Buffer
    index: int  # type: ignore[assignment]  # hides tuple.index, of no use on a chunk
    size: int = 1

    def __str__(self) -> str:
        last = f":{self.index + self.size}" if self.size > 1 else ""
        return f"{self.rank}.{self.buffer.value}[{self.index}{last}]"

    def units(self) -> tuple[Chunk, ...]:
        """The chunks of size 1 that this one is made of."""
        if self.size == 1:
            return (self,)
        return tuple(Chunk(self.rank, self.buffer, self.index + i) for i in range(self.size))
