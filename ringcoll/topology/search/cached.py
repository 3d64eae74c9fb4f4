"""The rings of a machine from a cache: of this process, and in the user's cache folder.

The folder has one JSON file for each machine and set of its GPUs, named by a digest of what the
rings depend on. A file that cannot be read or trusted is a warning, and the search runs again.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache, lru_cache
from pathlib import Path

from ringcoll import log, version
from ringcoll.errors import MachineError
from ringcoll.folders import contents, own_folder, user_folder, write_aside
from ringcoll.topology.paths import routes, stores
from ringcoll.topology.rings import RingSet
from ringcoll.topology.ringsets import as_json, ring_set_of
from ringcoll.topology.search.find import find_rings
from ringcoll.topology.system import System

_log = log.logger()

_MOST_BYTES = 1 << 22

BothSets = tuple[RingSet, RingSet]


@lru_cache(maxsize=64)
def cached_rings(system: System, cache_dir: str | None = None, *, keep: bool = False) -> BothSets:
    """The best rings of all GPUs, and the best without relays; one object where they are the same.

    ``keep`` reads and writes the folder (``cache_dir`` None: the user's own); rings on a switch,
    which take no search, are not written.
    """
    path = _path(system, cache_dir) if keep else None
    known = None if path is None else _read(path, system)
    if known is not None:
        return known
    best = find_rings(system)
    if best.all_pairs or not best.rings:
        return best, best
    both = best, best if _is_stored(system, best) else find_rings(system, stored=True)
    if path is not None:
        _write(path, both)
    return both


def _is_stored(system: System, found: RingSet) -> bool:
    """Whether every hop takes a route of a GPU's own stores."""
    direct = stores(routes(system, system.gpus))
    nodes = {pair: {route.nodes for route in own} for pair, own in direct.items()}
    return all(
        path in nodes[hop]
        for ring in found.rings
        for hop, path in zip(
            zip(ring.order, (*ring.order[1:], ring.order[0]), strict=True), ring.paths, strict=True
        )
    )


def _path(system: System, cache_dir: str | None) -> Path | None:
    folder = user_folder(cache_dir, "rings")
    key = repr((version.__version__, _sources(), system))
    name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    return None if folder is None else folder / f"{name}.json"


@cache
def _sources() -> str:
    """A digest of the topology package: another version of it may find other rings."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: Path, system: System) -> BothSets | None:
    try:
        sets = json.loads(contents(path, _MOST_BYTES))
        if not isinstance(sets, list) or len(sets) not in (1, 2):
            raise MachineError("it holds no rings")
        both = [ring_set_of(one, system, "rings") for one in sets]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, MachineError) as error:
        _log.warning("cannot use %s, so rings are searched again: %s", path, error)
        return None
    return both[0], both[-1]


def _write(path: Path, both: BothSets) -> None:
    best, stored = both
    sets = [as_json(best)] if stored is best else [as_json(best), as_json(stored)]
    try:
        own_folder(path.parent)
        write_aside(path, json.dumps(sets).encode() + b"\n")
    except OSError as error:
        _log.warning("cannot keep rings in %s: %s", path.parent, error)
