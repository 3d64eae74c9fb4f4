"""What ringcoll needs in order to begin: a rank, their number, and one way to exchange bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Bootstrap(Protocol):
    """Any object with these three is a bootstrap."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def nranks(self) -> int:
        """How many ranks there are."""

    def allgather(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes in rank order; collective; lengths may differ."""


class SingleBootstrap:
    """The bootstrap of a process that is alone."""

    rank = 0
    nranks = 1

    def allgather(self, payload: bytes) -> list[bytes]:
        """The payload itself."""
        return [payload]


def named(ranks: Sequence[int]) -> str:
    """``rank 2`` or ``ranks 1, 2``, for messages."""
    listed = ", ".join(map(str, ranks))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
