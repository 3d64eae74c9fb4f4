"""Topology files: which one is used, reading and writing them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ringcoll import log
from ringcoll.errors import ArgumentError
from ringcoll.topology.build import build
from ringcoll.topology.document import MAX_BYTES, Element, parse
from ringcoll.topology.system import System

PROVIDED = Path("/var/run/nvidia-topologyd/virtualTopology.xml")
"""Where a provider of virtual machines puts the topology, which a guest cannot see."""

_log = log.logger()


def load(path: str | Path) -> System:
    """The graph of the machine that a file describes; its title is the file's name."""
    document = load_document(path)
    return build(document, title=title_of(document, path))


def title_of(document: Element, path: str | Path) -> str:
    """The name of a machine in a file: of the document, else of the file, printable."""
    return document.get("name") or Path(path).stem.encode("utf-8", "replace").decode()


def load_document(path: str | Path) -> Element:
    """The document in a file, not yet interpreted; errors as of ``load``."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ArgumentError(f"topology file {path}: cannot be read: {why}") from None
    return parse(text, str(path))


def find_file(
    topo_file: str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    provided: Path = PROVIDED,
) -> Path | None:
    """The topology file of this machine; None if there is none.

    That is the first of: the setting ``topo_file`` of ``init``, RINGCOLL_TOPO_FILE, NCCL_TOPO_FILE,
    the provider's file. It need not be complete, as with NCCL: ``merge`` completes it with what is
    detected. A missing file is an ArgumentError; one of NCCL_TOPO_FILE is logged and ignored.
    """
    variables = os.environ if environ is None else environ
    ours = {"topo_file": topo_file, "RINGCOLL_TOPO_FILE": variables.get("RINGCOLL_TOPO_FILE")}
    for setting, name in ours.items():
        if name:
            path = Path(name)
            if not path.exists():
                raise ArgumentError(f"{setting}={name!r}: there is no such file")
            return path
    nccl = variables.get("NCCL_TOPO_FILE")
    if nccl:
        if Path(nccl).is_file():  # reading a pipe could block
            return Path(nccl)
        _log.warning(
            "NCCL_TOPO_FILE=%r: there is no such file; the machine is detected without it", nccl
        )
    return provided if provided.exists() else None
