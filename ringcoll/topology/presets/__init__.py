"""Well-known machines by name, each made as a document, so that they take the way of files.

What a document does not need is left out: affinities, subsystems, what hangs on the machine beside
GPUs and fast ports. The builders say where their facts are from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ringcoll.errors import ArgumentError
from ringcoll.topology.build import build
from ringcoll.topology.document import Element
from ringcoll.topology.presets.meshes import MESHES
from ringcoll.topology.presets.pcie import PCIE
from ringcoll.topology.presets.switched import SWITCHED
from ringcoll.topology.system import System

__all__ = ["PRESETS", "preset", "preset_document"]

PRESETS: Mapping[str, Callable[[], Element]] = {**PCIE, **MESHES, **SWITCHED}
"""Builders of documents by the machine's name."""


def preset(name: str) -> System:
    """The graph of a machine of :data:`PRESETS`.

    Raises:
        ArgumentError: there is none of that name; the message lists all.

    """
    return build(preset_document(name), title=name)


def preset_document(name: str) -> Element:
    """The document of a machine of :data:`PRESETS`; errors as of ``preset``."""
    if name not in PRESETS:
        raise ArgumentError(f"there is no machine {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]()
