"""The usable NVLinks: direct links that both ends report, and fabrics of NVSwitches.

In a virtual machine the switches are hidden, and NVML's links, P2P status and fabric state and
CUDA's peer access may contradict each other. A pair counts as joined only if no source denies it;
every link that is dropped is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ringcoll.topology.detect.endpoints import (
    CPU_CLASS,
    HIDDEN,
    SWITCH_CLASS,
    LinkEnds,
    counted,
    label,
    link_ends,
    listed,
)
from ringcoll.topology.detect.facts import Facts, GpuFacts

_COMPLETED = 3
_STARTING = (1, 2)
_GPU_CLASS = "0x030200"


@dataclass(frozen=True, slots=True)
class Row:
    """The NVLinks of a GPU to one target: a bus id, or ``HIDDEN``.

    ``speed`` is MB/s per link and direction, None if unknown. ``fabric`` names the fabric of
    switches, the same on all hosts of one; None if this host's switches are all there is.
    """

    target: str
    count: int
    tclass: str
    speed: int | None = None
    fabric: str | None = None


def nvlink_rows(facts: Facts) -> tuple[Mapping[str, tuple[Row, ...]], tuple[str, ...]]:
    """The usable NVLinks of every GPU by bus id, and notes."""
    ends, notes = link_ends(facts)
    work = _Fabric(facts, ends, list(notes))
    work.join_pairs()
    work.resolve_unknown()
    fabrics = work.fabrics()
    return {busid: tuple(work.rows(busid, fabrics)) for busid in ends}, tuple(work.notes)


class _Fabric:
    """The links of one machine while they are checked; ``ends`` is changed in place."""

    def __init__(self, facts: Facts, ends: Mapping[str, LinkEnds], notes: list[str]) -> None:
        self.notes = notes
        self._facts = facts
        self._ends = ends
        self._gpus = {gpu.busid: gpu for gpu in facts.gpus if gpu.busid in ends}
        self._names = {busid: label(gpu) for busid, gpu in self._gpus.items()}

    def join_pairs(self) -> None:
        """Keep the direct links that both ends report, between GPUs that may reach each other."""
        for a, mine in self._ends.items():
            for b, theirs in self._ends.items():
                if a >= b or not (mine.gpus[b] or theirs.gpus[a]):
                    continue
                self._take_unknown(a, b)
                self._take_unknown(b, a)
                count = min(mine.gpus[b], theirs.gpus[a])
                if mine.gpus[b] != theirs.gpus[a]:
                    self.notes.append(
                        f"{self._names[a]} reports {counted(mine.gpus[b], 'NVLink')} to "
                        f"{self._names[b]}, which reports {theirs.gpus[a]}; {count} used"
                    )
                if count and not self._joined(a, b):
                    self.notes.append(
                        f"{counted(count, 'NVLink')} between {self._names[a]} and "
                        f"{self._names[b]}: the driver denies P2P between them; not used"
                    )
                    count = 0
                mine.gpus[b] = theirs.gpus[a] = count

    def _take_unknown(self, a: str, b: str) -> None:
        """Count unreported remote ends of ``a`` as the links that ``b`` reports to it."""
        mine = self._ends[a]
        taken = max(0, min(mine.unknown, self._ends[b].gpus[a] - mine.gpus[b]))
        mine.unknown -= taken
        mine.gpus[b] += taken

    def resolve_unknown(self) -> None:
        """Links without a reported remote end lead to switches if NVLink joins the GPU to all."""
        for busid, mine in self._ends.items():
            if not mine.unknown:
                continue
            others = [b for b, e in self._ends.items() if b != busid and e.count]
            sure = all(self._surely(busid, other) for other in others)
            if sure and not mine.gpus.total() and not mine.cpus.total():
                mine.switches[HIDDEN] += mine.unknown
                how = "NVLink joins it to all others, so they count as links to NVSwitches"
            else:
                how = "not used"
            self.notes.append(
                f"{self._names[busid]}: NVML does not report the remote end of "
                f"{counted(mine.unknown, 'NVLink')}; {how}"
            )
            mine.unknown = 0

    def fabrics(self) -> Mapping[str, str | None]:
        """The fabric of switches that each GPU is part of, by bus id."""
        members = [busid for busid, mine in self._ends.items() if mine.switches.total()]
        self._note_fabric_managers(members)
        groups = []
        for group in _cliques(members, self._joined):
            if len(group) == 1 and len(members) > 1:
                (alone,) = group
                self.notes.append(
                    f"{self._names[alone]}: its {self._ends[alone].switches.total()} NVLinks lead "
                    f"to NVSwitches, but P2P reaches no other GPU; it is left out of the fabric: "
                    f"check the fabric manager (nvidia-smi -q)"
                )
                continue
            groups.append(group)
        if len(groups) > 1:
            parts = "; ".join(self._list(group) for group in groups)
            self.notes.append(f"the NVSwitches form {len(groups)} partitions: {parts}")
        named = self._named(groups)
        # ``build`` notes it for the only fabric of a host, and unequal numbers of links too.
        if any(name is not None for name in named.values()):
            self._note_linkless(groups)
        return named

    def _named(self, groups: Sequence[Sequence[str]]) -> dict[str, str | None]:
        """A name for every fabric that spans hosts, or of which a host has several.

        Hosts share a cluster by its UUID, which is all zero on one alone; what is a host's own is
        named by a GPU, so that no two hosts have the same.
        """
        domains = [self._domain(group[0]) for group in groups]
        named: dict[str, str | None] = {}
        for group, domain in zip(groups, domains, strict=True):
            name = domain if domains.count(domain) == 1 else None
            if name is None and len(groups) > 1:
                name = self._gpus[group[0]].uuid or group[0]
            named |= dict.fromkeys(group, name)
        return named

    def _domain(self, busid: str) -> str | None:
        """Cluster and clique of a GPU whose cluster spans several hosts."""
        fabric = self._gpus[busid].fabric
        if fabric is None or fabric.state != _COMPLETED or not (fabric.cluster or "").strip("0"):
            return None
        return f"{fabric.cluster}-{fabric.clique}"

    def _note_fabric_managers(self, members: Sequence[str]) -> None:
        for busid in members:
            fabric = self._gpus[busid].fabric
            if fabric is not None and fabric.state in _STARTING:
                self.notes.append(
                    f"{self._names[busid]} has not joined its fabric (state {fabric.state}, "
                    f"status {fabric.status}): is the fabric manager running? Check `systemctl "
                    f"status nvidia-fabricmanager`"
                )
        denied, apart = [], []
        for a in members:
            for b in members:
                pair = self._facts.pair(a, b)
                names = f"{self._names[a]} and {self._names[b]}"
                if pair.nvlink == 0 and pair.access is False:
                    denied.append(names)
                elif a < b and pair.nvlink == 0 and self._apart(a, b):
                    apart.append(names)
        for pairs, why in (
            (denied, "CUDA reports no peer access"),
            (apart, "their fabric cliques differ"),
        ):
            if pairs:
                self.notes.append(
                    f"NVML reports NVLink between {listed(pairs)}, but {why}; they count as not "
                    f"joined"
                )

    def _note_linkless(self, groups: Sequence[Sequence[str]]) -> None:
        most = max(self._ends[busid].switches.total() for group in groups for busid in group)
        for busid, mine in self._ends.items():
            if mine.count == 0:
                self.notes.append(
                    f"{self._names[busid]} has no usable NVLink, others have {most}; it is left "
                    f"out of the fabric: check `nvidia-smi nvlink -s`"
                )

    def _list(self, group: Sequence[str]) -> str:
        return ", ".join(self._names[busid] for busid in group)

    def rows(self, busid: str, fabrics: Mapping[str, str | None]) -> list[Row]:
        """The ``<nvlink>`` rows of a GPU."""
        mine = self._ends[busid]
        rows = []
        for target, count in mine.gpus.items():
            device = self._facts.device.get(target)
            tclass = device.pci_class if device is not None else None
            if count:
                rows.append(Row(target, count, tclass or _GPU_CLASS, mine.speed))
        rows += [Row(far, count, CPU_CLASS, mine.speed) for far, count in mine.cpus.items()]
        if busid in fabrics:
            for far, count in mine.switches.items():
                rows.append(Row(far, count, SWITCH_CLASS, mine.speed, fabrics[busid]))
        return sorted(rows, key=lambda row: row.target)

    def _apart(self, a: str, b: str) -> bool:
        """Whether the fabric manager has put two GPUs into different cliques."""
        one, other = self._gpus[a].fabric, self._gpus[b].fabric
        if one is None or other is None or {one.state, other.state} != {_COMPLETED}:
            return False
        return (one.cluster, one.clique) != (other.cluster, other.clique)

    def _surely(self, a: str, b: str) -> bool:
        """Whether NVML reports NVLink in both directions, and no source denies it."""
        both = self._facts.pair(a, b), self._facts.pair(b, a)
        return self._joined(a, b) and all(pair.nvlink == 0 for pair in both)

    def _joined(self, a: str, b: str) -> bool:
        """Whether no source denies NVLink between two GPUs."""
        if self._apart(a, b):
            return False
        for pair in (self._facts.pair(a, b), self._facts.pair(b, a)):
            if pair.access is False or (pair.nvlink is not None and pair.nvlink != 0):
                return False
            if pair.nvlink is None and (_starting(self._gpus[a]) or _starting(self._gpus[b])):
                return False
        return True


def _starting(gpu: GpuFacts) -> bool:
    return gpu.fabric is not None and gpu.fabric.state in _STARTING


def _cliques(members: Sequence[str], joined: Callable[[str, str], bool]) -> list[list[str]]:
    """Groups in which all are joined: of each component, what is left without its worst members."""
    left = list(members)
    groups = []
    while left:
        group = _component(left, joined)
        while True:
            lacks = {a: sum(not joined(a, b) for b in group if b != a) for a in group}
            worst = max(reversed(group), key=lacks.__getitem__)
            if not lacks[worst]:
                break
            group.remove(worst)
        groups.append(group)
        left = [busid for busid in left if busid not in group]
    return groups


def _component(members: Sequence[str], joined: Callable[[str, str], bool]) -> list[str]:
    """The first member and all that are joined to it, directly or by others."""
    found = {members[0]}
    new = [members[0]]
    while new:
        at = new.pop()
        near = [other for other in members if other not in found and joined(at, other)]
        found.update(near)
        new += near
    return [busid for busid in members if busid in found]
