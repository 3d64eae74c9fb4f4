"""The clock on a real machine: every hop occupies the links of its way, rings share by bandwidth.

It is how a set of rings is judged as plans run them: an all_reduce along the found rings against
one along the same GPUs in index order. :class:`Machine` is what a choice of plans goes by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringcoll.algorithms import build
from ringcoll.algorithms.channels import Channels, alternating, channels_along
from ringcoll.errors import ArgumentError
from ringcoll.model.links import Links, Port, Wire
from ringcoll.model.predict import predict
from ringcoll.topology.paths import routes, stores
from ringcoll.topology.rings import RingSet
from ringcoll.topology.system import Gpu, Nic, NvSwitch, System

_GB = 1e9
_RING_BYTES = 256 << 20  # of the all_reduce by which rings are compared


@dataclass(frozen=True, eq=False, slots=True)
class Machine:
    """What the tuner knows of a machine; ranks of a process share one object.

    ``links`` are those that stores take. ``channels`` are the rings of plans; None: one in the
    order of the ranks is as good. ``all_pairs``: every pair is one switch hop apart, or there is
    only one.
    """

    links: Links
    channels: Channels | None
    all_pairs: bool


def machine_of(system: System, stored: RingSet, overheads: Wire) -> Machine:
    """The machine of ranks on all GPUs of a system, two or more, in their order.

    ``stored`` are its rings for kernels that store; of ``overheads`` α and L are used.
    """
    links = machine_links(system, stored=True, alpha=overheads.alpha, latency=overheads.latency)
    rings = stored.rings
    channels = channels_along([r.order for r in rings], [r.bandwidth for r in rings])
    plain = channels.rings == (tuple(range(len(system.gpus))),)
    alike = stored.all_pairs or len(system.gpus) == 2
    return Machine(links, None if plain else channels, alike)


def machine_links(
    system: System,
    gpus: Sequence[Gpu] | None = None,
    *,
    stored: bool = False,
    alpha: float = 0.0,
    latency: float = 0.0,
) -> Links:
    """The wires between GPUs (None: all), rank i on the i-th: each pair goes the best way there is.

    ``stored``: it goes the way of a GPU's stores, without relays. A message occupies the first link
    of its way for ``alpha`` seconds besides its bytes; ``latency`` is its flight in seconds.
    """
    chosen = system.gpus if gpus is None else tuple(gpus)
    if len(chosen) < 2:
        raise ArgumentError(f"gpus: {len(chosen)} of them; ranks need two or more to have links")
    found = routes(system, chosen)
    if stored:
        found = stores(found)
    ways: list[tuple[tuple[tuple[Port, Wire], ...], ...]] = []
    fastest = 0.0
    for src in range(len(chosen)):
        row: list[tuple[tuple[Port, Wire], ...]] = []
        for dst in range(len(chosen)):
            if src == dst:
                row.append(())
                continue
            there = found.get((src, dst), ())
            if not there:
                raise ArgumentError(f"gpus: {chosen[src].name} does not reach {chosen[dst].name}")
            row.append(
                tuple(
                    (
                        Port(f"{link.kind.value} {link.src} -> {link.dst}"),
                        Wire(link.bandwidth * _GB / by, 0.0 if at else alpha),
                    )
                    for at, (link, by) in enumerate(there[0].uses)
                )
            )
            fastest = max(fastest, there[0].bandwidth)
        ways.append(tuple(row))
    return Links(fastest * _GB, alpha, latency, topology="machine", ways=tuple(ways))


@dataclass(frozen=True, slots=True)
class Known:
    """Seconds with the measurement or publication that they are from; None: there is none."""

    seconds: float | None
    source: str = ""

    def describe(self, name: str) -> str:
        """A line for people."""
        if self.seconds is None:
            return f"no {name} known, 0 assumed"
        return f"{name} = {self.seconds * 1e6:.4g} us: {self.source}"


_NCCL = "NCCL 2.28's model, src/graph/tuning.cc: "

_NVLINK_LATENCY = Known(3.4e-6, _NCCL + "a hop of a ring over NVLink, protocol Simple")
_NETWORK_LATENCY = Known(14e-6, _NCCL + "a hop of a ring over the network, protocol Simple")
NETWORK_ALPHA = Known(1e-6, _NCCL + "to post a message, on Intel hosts")

_ALPHAS = {
    90: Known(
        2.6e-6,
        "measured on 4 H200, a chain of 12 thread blocks "
        "(benchmarks/results/gpu_timing_model_4_of_12_blocks.json)",
    )
}
"""α between GPUs of an NVSwitch, by compute capability."""


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """What a machine is to a cluster of such machines.

    ``bandwidth`` is that of a GPU to its switch, ``network`` a GPU's share of the network ports,
    None where there are none: bytes a second in each direction.
    """

    gpus: int
    bandwidth: float
    network: float | None
    alpha: Known
    latency: Known = _NVLINK_LATENCY
    network_alpha: Known = NETWORK_ALPHA
    network_latency: Known = _NETWORK_LATENCY


def node_figures(system: System) -> NodeFigures:
    """The figures of a machine, its GPUs on switches, as a node of many.

    A port is as fast as the slower of its cable and its bus; GPUs have equal shares of all ports.
    """
    if not any(isinstance(node, NvSwitch) for node in system.nodes):
        raise ArgumentError(
            f"{system.title}: its GPUs are not connected by NVSwitches, so one bandwidth does not "
            f"describe them; give --per-node, --bandwidth and --network-bandwidth instead"
        )
    ports = [node for node in system.nodes if isinstance(node, Nic)]
    together = sum(min(link.bandwidth for link in system.out[port.name]) for port in ports)
    count = len(system.gpus)
    alpha = _ALPHAS.get(system.gpus[0].sm or 0, Known(None))
    share = together / count * _GB if ports else None
    return NodeFigures(count, machine_links(system).bandwidth, share, alpha)


def ring_seconds(
    links: Links, orders: Sequence[Sequence[int]], shares: Sequence[float], nbytes: int
) -> float:
    """Seconds of an all_reduce that goes along several rings, each with its share of the bytes."""
    plan = build("all_reduce", "ring", len(orders[0]), rings=orders)
    return predict(plan, nbytes, links, slices=1, shares=tuple(shares)).seconds


def ring_gain(system: System, found: RingSet, *, stored: bool = False) -> float:
    """How many times as long an all_reduce takes in index order as along the found rings.

    Both go by the best way of each pair, in which other GPUs may relay, or where ``stored`` by that
    of stores, in which none does. Those in index order are as many, by turns in both directions and
    with equal shares: what ``channels=`` makes where no machine is known. 1 where there are no
    rings.
    """
    if not found.rings:
        return 1.0
    links, count = machine_links(system, found.gpus, stored=stored), len(found.rings)
    index = alternating(len(found.gpus), count)
    return ring_seconds(links, index, [1.0] * count, _RING_BYTES) / _along(links, found)


def times_as_long(system: System, found: RingSet, other: RingSet) -> float:
    """How many times as long an all_reduce takes along other rings of the same GPUs and links."""
    links = machine_links(system, found.gpus)
    return _along(links, other) / _along(links, found)


def format_gain(system: System, found: RingSet, *, stored: bool = False) -> tuple[str, ...]:
    """A line for people on what the found rings gain; none where there is only one."""
    if len(found.rings) < 2:
        return ()
    gain = ring_gain(system, found, stored=stored)
    ways = "no GPU relays, as in calls" if stored else "GPUs may relay"
    return (
        f"an all_reduce takes {gain:.3g} times as long on paper along as many rings in index order "
        f"({ways})\n",
    )


def _along(links: Links, rings: RingSet) -> float:
    orders = [ring.order for ring in rings.rings]
    shares = [ring.bandwidth for ring in rings.rings]
    return ring_seconds(links, orders, shares, _RING_BYTES)
