"""Channels: several rings side by side, for the algorithms that go along rings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringcoll.algorithms import ALGORITHMS, options
from ringcoll.errors import ArgumentError

_FINEST = 256
"""The largest weight of a channel that is tried."""

_NEAR = 0.02
"""How far from its part of the bandwidth a channel's part of the bytes may be, at most."""


@dataclass(frozen=True, slots=True)
class Channels:
    """Rings that carry a call together, one a channel; ``shares`` (1,): each carries the same."""

    rings: tuple[tuple[int, ...], ...]
    shares: tuple[int, ...] = (1,)

    def first(self, count: int) -> Channels:
        """The first rings, so many at most."""
        if count >= len(self.rings):
            return self
        return _channels(self.rings[:count], self.weights[:count])

    @property
    def weights(self) -> tuple[int, ...]:
        """A weight for each ring."""
        return self.shares if len(self.shares) > 1 else (1,) * len(self.rings)

    def taken(self, count: int) -> Channels:
        """So many channels: the first rings, or where there are fewer these in turns.

        Each further turn goes the other way round, and a ring's weight is divided among its
        channels.
        """
        if count <= len(self.rings):
            return self.first(count)
        known = len(self.rings)
        rings = [
            self.rings[c % known] if c // known % 2 == 0 else self.rings[c % known][::-1]
            for c in range(count)
        ]
        turns = [len(range(first, count, known)) for first in range(known)]
        return _channels(rings, [self.weights[c % known] / turns[c % known] for c in range(count)])


def channels_along(orders: Sequence[Sequence[int]], bandwidths: Sequence[float]) -> Channels:
    """Channels along found rings, the strongest first, with shares like their bandwidths.

    Rings of one order are one channel: a kernel's stores take the same links.
    """
    summed: dict[tuple[int, ...], float] = {}
    for order, bandwidth in zip(orders, bandwidths, strict=True):
        key = tuple(order)
        summed[key] = summed.get(key, 0.0) + bandwidth
    ranked = sorted(summed, key=lambda order: -summed[order])
    return _channels(ranked, [summed[order] for order in ranked])


def _channels(rings: Sequence[tuple[int, ...]], weights: Sequence[float]) -> Channels:
    shares = _shares(weights)
    return Channels(tuple(rings), shares if len(set(shares)) > 1 else (1,))


def _shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Small integers in nearly the same proportions, none of them 0."""
    largest = max(weights)
    best: tuple[int, ...] = ()
    least = float("inf")
    for finest in range(1, _FINEST + 1):
        shares = tuple(max(1, round(weight / largest * finest)) for weight in weights)
        unit = sum(weights) / sum(shares)
        off = max(
            abs(share * unit / weight - 1) for share, weight in zip(shares, weights, strict=True)
        )
        if off <= _NEAR:
            return shares
        if off < least:
            best, least = shares, off
    return best


def channelled(
    where: str,
    collective: str,
    algorithm: str | None,
    nranks: int,
    channels: int | None,
    found: Channels | None = None,
) -> tuple[str, Channels | None]:
    """The algorithm that so many channels multiply, and its rings.

    Args:
        where: the call and its rank, for the error.
        collective: its name.
        algorithm: a name; None is "ring", because of the channels.
        nranks: of the communicator.
        channels: how many rings; None: as many as there are.
        found: the rings of the machine, the strongest first; None: one in the order of the ranks.

    Returns:
        The algorithm, and the rings that it is to go along, None where it takes none or none are
        known. ``channels`` rings are chosen as in :meth:`Channels.taken`, or by turns in both
        directions where no ring is known.

    Raises:
        ArgumentError: the algorithm has no rings.

    """
    if algorithm is None and "ring" in ALGORITHMS[collective]:
        algorithm = "ring"
    along = algorithm is not None and "rings" in options(collective, algorithm)
    if algorithm is not None and channels is None:
        return algorithm, found if along else None
    if algorithm is None or channels is None or not along:
        raise ArgumentError(
            f"{where}: channels={channels}, but {algorithm or 'this collective'} has no rings to "
            f"multiply; leave it out or use algorithm='ring'"
        )
    if found is None:
        return algorithm, Channels(tuple(alternating(nranks, channels)))
    return algorithm, found.taken(channels)


def alternating(nranks: int, channels: int) -> list[tuple[int, ...]]:
    """So many rings in the order of the ranks, by turns in both directions."""
    ring = tuple(range(nranks))
    return [ring if c % 2 == 0 else ring[::-1] for c in range(channels)]
