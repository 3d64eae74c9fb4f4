"""The topology of a communicator: rank 0 detects the machine and its rings, all ranks use them.

Rank 0 sends JSON: the machine as a topology file, each rank's GPU in it, and the rings. Every rank
parses it, rank 0 too, so that all have the same topology or raise the same error. A detection that
fails leaves the topology unknown; a file that the user has named must be right.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from ringcoll import log
from ringcoll.communicator.topology import Topology
from ringcoll.errors import ArgumentError, MachineError
from ringcoll.fabric import Fabric
from ringcoll.model.links import Wire
from ringcoll.tuner.measured import HOP, HOST, links_of

if TYPE_CHECKING:
    from ringcoll.topology.rings import RingSet
    from ringcoll.topology.system import System

_SECONDS = 60.0
"""The shortest timeout of the ranks that wait for rank 0, which may detect for seconds."""

_MOST_CHARACTERS = 1 << 24

_WHAT = "topology sent by rank 0"

_reading = threading.RLock()
"""Held to parse: of ranks that are threads, one parses the text and the others find the result."""


def unknown(on_gpu: bool, reason: str, nodes: Sequence[int] = ()) -> Topology:
    """The topology of ranks on an unknown machine, with the links between their nodes."""
    return Topology(links=None if on_gpu else links_of(nodes), reason=reason)


def agree(
    fabric: Fabric, busid: str | None, topo_file: str | None, cache_dir: str | None
) -> Topology:
    """The topology of the ranks' machine; collective.

    Bus ids place GPU ranks. CPU ranks (``busid`` None) take the places of a file's GPUs, rank i the
    i-th; without a file nothing is exchanged.
    """
    if fabric.nodes:
        if topo_file is not None:
            raise ArgumentError(
                f"init: topo_file={topo_file!r} describes one node, but the ranks are on several; "
                f"leave it out"
            )
        return unknown(busid is not None, "the ranks are on several nodes", fabric.nodes)
    if topo_file is None and (busid is None or fabric.nranks == 1):
        alone = "a rank alone has no links"
        return unknown(busid is not None, alone if busid else "CPU ranks, and no topo_file")
    received = fabric.allgather((busid or "").encode(), what="init: GPUs")
    text = ""
    if fabric.rank == 0:
        from ringcoll.topology.busid import bus_id

        busids = None if busid is None else [bus_id(p.decode(errors="replace")) for p in received]
        text = _topology_text(fabric.nranks, busids, topo_file, cache_dir)
    text = _from_rank_0(fabric, text, "init: the machine")
    found = _parse(text, fabric.nranks, busid is not None)
    if fabric.rank == 0:
        log.write(log.INFO, "init: %s", _summary(found))
    return found


def agree_among(
    fabric: Fabric, parent: Topology, ranks: Sequence[int], *, on_gpu: bool
) -> Topology:
    """The topology of some ranks of a communicator; collective among them."""
    if parent.system is None:
        return unknown(on_gpu, parent.reason, fabric.nodes)
    with _reading:
        members = _members(parent.system, tuple(parent.system.gpus[rank].name for rank in ranks))
    text = ""
    if fabric.rank == 0:
        try:
            text = _rings_text(members)
            _parse_rings(members, text, on_gpu)
        except Exception as error:
            text = json.dumps({"unknown": _reason(error)})
    return _parse_rings(members, _from_rank_0(fabric, text, "the topology of a child"), on_gpu)


def _from_rank_0(fabric: Fabric, text: str, what: str) -> str:
    """Rank 0's text, on every rank."""
    timeout = max(fabric.timeout, _SECONDS)
    received = fabric.allgather(text.encode(), what=what, timeout=timeout)[0]
    try:
        return received.decode()
    except UnicodeDecodeError as error:
        raise _malformed("", error) from None


# -- on rank 0 -------------------------------------------------------------------------------------


def _topology_text(
    nranks: int, busids: Sequence[str] | None, topo_file: str | None, cache_dir: str | None
) -> str:
    """The JSON for all ranks: the machine, or why it is unknown, or why init must fail."""
    on_gpu = busids is not None
    try:
        if busids is not None and len(set(busids)) < nranks:
            shared = next(busid for busid in busids if busids.count(busid) > 1)
            return json.dumps({"unknown": f"several ranks share the GPU {shared}"})
        text = json.dumps(_machine(nranks, busids, topo_file, cache_dir))
        _parse(text, nranks, on_gpu)
    except Exception as error:  # a failed detection must not fail a communicator
        why = _reason(error)
        if topo_file is None:
            return json.dumps({"unknown": why})
        return json.dumps({"refused": f"init: topo_file={topo_file!r}, read by rank 0: {why}"})
    return text


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ArgumentError) else f"{type(error).__name__}: {error}"


def _machine(
    nranks: int, busids: Sequence[str] | None, topo_file: str | None, cache_dir: str | None
) -> dict[str, object]:
    from ringcoll.topology.document import write
    from ringcoll.topology.files import load_document, title_of

    if topo_file is not None and Path(topo_file).exists() and not Path(topo_file).is_file():
        raise ArgumentError("it is not a regular file")  # reading a pipe may never end
    if busids is None:
        path = str(topo_file)
        document = load_document(path)
        title = title_of(document, path)
    else:
        from ringcoll.topology.detect import detect

        document = detect(topo_file=topo_file, cache_dir=cache_dir)
        title = document.get("name") or "this machine"
    text = write(document)
    with _reading:
        system = _system(text, title)
        gpus = _gpus(system, nranks, busids)
        members = _members(system, gpus)
    found = _rings_text(members, cache_dir, keep=busids is not None)
    return {"title": title, "document": text, "gpus": gpus, "found": found}


