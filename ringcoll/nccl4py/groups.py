"""Groups that a program begins and ends by two functions, besides ``with group():``."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from ringcoll.communicator.group import group
from ringcoll.errors import UsageError

__all__ = ["group", "group_end", "group_start"]


class _Open(threading.local):
    """The groups that this thread has begun and not ended."""

    def __init__(self) -> None:
        self.groups: list[AbstractContextManager[None]] = []


_open = _Open()


def group_start() -> None:
    """Begin a group; the calls until :func:`group_end` are made together."""
    begun = group()
    begun.__enter__()
    _open.groups.append(begun)


def group_end(*, simulate: bool = False) -> None:
    """Make the calls of the group.

    Raises:
        UsageError: no group was begun, or it is to be simulated.

    """
    if simulate:
        raise UsageError(
            "group_end(simulate=True): use comm.communicator.explain, or ringcoll model"
        )
    if not _open.groups:
        raise UsageError("group_end: this thread has begun no group; call group_start() first")
    _open.groups.pop().__exit__(None, None, None)
