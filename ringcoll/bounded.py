"""Caches are bounded: the oldest goes first, and what comes once or twice evicts nothing.

A step of a training has its counts twice, forward and backward.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

_TIMES = 2


def evict(cache: dict[Any, Any], most: int) -> None:
    """Make room for one more entry: drop the oldest beyond the bound."""
    while len(cache) >= most:
        cache.pop(_oldest(cache), None)


def _oldest(cache: dict[Any, Any]) -> Any:
    """The oldest key, None without any."""
    try:
        return next(iter(cache), None)
    except RuntimeError:  # another thread has changed the size between the two
        return _oldest(cache)


class Seen:
    """The last ``most`` keys that have come, by their hashes: it keeps no key alive.

    Keys that have one hash are taken for one. A key that has come ``often`` times before is to be
    kept.
    """

    def __init__(self, most: int, often: int = _TIMES) -> None:
        self._most, self._often, self._times = most, often, dict[int, int]()

    def often(self, key: Hashable) -> bool:
        """Whether a key has come so often before; it comes now."""
        number, times = hash(key), self._times
        before = times.get(number, 0)
        if before >= self._often:
            return True
        while not before and len(times) >= self._most:
            times.pop(_oldest(times), None)
        times[number] = before + 1
        return False

    def clear(self) -> None:
        """Forget all."""
        self._times.clear()
