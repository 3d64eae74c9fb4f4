"""What the VM with 8 H200 answered, as facts; and facts made up by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from ringcoll.topology.busid import bus_id
from ringcoll.topology.detect.facts import (
    CpuFacts,
    FabricFacts,
    Facts,
    GpuFacts,
    LinkFacts,
    NumaFacts,
    PairFacts,
    PciFacts,
)

VM = Path(__file__).with_name("machines") / "vm-8xh200-facts.json"
LINKS = "nvlink[state,remote,type,version,p2pcap,(ret,val) speed+state]"


def vm_facts() -> Facts:
    """All that was read on that VM."""
    said = json.loads(VM.read_text())
    busids = [bus_id(gpu["pci"]) for gpu in said["gpus"]]
    gpus = []
    for index, (busid, gpu) in enumerate(zip(busids, said["gpus"], strict=True)):
        fabric = gpu["fabric"]
        gpus.append(
            GpuFacts(
                busid=busid,
                index=index,
                sm=gpu["sm"],
                links=tuple(_link(*link) for link in gpu[LINKS]),
                generation_max=gpu["pcie_gen_max"],
                width_max=gpu["pcie_width_max"],
                fabric=FabricFacts(
                    fabric["state"], fabric["status"], fabric["clique"], fabric["cluster"]
                ),
            )
        )
    names = ("p2p_nvlink", "common_ancestor", "cuda_can_access_peer")
    pairs = {}
    for i, a in enumerate(busids):
        for j, b in enumerate(busids):
            if i != j:
                nvlink, ancestor, access = (said[name][i][j] for name in names)
                pairs[a, b] = PairFacts(nvlink, ancestor, bool(access))
    return Facts(
        gpus=tuple(gpus),
        pairs=pairs,
        pci=tuple(_device(*row) for row in said["sysfs_pci"]),
        numa=tuple(NumaFacts(int(name[4:])) for name in said["numa_nodes"]),
        cpu=CpuFacts("x86_64", "GenuineIntel", 6, 143),
        driver="580.0",
    )


def _link(state, remote, kind, _version, p2p, fields):
    (_, speed), (_, _state) = fields
    return LinkFacts(bool(state), bool(p2p), bus_id(remote), kind, speed)


def _device(busid, pci_class, vendor, device, numa, speed, width, max_speed, max_width, path):
    def told(text):
        return None if text.startswith("ERR") else text

    return PciFacts(
        busid=busid,
        path=tuple(part for part in path.split("/") if part.count(":") == 2),
        pci_class=pci_class,
        vendor=vendor,
        device=device,
        max_speed=told(max_speed),
        max_width=int(max_width) if told(max_width) else None,
        width=int(width) if told(width) else None,
        numa=int(numa),
    )


def only(facts: Facts, indices: Iterable[int]) -> Facts:
    """The same machine with some of its GPUs, as in a smaller VM."""
    gpus = tuple(replace(facts.gpus[i], index=n) for n, i in enumerate(indices))
    busids = {gpu.busid for gpu in gpus}
    return replace(
        facts,
        gpus=gpus,
        pairs={pair: said for pair, said in facts.pairs.items() if set(pair) <= busids},
        pci=tuple(d for d in facts.pci if d.busid in busids or d.pci_class != "0x030200"),
    )


def edit(facts: Facts, index: int, change: Callable[[GpuFacts], GpuFacts]) -> Facts:
    """The same with one GPU changed."""
    gpus = tuple(change(gpu) if n == index else gpu for n, gpu in enumerate(facts.gpus))
    return replace(facts, gpus=gpus)


def edit_links(
    facts: Facts, index: int, change: Callable[[int, LinkFacts], LinkFacts | None]
) -> Facts:
    """The same with the links of one GPU changed; None takes one away."""

    def edited(gpu: GpuFacts) -> GpuFacts:
        links = (change(number, link) for number, link in enumerate(gpu.links or ()))
        return replace(gpu, links=tuple(link for link in links if link is not None))

    return edit(facts, index, edited)


def edit_pairs(facts: Facts, far: Callable[[int, int], PairFacts | None]) -> Facts:
    """The same with the pairs changed for which ``far`` of their indices gives something."""
    place = {gpu.busid: n for n, gpu in enumerate(facts.gpus)}
    pairs = {(a, b): far(place[a], place[b]) or said for (a, b), said in facts.pairs.items()}
    return replace(facts, pairs=pairs)


def direct(
    busids: Iterable[str], joins: dict[tuple[int, int], int], *, sm: int = 60, links: int = 4
) -> Facts:
    """A machine whose GPUs are joined by so many links a pair, two GPUs under a PCIe switch."""
    busids = list(busids)
    rows: list[list[LinkFacts]] = [[] for _ in busids]
    for (a, b), count in joins.items():
        for one, other in ((a, b), (b, a)):
            rows[one] += [LinkFacts(True, True, busids[other], 0)] * count
    for row in rows:
        row += [LinkFacts(active=False, p2p=True)] * (links - len(row))
    gpus = tuple(
        GpuFacts(busid, index=n, sm=sm, links=tuple(row), mig=None)
        for n, (busid, row) in enumerate(zip(busids, rows, strict=True))
    )
    near = {pair for a, b in joins for pair in ((a, b), (b, a))}
    pairs = {
        (busids[a], busids[b]): PairFacts(0 if (a, b) in near else 5, None, True)
        for a in range(len(busids))
        for b in range(len(busids))
        if a != b
    }
    pci = []
    for n, busid in enumerate(busids):
        domain = busid.split(":")[0]
        switch = n // 2
        up, down = f"{domain}:{0xE0 + 2 * switch:02x}:00.0", f"{domain}:e{2 * switch + 1:x}:0{n}.0"
        root = f"{domain}:00:0{switch}.0"
        path = (root, up, down, busid)
        numa = 2 * n // len(busids)
        for depth, (at, pci_class) in enumerate(
            ((root, "0x060400"), (up, "0x060400"), (down, "0x060400"), (busid, "0x030200"))
        ):
            device = PciFacts(at, path[: depth + 1], pci_class, numa=numa)
            pci.append(replace(device, max_speed="8.0 GT/s PCIe", max_width=16))
    return Facts(
        gpus=gpus,
        pairs=pairs,
        pci=tuple({device.busid: device for device in pci}.values()),
        cpu=CpuFacts("x86_64", "GenuineIntel", 6, 79),
    )
