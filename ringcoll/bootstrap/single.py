"""A world of one."""

from __future__ import annotations

__all__ = ["SingleBootstrap"]


class SingleBootstrap:
    """The bootstrap of a process that is alone."""

    rank = 0
    nranks = 1

    def allgather(self, payload: bytes) -> list[bytes]:
        """The payload itself."""
        return [payload]