def _gpus(system: System, nranks: int, busids: Sequence[str] | None) -> tuple[str, ...]:
    """The name of each rank's GPU."""
    if busids is None:
        if len(system.gpus) < nranks:
            raise ArgumentError(
                f"{system.title} has {len(system.gpus)} GPUs, too few for {nranks} CPU ranks; "
                f"start fewer ranks or name another file"
            )
        return tuple(gpu.name for gpu in system.gpus[:nranks])
    known = {gpu.busid: gpu.name for gpu in system.gpus}
    for rank, busid in enumerate(busids):
        if busid not in known:
            raise ArgumentError(f"the topology has no GPU {busid}, that of rank {rank}")
    return tuple(known[busid] for busid in busids)


def _rings_text(members: System, cache_dir: str | None = None, *, keep: bool = False) -> str:
    """The rings of a machine's ranks; and, if these differ, the rings without relaying GPUs."""
    from ringcoll.topology.ringsets import as_json
    from ringcoll.topology.search.cached import cached_rings

    with _reading:
        best, stored = cached_rings(members, cache_dir, keep=keep)
    received = {"rings": as_json(best), "stored": None if stored is best else as_json(stored)}
    return json.dumps(received)


# -- on every rank ---------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _system(text: str, title: str) -> System:
    from ringcoll.topology.build import build
    from ringcoll.topology.document import parse

    return build(parse(text.encode(), title), title=title)


@lru_cache(maxsize=64)
def _members(system: System, names: tuple[str, ...]) -> System:
    from ringcoll.topology.system import subsystem

    by_name = {gpu.name: gpu for gpu in system.gpus}
    return subsystem(system, [by_name[name] for name in names])


def _parse(text: str, nranks: int, on_gpu: bool) -> Topology:
    """The topology in rank 0's JSON."""
    received = _object(text)
    if set(received) == {"refused"}:
        raise ArgumentError(_text(received, "refused"))
    if set(received) == {"unknown"}:
        return unknown(on_gpu, _text(received, "unknown"))
    if set(received) != {"title", "document", "gpus", "found"}:
        raise _malformed("", text)
    try:
        with _reading:
            system = _system(_text(received, "document"), _text(received, "title"))
    except ArgumentError as error:
        raise _malformed("document", error) from None
    names, known = received["gpus"], {gpu.name for gpu in system.gpus}
    if not (
        isinstance(names, list)
        and len(names) == nranks
        and all(isinstance(name, str) and name in known for name in names)
        and len(set(names)) == nranks
    ):
        raise _malformed("gpus", names)
    with _reading:
        members = _members(system, tuple(names))
    return _parse_rings(members, _text(received, "found"), on_gpu)


def _parse_rings(members: System, text: str, on_gpu: bool) -> Topology:
    """The topology of ranks on all GPUs of a system, with the rings in rank 0's JSON."""
    with _reading:
        return _topology(members, text, on_gpu)


@lru_cache(maxsize=64)
def _topology(members: System, text: str, on_gpu: bool) -> Topology:
    from ringcoll.model.machine import machine_of
    from ringcoll.topology.ringsets import ring_set_of

    received = _object(text)
    if set(received) == {"unknown"}:
        return unknown(on_gpu, _text(received, "unknown"))
    if set(received) != {"rings", "stored"}:
        raise _malformed("found", text)
    best = stored = ring_set_of(received["rings"], members, f"{_WHAT}: rings")
    if received["stored"] is not None:
        stored = ring_set_of(received["stored"], members, f"{_WHAT}: stored")
    if len(members.gpus) < 2:
        return Topology(members, best, stored, None if on_gpu else HOST.value)
    if not stored.rings:
        raise ArgumentError("no ring joins the ranks' GPUs")
    overheads = (
        Wire(1.0, 0.0, HOP.value) if on_gpu else Wire(1.0, HOST.value.alpha, HOST.value.latency)
    )
    machine = machine_of(members, stored, overheads)
    if on_gpu and not (machine.all_pairs or _is_sure(members, stored)):
        why = (
            "the bandwidths of their links are guesses; run `ringcoll topo --measure` on idle GPUs"
        )
        return Topology(members, best, reason=why)
    return Topology(members, best, stored, machine.links, machine=machine)


def _is_sure(system: System, found: RingSet) -> bool:
    """Whether the rings use known links only, none that a virtual machine may have made up.

    With guessed links the defaults, which have been measured, are the better choice.
    """
    from ringcoll.topology.system import Confidence

    hops = {hop for ring in found.rings for path in ring.paths for hop in pairwise(path)}
    low = (link for link in system.links if link.confidence is Confidence.LOW)
    return not any((link.src, link.dst) in hops for link in low)


def _object(text: str) -> dict[str, object]:
    """An object of JSON."""
    try:
        if len(text) > _MOST_CHARACTERS:
            raise ValueError(f"{len(text)} characters")
        received = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _malformed("", error) from None
    if not isinstance(received, dict):
        raise _malformed("", text)
    return received


def _text(received: dict[str, object], field: str) -> str:
    found = received[field]
    if not isinstance(found, str):
        raise _malformed(field, found)
    return found


def _malformed(field: str, seen: object) -> MachineError:
    where = f"{_WHAT}: {field}" if field else _WHAT
    return MachineError(f"{where}: malformed: {seen!s:.200}")


def _summary(found: Topology) -> str:
    if found.system is None or found.rings is None:
        return f"unknown machine: {found.reason}"
    rings = found.rings
    return f"{found.system.title}: {len(rings.rings)} rings, {rings.bandwidth:.4g} GB/s together"
