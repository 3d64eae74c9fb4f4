"""A store whose waiting ranks look around: who waits in it must hear that the group has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Polled"]


class Polled:
    """A store of torch's, as ringcoll's bootstrap takes it.

    Args:
        store: torch's.
        look: called at every look for keys; what it raises ends the wait.

    """

    def __init__(self, store: Any, look: Callable[[], None]) -> None:
        self._store, self._look = store, look

    def set(self, key: str, value: bytes, /) -> None:
        """Keep ``value``."""
        self._store.set(key, value)

    def get(self, key: str, /) -> bytes:
        """The value of a key that is there."""
        value: bytes = self._store.get(key)
        return value

    def check(self, keys: list[str], /) -> bool:
        """Whether all the keys are there."""
        self._look()
        return bool(self._store.check(keys))

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter that begins at 0; its new value."""
        return int(self._store.add(key, amount))

    def delete_key(self, key: str, /) -> bool:
        """Remove a key; whether it was there."""
        return bool(self._store.delete_key(key))
