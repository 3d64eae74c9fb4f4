"""NCCL's graph files: the result of its search, or what NCCL_GRAPH_FILE tells it to use.

``<graphs>`` holds a ``<graph>`` for rings (id 0), trees (1) and others, each with its channels; a
channel lists the GPUs in order, by NVML's index in hexadecimal. All channels of a graph carry the
same, so rings of different bandwidth become different numbers of channels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ringcoll.errors import ArgumentError
from ringcoll.topology.document import Element
from ringcoll.topology.rings import Ring, RingSet
from ringcoll.topology.system import Gpu, PathClass, System
from ringcoll.topology.values import integer, number

RING = 0
"""``id`` of the graph of rings; 1 is that of trees."""

MAX_CHANNELS = 32
"""The most channels of NCCL's own search; it doubles them afterwards."""

# A channel is a thread block: NCCL's table of speeds begins here up to Ampere.
_MAX_SPEED = 40.0

_RING_PATTERN = 4
_HEXADECIMAL = re.compile(r"(?:0x)?[0-9a-f]{1,16}", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Channel:
    """One ring or tree: NVML's indices in order, and the ranks where the file names them.

    ``nets`` are the numbers of the ports by which it enters and leaves the host; none or two.
    """

    devs: tuple[int, ...]
    ranks: tuple[int, ...] = ()
    nets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Graph:
    """A ``<graph>``; the fields are NCCL's attributes, speeds in GB/s of one channel."""

    id: int
    pattern: int
    channels: tuple[Channel, ...] = ()
    crossnic: int = 0
    speedintra: float = 0.0
    speedinter: float = 0.0
    latencyinter: float = 0.0
    typeintra: PathClass = PathClass.LOC
    typeinter: PathClass = PathClass.LOC
    samechannels: bool = False

    @property
    def bandwidth(self) -> float:
        """GB/s of all channels together."""
        return len(self.channels) * self.speedintra


def read_graphs(document: Element) -> tuple[Graph, ...]:
    """The graphs of a ``<graphs>`` element."""
    if document.tag != "graphs":
        document.refuse("the root of a graph file is <graphs>")
    return tuple(_read(element) for element in document.named("graph"))


def _read(element: Element) -> Graph:
    channels = tuple(_channel(child) for child in element.named("channel"))
    if integer(element, "nchannels", len(channels)) != len(channels):
        element.refuse(
            f"nchannels={element.get('nchannels')}, but the graph has {len(channels)} <channel>"
        )
    return Graph(
        id=integer(element, "id", -1),
        pattern=integer(element, "pattern", 0),
        channels=channels,
        crossnic=integer(element, "crossnic", 0),
        speedintra=number(element, "speedintra", 0.0),
        speedinter=number(element, "speedinter", 0.0),
        latencyinter=number(element, "latencyinter", 0.0),
        typeintra=_path_class(element, "typeintra"),
        typeinter=_path_class(element, "typeinter"),
        samechannels=bool(integer(element, "samechannels", 0)),
    )


def _channel(element: Element) -> Channel:
    gpus = list(element.named("gpu"))
    ranks = tuple(integer(gpu, "rank", -1) for gpu in gpus)
    return Channel(
        devs=tuple(_hexadecimal(gpu) for gpu in gpus),
        ranks=ranks if all(rank >= 0 for rank in ranks) else (),
        nets=tuple(_hexadecimal(net) for net in element.named("net")),
    )


def _hexadecimal(element: Element) -> int:
    text = element.get("dev").strip()
    if not _HEXADECIMAL.fullmatch(text):
        element.refuse(f"dev={text[:40]!r} is not a hexadecimal number")
    return int(text, 16)


def _path_class(element: Element, name: str) -> PathClass:
    text = element.get(name, "LOC").strip()
    if text not in PathClass.__members__:
        element.refuse(f"{name}={text[:40]!r}: expected one of {', '.join(PathClass.__members__)}")
    return PathClass[text]


def graphs_document(graphs: Iterable[Graph]) -> Element:
    """A ``<graphs>`` element, laid out as NCCL's."""
    return Element("graphs", {"version": "1"}, tuple(_element(graph) for graph in graphs))


def _element(graph: Graph) -> Element:
    attributes = {
        "id": str(graph.id),
        "pattern": str(graph.pattern),
        "crossnic": str(graph.crossnic),
        "nchannels": str(len(graph.channels)),
        "speedintra": f"{graph.speedintra:g}",
        "speedinter": f"{graph.speedinter:g}",
        "latencyinter": f"{graph.latencyinter:g}",
        "typeintra": graph.typeintra.name,
        "typeinter": graph.typeinter.name,
        "samechannels": str(int(graph.samechannels)),
    }
    return Element("graph", attributes, tuple(_lines(channel) for channel in graph.channels))


def _lines(channel: Channel) -> Element:
    gpus = []
    for place, dev in enumerate(channel.devs):
        rank = {"rank": str(channel.ranks[place])} if channel.ranks else {}
        gpus.append(Element("gpu", {"dev": f"{dev:#x}" if dev else "0", **rank}))
    nets = [Element("net", {"dev": f"{net:#x}" if net else "0"}) for net in channel.nets]
    return Element("channel", {}, (*nets[:1], *gpus, *nets[1:]))


def graph_of_rings(rings: RingSet) -> Graph:
    """Rings as NCCL takes them: channels that all carry the same.

    The speed of a channel is the one of the greatest sum at which no ring exceeds its bandwidth;
    what a ring has beyond a multiple of it is lost, and so are rings after the widest MAX_CHANNELS.
    """
    if not rings.rings or any(ring.bandwidth <= 0 for ring in rings.rings):
        raise ArgumentError(
            "rings: a graph file needs one ring or more, each with a bandwidth above 0"
        )
    strongest = sorted(rings.rings, key=lambda ring: -ring.bandwidth)[:MAX_CHANNELS]
    speed = _channel_speed([ring.bandwidth for ring in strongest])
    several = len({gpu.host for gpu in rings.gpus}) > 1
    channels = []
    for ring in strongest:
        gpus = [rings.gpus[place] for place in ring.order]
        ranks = tuple(gpu.rank for gpu in gpus if gpu.rank is not None) if several else ()
        channel = Channel(tuple(gpu.dev for gpu in gpus), ranks if len(ranks) == len(gpus) else ())
        channels += [channel] * _fitting(ring.bandwidth, speed)
    worst = max(hop for ring in strongest for hop in ring.hops)
    return Graph(
        id=RING,
        pattern=_RING_PATTERN,
        channels=tuple(channels),
        speedintra=speed,
        speedinter=speed,
        typeintra=worst,
        typeinter=PathClass.PIX,
        samechannels=len(set(channels)) == 1,
    )


def _fitting(bandwidth: float, speed: float) -> int:
    """How many channels of ``speed`` a ring carries; sums of floats may miss by a little."""
    return int(bandwidth / speed * (1 + 1e-6))


def _channel_speed(bandwidths: list[float]) -> float:
    """The speed of equal channels, at most MAX_CHANNELS, whose sum is greatest.

    Of those that are as good, the fastest that a block can carry; else the slowest.
    """
    sums: dict[float, float] = {}
    for speed in {b / parts for b in bandwidths for parts in range(1, MAX_CHANNELS + 1)}:
        count = sum(_fitting(bandwidth, speed) for bandwidth in bandwidths)
        if count <= MAX_CHANNELS:
            sums[speed] = count * speed
    best = max(sums.values())
    good = [speed for speed, whole in sums.items() if whole >= best * (1 - 1e-3)]
    return max((speed for speed in good if speed <= _MAX_SPEED), default=min(good))


def rings_of_graph(graph: Graph, system: System) -> RingSet:
    """The channels of a graph, each over every GPU, as rings of this system; equal ones are one.

    Every hop has the graph's class, and a path of its two ends only.
    """
    gpus = system.gpus
    sums: dict[tuple[int, ...], float] = {}
    for place, channel in enumerate(graph.channels):
        order = _order(channel, gpus)
        if sorted(order) != list(range(len(gpus))):
            raise ArgumentError(
                f"graph {graph.id}, channel {place}: expected each of the {len(gpus)} GPUs of the "
                f"system once, got dev {', '.join(map(str, channel.devs))}"
            )
        first = order.index(0)
        turned = (*order[first:], *order[:first])
        sums[turned] = sums.get(turned, 0.0) + graph.speedintra
    strongest = sorted(sums.items(), key=lambda item: -item[1])
    rings = tuple(
        Ring(
            order,
            bandwidth,
            (graph.typeintra,) * len(order),
            tuple(
                (gpus[a].name, gpus[b].name)
                for a, b in zip(order, (*order[1:], order[0]), strict=True)
            ),
        )
        for order, bandwidth in strongest
    )
    return RingSet(gpus, rings, tried=("read from a graph file",))


def _order(channel: Channel, gpus: tuple[Gpu, ...]) -> tuple[int, ...]:
    """Places in ``gpus``, by rank where the channel has them, else by dev; -1 if not there."""
    if channel.ranks:
        by_rank = {gpu.rank: place for place, gpu in enumerate(gpus)}
        return tuple(by_rank.get(rank, -1) for rank in channel.ranks)
    by_dev = {gpu.dev: place for place, gpu in enumerate(gpus)}
    return tuple(by_dev.get(dev, -1) for dev in channel.devs)
