"""What comes again and again is kept, so that what comes once or twice evicts nothing.

A step of a training has its counts twice, forward and backward.
"""

from __future__ import annotations

from collections.abc import Hashable

_TIMES = 2


class Seen:
    """The last ``most`` keys that have come, by their hashes: it keeps no key alive.

    Keys that have one hash are taken for one.
    """

    def __init__(self, most: int) -> None:
        self._most, self._times = most, dict[int, int]()

    def often(self, key: Hashable) -> bool:
        """Whether a key has come twice before; it comes now."""
        number, times = hash(key), self._times
        before = times.get(number, 0)
        if before >= _TIMES:
            return True
        while not before and len(times) >= self._most:
            times.pop(next(iter(times), number), None)
        times[number] = before + 1
        return False

    def clear(self) -> None:
        """Forget all."""
        self._times.clear()
