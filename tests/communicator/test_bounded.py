"""Caches with a bound, which several threads use at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ringcoll.bounded import Seen, evict


class Changed(dict[Any, Any]):
    """Another thread adds a key between an iterator's making and its first step."""

    meanwhile = 1

    def __iter__(self) -> Iterator[Any]:
        found = super().__iter__()
        if self.meanwhile:
            self.meanwhile -= 1
            self["another thread's"] = 0
        return found


def test_the_oldest_goes_while_another_thread_adds_one() -> None:
    cache = Changed(first=1, second=2, third=3)
    evict(cache, 3)
    assert [*cache] == ["third", "another thread's"]


def test_what_has_come_is_forgotten_while_another_thread_adds_one() -> None:
    seen = Seen(2, often=1)
    seen._times = Changed({hash(1): 1, hash(2): 1})
    assert not seen.often(3)
    assert [*seen._times] == ["another thread's", 3]
    assert seen.often(3) and not seen.often(1)


def test_what_comes_often_is_told() -> None:
    seen = Seen(3, often=2)
    assert [seen.often("a") for _ in range(4)] == [False, False, True, True]
    seen.clear()
    assert not seen.often("a")
