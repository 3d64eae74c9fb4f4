"""Short names of nodes for people: GPU3, NIC0, CPU1, switch 0c:00.0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ringcoll.topology.system import (
    GPU_LINKS,
    Cpu,
    Gpu,
    Link,
    LinkKind,
    Network,
    Nic,
    Node,
    NvSwitch,
    System,
)


def labels_of(system: System) -> Mapping[str, str]:
    """A label for each node, by its name.

    GPUs are numbered as ``system.gpus`` has them, NICs in the order of the nodes; both are unique
    in the system. What else there is is unique on its host only.
    """
    labels = {gpu.name: f"GPU{i}" for i, gpu in enumerate(system.gpus)}
    nics = [node for node in system.nodes if isinstance(node, Nic)]
    labels.update({nic.name: f"NIC{i}" for i, nic in enumerate(nics)})
    for node in system.nodes:
        if not isinstance(node, Gpu | Nic):
            labels[node.name] = _label(system, node)
    return labels


def _label(system: System, node: Node) -> str:
    if isinstance(node, Cpu):
        return f"CPU{node.numa}" if node.numa >= 0 else "CPU"
    if isinstance(node, NvSwitch):
        switches = [n for n in system.nodes if isinstance(n, NvSwitch) and n.host == node.host]
        names = (GPU_LINKS[x.kind].switch for x in system.out[node.name] if x.kind in GPU_LINKS)
        name = next(names, "NVSwitch")
        return f"{name}{switches.index(node)}" if len(switches) > 1 else name
    if isinstance(node, Network):
        return "network"
    return f"switch {busid_of(system, node)}".rstrip()


def busid_of(system: System, node: Node) -> str:
    """The bus id, without its domain where all GPUs are in domain 0; "" of what has none."""
    busid = getattr(node, "busid", "")
    plain = all(gpu.busid.startswith("0000:") for gpu in system.gpus)
    return busid.removeprefix("0000:") if plain else busid


def link_label(link: Link) -> str:
    """What the link is made of: "NVLink", "XGMI", "PCIe", "between CPUs", "network"."""
    return "between CPUs" if link.kind is LinkKind.SYS else link.kind.value


def number(bandwidth: float) -> str:
    """GB/s with four digits: "18", "370.8", "1.25"."""
    return f"{bandwidth:.4g}" if bandwidth < 10_000 else f"{bandwidth:.0f}"


def ranges(numbers: Sequence[int]) -> str:
    """Numbers as text: 1, 2, 3 and 7 are "1-3, 7"."""
    runs: list[list[int]] = []
    for one in numbers:
        if runs and one == runs[-1][-1] + 1:
            runs[-1].append(one)
        else:
            runs.append([one])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
