"""Detecting this machine: from the cache where that holds, else by reading everything."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from threading import Lock

from ringcoll.errors import ArgumentError
from ringcoll.topology.detect.cache import cache_key, read_cached, write_cached
from ringcoll.topology.detect.collect import collect
from ringcoll.topology.detect.describe import document_of
from ringcoll.topology.detect.facts import Facts
from ringcoll.topology.document import Element
from ringcoll.topology.files import PROVIDED, find_file, load_document
from ringcoll.topology.merge import merge

_lock = Lock()
_detected: dict[str, Element] = {}


def detect(
    *,
    fresh: bool = False,
    topo_file: str | None = None,
    cache_dir: str | None = None,
    root: Path = Path("/"),
) -> Element:
    """The document of this machine, in NCCL's form: ``build`` makes the graph of it.

    The result of an earlier call in this process, or in this boot by this user, is read from the
    cache unless ``fresh``. ``topo_file`` is completed with what is detected; None is the file of
    the environment or of the machine's provider, if there is one. ``<note>`` elements say what
    could not be read, or contradicts itself. With CuPy, detection starts the CUDA driver: do not
    fork afterwards and use CUDA in the child.
    """
    provided = root / PROVIDED.relative_to("/")
    template = find_file(topo_file, provided=provided)
    key = cache_key(root, template)
    name = json.dumps(key, sort_keys=True)
    with _lock:
        found = None if fresh else _detected.get(name) or read_cached(key, cache_dir)
        if found is None:
            facts = collect(root)
            found = _completed(document_of(facts), template, template == provided)
            if _settled(facts):
                write_cached(key, found, cache_dir)
        _detected[name] = found
        return found


def _completed(document: Element, template: Path | None, lenient: bool) -> Element:
    """The document merged into a template, with the notes of both."""
    if template is None:
        return document
    try:
        merged = merge(load_document(template), document)
    except ArgumentError as error:
        if not lenient:
            raise
        text = f"the topology file of this machine's provider is ignored: {error}"
        return replace(document, children=(*document.children, Element("note", {"text": text})))
    return replace(merged, children=(*merged.children, *document.named("note")))


def _settled(facts: Facts) -> bool:
    """Whether another reading would be equal: not without NVML, nor while a fabric starts."""
    fabrics = (gpu.fabric for gpu in facts.gpus)
    starting = any(fabric is not None and fabric.state in (1, 2) for fabric in fabrics)
    known = bool(facts.gpus) and all(gpu.index is not None for gpu in facts.gpus)
    return known and not starting
