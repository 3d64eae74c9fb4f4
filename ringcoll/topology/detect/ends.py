"""What is at the far end of each NVLink.

NCCL's rule, taken further: a far end that is up, carries P2P and cannot be seen on the bus is an
NVSwitch. What NVML itself says of the far end's kind goes before, and a link whose far end NVML
refuses to name stays open until the other links are known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ringcoll.topology.busid import all_ones
from ringcoll.topology.detect.facts import Facts, GpuFacts, LinkFacts

__all__ = ["CPU_CLASS", "HIDDEN", "SWITCH_CLASS", "Ends", "ends_of", "label", "some"]

HIDDEN = "fffffff:ffff:ff"
"""How NCCL's files name an NVSwitch that nobody sees."""

SWITCH_CLASS = "0x068000"
CPU_CLASS = "0x068001"

_FEW = 3

_GPU, _IBM_CPU, _SWITCH, _UNKNOWN = 0, 1, 2, 255


@dataclass
class Ends:
    """The links of a GPU that are up, by their far ends.

    Args:
        gpus: how many lead to each other GPU, by bus id.
        cpus: how many lead to each CPU, by its bridge's bus id.
        switches: how many lead to each NVSwitch; ``HIDDEN`` stands for all that are not seen.
        unknown: how many nobody can say of.
        speed: MB/s of the slowest of them, None if NVML tells none.

    """

    gpus: Counter[str] = field(default_factory=Counter)
    cpus: Counter[str] = field(default_factory=Counter)
    switches: Counter[str] = field(default_factory=Counter)
    unknown: int = 0
    speed: int | None = None

    @property
    def count(self) -> int:
        """All links that are used or might be."""
        far = (self.gpus, self.cpus, self.switches)
        return sum(sum(some.values()) for some in far) + self.unknown


def label(gpu: GpuFacts) -> str:
    """A GPU's name in sentences."""
    return gpu.busid if gpu.index is None else f"GPU {gpu.index} ({gpu.busid})"


def some(names: Sequence[str]) -> str:
    """The first few of many, for a sentence."""
    few = "; ".join(names[:_FEW])
    return few if len(names) <= _FEW else f"{few}; and {len(names) - _FEW} more pairs"


def ends_of(facts: Facts) -> tuple[Mapping[str, Ends], tuple[str, ...]]:
    """The far ends of every GPU's links, by bus id.

    GPUs that MIG divides are left out: their instances have no NVLink.

    Returns:
        Them, and what is strange, a sentence each.

    """
    notes: list[str] = []
    whole: dict[str, GpuFacts] = {}
    for gpu in facts.gpus:
        if not gpu.mig:
            whole[gpu.busid] = gpu
        elif _up(gpu.links or ()):
            notes.append(f"{label(gpu)} is divided by MIG: its instances have no NVLink")
    return {busid: _ends(gpu, whole, facts, notes) for busid, gpu in whole.items()}, tuple(notes)


def _up(links: Iterable[LinkFacts]) -> list[LinkFacts]:
    return [link for link in links if link.active]


def _ends(gpu: GpuFacts, local: Mapping[str, GpuFacts], facts: Facts, notes: list[str]) -> Ends:
    found = Ends()
    up = _up(gpu.links or ())
    links = [link for link in up if link.p2p is not False]
    if len(links) < len(up):
        notes.append(
            f"{label(gpu)}: {len(up) - len(links)} of {len(up)} NVLinks are up but carry no P2P; "
            f"they are not used"
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
            strange["lead to itself"] += 1
        elif far in local:
            found.gpus[far] += 1
        else:
            _elsewhere(far, link, facts, found, strange)
    for why, count in strange.items():
        notes.append(f"{label(gpu)}: {count} NVLinks {why}; they are not used")
    speeds = {link.speed for link in links if link.speed}
    found.speed = min(speeds, default=None)
    if len(speeds) > 1:
        notes.append(
            f"{label(gpu)}: its NVLinks run at {min(speeds)} to {max(speeds)} MB/s; all are taken "
            f"for the slowest"
        )
    return found


def _elsewhere(far: str, link: LinkFacts, facts: Facts, found: Ends, strange: Counter[str]) -> None:
    """A far end that has an address, but is no GPU that can be used."""
    device = facts.device.get(far)
    seen = (device.pci_class if device is not None else None) or ""
    if link.remote_type == _IBM_CPU or seen.startswith(CPU_CLASS):
        found.cpus[far] += 1
    elif link.remote_type == _GPU or (link.remote_type != _SWITCH and seen.startswith("0x03")):
        strange[f"lead to a GPU that cannot be used here ({far})"] += 1
    else:
        found.switches[far] += 1
