"""The rings of a machine, searched for once: in a process, and for a user where they are kept.

One JSON file for each machine and set of its GPUs, named by what it depends on. Nothing about the
folder is ever an error: what cannot be read or trusted is searched for again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from functools import cache, lru_cache
from pathlib import Path

from ringcoll import version
from ringcoll.errors import MachineError
from ringcoll.folders import contents, own_folder, user_folder, write_aside
from ringcoll.topology.paths import routes, stores
from ringcoll.topology.rings import RingSet
from ringcoll.topology.ringsets import as_json, ring_set_of
from ringcoll.topology.search import find_rings
from ringcoll.topology.system import System

__all__ = ["searched"]

_log = logging.getLogger("ringcoll")

_MOST_BYTES = 1 << 22

Found = tuple[RingSet, RingSet]


@lru_cache(maxsize=64)
def searched(system: System, cache_dir: str | None = None, *, keep: bool = False) -> Found:
    """The best rings of all GPUs, and those that stores take: the same object if no others.

    Args:
        system: the machine.
        cache_dir: where rings are kept; the setting.
        keep: whether to look there, and to keep them where finding them was more than a look.

    """
    path = _path(system, cache_dir) if keep else None
    kept = None if path is None else _kept(path, system)
    if kept is not None:
        return kept
    best = find_rings(system)
    if best.all_pairs or not best.rings:
        return best, best
    found = best, best if _is_stored(system, best) else find_rings(system, stored=True)
    if path is not None:
        _keep(path, found)
    return found


def _is_stored(system: System, found: RingSet) -> bool:
    """Whether every hop goes the way that a GPU's stores take."""
    ways = stores(routes(system, system.gpus))
    nodes = {pair: {way.nodes for way in own} for pair, own in ways.items()}
    return all(
        path in nodes[hop]
        for ring in found.rings
        for hop, path in zip(
            zip(ring.order, (*ring.order[1:], ring.order[0]), strict=True), ring.paths, strict=True
        )
    )


def _path(system: System, cache_dir: str | None) -> Path | None:
    folder = user_folder(cache_dir, "rings")
    said = repr((version.__version__, _sources(), system))
    name = hashlib.blake2b(said.encode(), digest_size=16).hexdigest()
    return None if folder is None else folder / f"{name}.json"


@cache
def _sources() -> str:
    """What the search is made of: another one may find other rings."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _kept(path: Path, system: System) -> Found | None:
    try:
        said = json.loads(contents(path, _MOST_BYTES))
        if not isinstance(said, list) or len(said) not in (1, 2):
            raise MachineError("it holds no rings")
        sets = [ring_set_of(one, system, "rings") for one in said]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, MachineError) as error:
        _log.warning("%s is left out, the rings are searched for again: %s", path, error)
        return None
    return sets[0], sets[-1]


def _keep(path: Path, found: Found) -> None:
    best, stored = found
    said = [as_json(best)] if stored is best else [as_json(best), as_json(stored)]
    try:
        own_folder(path.parent)
        write_aside(path, json.dumps(said).encode() + b"\n")
    except OSError as error:
        _log.warning("the rings are not kept in %s: %s", path.parent, error)
