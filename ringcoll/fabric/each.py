"""Collective calls on behalf of several ranks that live in one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from ringcoll.fabric.base import Fabric

__all__ = ["each"]

T = TypeVar("T")


def each(fabrics: Sequence[Fabric], function: Callable[[Fabric], T]) -> list[T]:
    """Call ``function`` for every fabric at once, one short-lived thread each.

    It makes collective calls on behalf of ranks that take turns in one thread.

    Returns:
        The results in the order of ``fabrics``; the first failure in that order is raised.

    """
    results: dict[int, T] = {}
    failures: dict[int, BaseException] = {}

    def call(index: int) -> None:
        try:
            results[index] = function(fabrics[index])
        except BaseException as error:
            failures[index] = error

    if len(fabrics) == 1:
        return [function(fabrics[0])]
    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(fabrics))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[min(failures)]
    return [results[index] for index in range(len(fabrics))]
