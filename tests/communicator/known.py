"""What ranks on GPUs of a known machine know of it."""

from __future__ import annotations

from functools import cache
from typing import Any

from ringcoll.communicator.setup import machine
from ringcoll.communicator.topology import Topology
from ringcoll.topology.document import write
from ringcoll.topology.presets import preset_document


@cache
def known(name: str, *gpus: int) -> Topology:
    """Ranks on these GPUs of a preset, on all without any."""
    text = write(preset_document(name))
    system = machine._system(text, name)
    chosen = [system.gpus[gpu] for gpu in gpus] or system.gpus
    members = machine._members(system, tuple(gpu.name for gpu in chosen))
    return machine._parse_rings(members, machine._rings_text(members), True)


def machine_on(name: str, *gpus: int) -> Any:
    """What a choice goes by there."""
    return known(name, *gpus).machine
