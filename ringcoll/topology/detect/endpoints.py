"""The remote end of each NVLink.

NCCL's rule: a link that is up, carries P2P, and whose remote end is not on the PCI bus leads to an
NVSwitch. Beyond it, NVML's type of the remote device comes first, and a link whose remote end NVML
does not report is resolved by the other links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ringcoll.topology.busid import all_ones
from ringcoll.topology.detect.facts import Facts, GpuFacts, LinkFacts

HIDDEN = "fffffff:ffff:ff"
"""The bus id of an NVSwitch that is not on the bus, in NCCL's files."""

SWITCH_CLASS = "0x068000"
CPU_CLASS = "0x068001"

_LISTED = 3

_GPU, _IBM_CPU, _SWITCH, _UNKNOWN = 0, 1, 2, 255


@dataclass
class LinkEnds:
    """How many links of a GPU are up, by their remote ends (bus ids; of a CPU, its bridge's).

    In ``switches`` ``HIDDEN`` stands for all that are not on the bus; ``speed`` is MB/s of the
    slowest link, None if NVML reports none.
    """

    gpus: Counter[str] = field(default_factory=Counter)
    cpus: Counter[str] = field(default_factory=Counter)
    switches: Counter[str] = field(default_factory=Counter)
    unknown: int = 0
    speed: int | None = None

    @property
    def count(self) -> int:
        """All links that are used, or might be."""
        far = (self.gpus, self.cpus, self.switches)
        return sum(ends.total() for ends in far) + self.unknown


def label(gpu: GpuFacts) -> str:
    """A GPU's name in sentences."""
    return gpu.busid if gpu.index is None else f"GPU {gpu.index} ({gpu.busid})"


def listed(names: Sequence[str]) -> str:
    """The first few of many, for a sentence."""
    text = "; ".join(names[:_LISTED])
    return text if len(names) <= _LISTED else f"{text}; and {len(names) - _LISTED} more pairs"


def counted(count: int, noun: str) -> str:
    """A count with its noun, for a sentence."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def link_ends(facts: Facts) -> tuple[Mapping[str, LinkEnds], tuple[str, ...]]:
    """The remote ends of every GPU's links by bus id, and notes.

    GPUs in MIG mode are left out: their instances have no NVLink.
    """
    notes: list[str] = []
    usable: dict[str, GpuFacts] = {}
    for gpu in facts.gpus:
        if not gpu.mig:
            usable[gpu.busid] = gpu
        elif _up(gpu.links or ()):
            notes.append(f"{label(gpu)} is in MIG mode: MIG instances have no NVLink")
    return {busid: _ends(gpu, usable, facts, notes) for busid, gpu in usable.items()}, tuple(notes)


def _up(links: Iterable[LinkFacts]) -> list[LinkFacts]:
    return [link for link in links if link.active]


def _ends(gpu: GpuFacts, local: Mapping[str, GpuFacts], facts: Facts, notes: list[str]) -> LinkEnds:
    found = LinkEnds()
    up = _up(gpu.links or ())
    links = [link for link in up if link.p2p is not False]
    if len(links) < len(up):
        notes.append(
            f"{label(gpu)}: {len(up) - len(links)} of {len(up)} NVLinks are up but carry no P2P "
            f"traffic; they are not used"
        )
    strange: Counter[str] = Counter()
    for link in links:
        far = link.remote
        if far is None or all_ones(far):
            if link.remote_type == _SWITCH or (far and link.remote_type in (None, _UNKNOWN)):
                found.switches[HIDDEN] += 1
            else:
                found.unknown += 1
        elif far == gpu.busid:
            strange["whose remote end is the GPU itself"] += 1
        elif far in local:
            found.gpus[far] += 1
        else:
            _elsewhere(far, link, facts, found, strange)
    for why, count in strange.items():
        notes.append(f"{label(gpu)}: {counted(count, 'NVLink')} {why}; not used")
    speeds = {link.speed for link in links if link.speed}
    found.speed = min(speeds, default=None)
    if len(speeds) > 1:
        notes.append(
            f"{label(gpu)}: its NVLinks run at {min(speeds)} to {max(speeds)} MB/s; all are "
            f"counted at the slowest rate"
        )
    return found


def _elsewhere(
    far: str, link: LinkFacts, facts: Facts, found: LinkEnds, strange: Counter[str]
) -> None:
    """A remote end that has an address and is no usable GPU."""
    device = facts.device.get(far)
    seen = (device.pci_class if device is not None else None) or ""
    if link.remote_type == _IBM_CPU or seen.startswith(CPU_CLASS):
        found.cpus[far] += 1
    elif link.remote_type == _GPU or (link.remote_type != _SWITCH and seen.startswith("0x03")):
        strange[f"to GPU {far}, which this machine does not show"] += 1
    else:
        found.switches[far] += 1
