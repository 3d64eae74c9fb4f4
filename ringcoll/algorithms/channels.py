"""Channels: several rings side by side, for the algorithms that go along rings."""

from __future__ import annotations

from ringcoll.algorithms import ALGORITHMS, options
from ringcoll.errors import ArgumentError

__all__ = ["alternating", "channelled"]


def channelled(
    where: str, collective: str, algorithm: str | None, nranks: int, channels: int | None
) -> tuple[str | None, list[tuple[int, ...]] | None]:
    """The algorithm that so many channels multiply, and their rings.

    Args:
        where: the call and its rank, for the error.
        collective: its name.
        algorithm: a name; None leaves it to the library.
        nranks: of the communicator.
        channels: how many rings, by turns in both directions; None: not asked for.

    Returns:
        ``algorithm``, or "ring" where channels leave no other choice; the rings, or None.

    Raises:
        ArgumentError: the algorithm has no rings.

    """
    if channels is None:
        return algorithm, None
    if algorithm is None and "ring" in ALGORITHMS[collective]:
        algorithm = "ring"
    if algorithm is None or "rings" not in options(collective, algorithm):
        raise ArgumentError(
            f"{where}: channels={channels}, but {algorithm or 'this collective'} has no rings to "
            f"multiply; leave it out or use algorithm='ring'"
        )
    return algorithm, alternating(nranks, channels)


def alternating(nranks: int, channels: int) -> list[tuple[int, ...]]:
    """So many rings in the order of the ranks, by turns in both directions."""
    ring = tuple(range(nranks))
    return [ring if c % 2 == 0 else ring[::-1] for c in range(channels)]
