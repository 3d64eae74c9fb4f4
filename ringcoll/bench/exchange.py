"""What the ranks tell each other between measurements, by the public calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ringcoll.communicator.public import Communicator

__all__ = ["agree", "gather_bytes", "gather_numbers"]


def gather_numbers(comm: Communicator, numbers: Sequence[float]) -> list[list[float]]:
    """Every rank's numbers, in rank order; each rank brings equally many."""
    mine = np.array(numbers, np.float64)
    every = np.zeros((comm.nranks, mine.size), np.float64)
    comm.all_gather(mine, every.reshape(-1))
    rows: list[list[float]] = every.tolist()
    return rows


def gather_bytes(comm: Communicator, payload: bytes) -> list[bytes]:
    """Every rank's bytes, in rank order; lengths may differ."""
    lengths = [int(row[0]) for row in gather_numbers(comm, [len(payload)])]
    longest = max(lengths)
    mine = np.zeros(longest, np.uint8)
    mine[: len(payload)] = np.frombuffer(payload, np.uint8)
    every = np.zeros(comm.nranks * longest, np.uint8)
    comm.all_gather(mine, every)
    parts = every.reshape(comm.nranks, longest)
    return [part[:length].tobytes() for part, length in zip(parts, lengths, strict=True)]


def agree(comm: Communicator, number: int) -> int:
    """What rank 0 says; below 2⁵³."""
    return int(gather_numbers(comm, [number])[0][0])
