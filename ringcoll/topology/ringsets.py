"""What a search has found as JSON, and back: nothing in it is believed before it was looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar

from ringcoll.errors import MachineError
from ringcoll.topology.rings import Limit, Ring, RingSet
from ringcoll.topology.system import PathClass, System

__all__ = ["as_json", "ring_set_of"]

_MOST = 1 << 12
"""Rings, limits or sentences that are taken."""

_LARGEST = 1e12
"""GB/s beyond any machine."""

T = TypeVar("T")


def as_json(found: RingSet) -> dict[str, object]:
    """The rings without their GPUs, which the reader knows."""
    return {
        "rings": [
            {
                "order": list(ring.order),
                "bandwidth": ring.bandwidth,
                "hops": [hop.name for hop in ring.hops],
                "paths": [list(path) for path in ring.paths],
            }
            for ring in found.rings
        ],
        "limits": [[limit.link, limit.used, limit.capacity] for limit in found.limits],
        "bound": found.bound,
        "all_pairs": found.all_pairs,
        "tried": list(found.tried),
    }


def ring_set_of(said: object, system: System, what: str) -> RingSet:
    """The rings of all GPUs of a system, as :func:`as_json` tells them.

    Args:
        said: what was read as JSON.
        system: the machine.
        what: is read, for messages.

    Raises:
        MachineError: it is something else; the message says which part.

    """
    fields = _Fields(said, what, {"rings", "limits", "bound", "all_pairs", "tried"})
    bound = fields.said["bound"]
    all_pairs = fields.said["all_pairs"]
    if not isinstance(all_pairs, bool):
        fields.refuse("all_pairs", all_pairs)
    return RingSet(
        system.gpus,
        tuple(fields.listed("rings", lambda one: _ring(one, system, f"{what}: rings"))),
        tuple(fields.listed("limits", lambda one: _limit(one, f"{what}: limits"))),
        None if bound is None else _number(bound, f"{what}: bound"),
        all_pairs,
        tuple(fields.listed("tried", lambda one: _text(one, f"{what}: tried"))),
    )


def _ring(said: object, system: System, what: str) -> Ring:
    fields = _Fields(said, what, {"order", "bandwidth", "hops", "paths"})
    n = len(system.gpus)
    order = tuple(fields.listed("order", lambda one: _index(one, f"{what}: order")))
    if sorted(order) != list(range(n)) or order[0] != 0:
        fields.refuse("order", list(order))
    hops = tuple(fields.listed("hops", lambda one: _class(one, f"{what}: hops")))
    paths = tuple(fields.listed("paths", lambda one: _path(one, system, f"{what}: paths")))
    if len(hops) != n or len(paths) != n:
        fields.refuse("hops and paths", f"{len(hops)} and {len(paths)} of them for {n} GPUs")
    for i, path in enumerate(paths):
        ends = system.gpus[order[i]].name, system.gpus[order[(i + 1) % n]].name
        if (path[0], path[-1]) != ends:
            fields.refuse("paths", list(path))
    bandwidth = _number(fields.said["bandwidth"], f"{what}: bandwidth")
    if bandwidth <= 0:
        fields.refuse("bandwidth", bandwidth)
    return Ring(order, bandwidth, hops, paths)


def _limit(said: object, what: str) -> Limit:
    if not isinstance(said, list) or len(said) != 3:
        _refuse(what, said)
    return Limit(_text(said[0], what), _number(said[1], what), _number(said[2], what))


def _path(said: object, system: System, what: str) -> tuple[str, ...]:
    names = {node.name for node in system.nodes}
    if not isinstance(said, list) or len(said) < 2:
        _refuse(what, said)
    for name in said:
        if not isinstance(name, str) or name not in names:
            _refuse(what, name)
    return tuple(said)


def _class(said: object, what: str) -> PathClass:
    if not isinstance(said, str) or said not in PathClass.__members__:
        _refuse(what, said)
    return PathClass[said]


def _index(said: object, what: str) -> int:
    if not isinstance(said, int) or isinstance(said, bool):
        _refuse(what, said)
    return said


def _number(said: object, what: str) -> float:
    if not isinstance(said, int | float) or isinstance(said, bool):
        _refuse(what, said)
    if not 0 <= said <= _LARGEST:  # neither NaN nor an integer beyond all floats
        _refuse(what, said)
    return said


def _text(said: object, what: str) -> str:
    if not isinstance(said, str):
        _refuse(what, said)
    return said


class _Fields:
    """An object of JSON that has just these fields."""

    def __init__(self, said: object, what: str, names: set[str]) -> None:
        if not isinstance(said, dict) or set(said) != names:
            _refuse(what, said)
        self.said: dict[str, object] = said
        self.what = what

    def listed(self, name: str, read: Callable[[object], T]) -> list[T]:
        """What is read of each item of a field that is a list."""
        found = self.said[name]
        if not isinstance(found, list) or len(found) > _MOST:
            self.refuse(name, found)
        return [read(one) for one in found]

    def refuse(self, name: str, seen: object) -> NoReturn:
        _refuse(f"{self.what}: {name}", seen)


def _refuse(what: str, seen: object) -> NoReturn:
    text = repr(seen)
    raise MachineError(f"{what}: malformed: {text if len(text) <= 100 else text[:100] + '...'}")
