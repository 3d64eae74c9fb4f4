"""The result of a search as JSON, and back; every value is checked before it is used."""

from __future__ import annotations

from typing import NoReturn, TypeVar

from ringcoll.errors import MachineError
from ringcoll.topology.rings import Limit, Ring, RingSet
from ringcoll.topology.system import PathClass, System

_MOST = 1 << 12
"""Rings, limits or sentences at most."""

_LARGEST = 1e12
"""GB/s beyond any machine."""

_T = TypeVar("_T")


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


def ring_set_of(content: object, system: System, what: str) -> RingSet:
    """The rings of all GPUs of a system from the JSON of :func:`as_json`."""
    fields = _fields(content, {"rings", "limits", "bound", "all_pairs", "tried"}, what)
    bound, tried = fields["bound"], f"{what}: tried"
    names = frozenset(node.name for node in system.nodes)
    return RingSet(
        system.gpus,
        tuple(_ring(ring, system, names, what) for ring in _list(fields["rings"], what, "rings")),
        tuple(
            _limit(limit, f"{what}: limits") for limit in _list(fields["limits"], what, "limits")
        ),
        None if bound is None else _number(bound, f"{what}: bound"),
        _typed(fields["all_pairs"], bool, f"{what}: all_pairs"),
        tuple(_typed(sentence, str, tried) for sentence in _list(fields["tried"], what, "tried")),
    )


def _ring(content: object, system: System, names: frozenset[str], what: str) -> Ring:
    what = f"{what}: rings"
    fields = _fields(content, {"order", "bandwidth", "hops", "paths"}, what)
    n = len(system.gpus)
    order = [_typed(at, int, f"{what}: order") for at in _list(fields["order"], what, "order")]
    if sorted(order) != list(range(n)) or order[0] != 0:
        _refuse(f"{what}: order", order)
    hops = [_class(hop, f"{what}: hops") for hop in _list(fields["hops"], what, "hops")]
    paths = [_list(path, what, "paths") for path in _list(fields["paths"], what, "paths")]
    if len(hops) != n or len(paths) != n:
        _refuse(f"{what}: hops and paths", f"{len(hops)} and {len(paths)} of them for {n} GPUs")
    for i, path in enumerate(paths):
        ends = [system.gpus[order[i]].name, system.gpus[order[(i + 1) % n]].name]
        if [*path[:1], *path[1:][-1:]] != ends or any(
            not isinstance(name, str) or name not in names for name in path
        ):
            _refuse(f"{what}: paths", path)
    bandwidth = _number(fields["bandwidth"], f"{what}: bandwidth")
    if bandwidth <= 0:
        _refuse(f"{what}: bandwidth", bandwidth)
    return Ring(tuple(order), bandwidth, tuple(hops), tuple(tuple(map(str, p)) for p in paths))


def _limit(content: object, what: str) -> Limit:
    if not isinstance(content, list) or len(content) != 3:
        _refuse(what, content)
    return Limit(_typed(content[0], str, what), *(_number(rate, what) for rate in content[1:]))


def _class(name: object, what: str) -> PathClass:
    if not isinstance(name, str) or name not in PathClass.__members__:
        _refuse(what, name)
    return PathClass[name]


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(what, value)
    if not 0 <= value <= _LARGEST:  # neither NaN nor an integer beyond all floats
        _refuse(what, value)
    return value


def _typed(value: object, kind: type[_T], what: str) -> _T:
    if type(value) is not kind:  # a bool is no int
        _refuse(what, value)
    return value


def _list(value: object, what: str, name: str) -> list[object]:
    if not isinstance(value, list) or len(value) > _MOST:
        _refuse(f"{what}: {name}", value)
    return value


def _fields(content: object, names: set[str], what: str) -> dict[str, object]:
    if not isinstance(content, dict) or set(content) != names:
        _refuse(what, content)
    return content


def _refuse(what: str, seen: object) -> NoReturn:
    text = repr(seen)
    raise MachineError(f"{what}: malformed: {text if len(text) <= 100 else text[:100] + '...'}")
