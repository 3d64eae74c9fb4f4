"""What has come once: it is kept when it comes again, so that what never does evicts nothing."""

from __future__ import annotations

from collections.abc import Hashable


class Seen:
    """The last ``most`` keys that have come, by their hashes: it keeps no key alive.

    Where two keys have one hash, the second is taken to have come.
    """

    def __init__(self, most: int) -> None:
        self._most, self._hashes = most, dict[int, None]()

    def has_come(self, key: Hashable) -> bool:
        """Whether a key has come before; from now on it has."""
        number, hashes = hash(key), self._hashes
        if number in hashes:
            return True
        while len(hashes) >= self._most:
            hashes.pop(next(iter(hashes), number), None)
        hashes[number] = None
        return False

    def clear(self) -> None:
        """Forget all."""
        self._hashes.clear()
