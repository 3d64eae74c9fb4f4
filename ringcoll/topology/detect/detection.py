"""Detecting this machine: from the cache where that holds, else by reading everything."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from threading import Lock

from ringcoll.errors import ArgumentError
from ringcoll.topology.detect.collect import collect
from ringcoll.topology.detect.describe import document_of
from ringcoll.topology.detect.facts import Facts
from ringcoll.topology.detect.kept import keep, kept, under
from ringcoll.topology.document import Element
from ringcoll.topology.files import PROVIDED, find_file, load_document
from ringcoll.topology.merge import merge

__all__ = ["detect"]

_lock = Lock()
_detected: dict[str, Element] = {}


def detect(
    *,
    fresh: bool = False,
    topo_file: str | None = None,
    cache_dir: str | None = None,
    root: Path = Path("/"),
) -> Element:
    """The document of this machine, in NCCL's form.

    What was detected before in this process, or in this boot by this user, is returned again, in a
    few milliseconds. A link that has failed since then is seen with ``fresh``. Reading anew starts
    CUDA's driver where CuPy is installed: do not fork a process that goes on with CUDA in the
    child.

    Args:
        fresh: read everything anew.
        topo_file: a file that is completed with what is detected, where it is not one that the
            environment names or the machine's provider has put at its place; the setting.
        cache_dir: where the result is kept; the setting.
        root: of the tree of /sys, /proc and /var.

    Returns:
        ``<system>``: ``build`` makes the graph of it. What could not be read or was strange is in
        its ``<note>`` elements; a machine without GPUs gives a document without them.

    Raises:
        ArgumentError: the file that the setting or the environment names is not there, or is no
            topology file.

    """
    provided = root / PROVIDED.relative_to("/")
    template = find_file(topo_file, provided=provided)
    key = under(root, template)
    name = json.dumps(key, sort_keys=True)
    with _lock:
        found = None if fresh else _detected.get(name) or kept(key, cache_dir)
        if found is None:
            facts = collect(root)
            found = _completed(document_of(facts), template, template == provided)
            if _settled(facts):
                keep(key, found, cache_dir)
        _detected[name] = found
        return found


def _completed(document: Element, template: Path | None, forgive: bool) -> Element:
    """The document within a template, with the notes of both."""
    if template is None:
        return document
    try:
        whole = merge(load_document(template), document)
    except ArgumentError as error:
        if not forgive:
            raise
        said = f"what the provider of this machine says is of no use: {error}"
        return replace(document, children=(*document.children, Element("note", {"text": said})))
    return replace(whole, children=(*whole.children, *document.named("note")))


def _settled(facts: Facts) -> bool:
    """Whether reading again would give the same: not while NVML is away or a fabric is starting."""
    fabrics = (gpu.fabric for gpu in facts.gpus)
    starting = any(fabric is not None and fabric.state in (1, 2) for fabric in fabrics)
    known = bool(facts.gpus) and all(gpu.index is not None for gpu in facts.gpus)
    return known and not starting
