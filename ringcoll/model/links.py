"""The figures of the links between ranks, and which ports a message occupies.

A *wire* is one direction of one link: B bytes a second, α seconds a message that occupy it
whatever the size, L seconds of flight that do not. :class:`Links` says which wires exist.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from ringcoll.errors import ArgumentError

Topology = Literal["switch", "pairs", "memory", "machine"]
"""How ranks of one node are connected: see :class:`Links`."""

KINDS: dict[Topology, str] = {
    "switch": "each rank has one egress and one ingress port",
    "pairs": "each ordered pair of ranks has a link of its own",
    "memory": "all ranks share one memory",
    "machine": "each pair of ranks takes its way over the links of the machine, which others share",
}
"""The kinds in a few words each."""


class Port(NamedTuple):
    """What serves one byte at a time, a wire's end, a memory or a core, of two ranks (-1: none)."""

    kind: str
    first: int = -1
    second: int = -1

    def __str__(self) -> str:
        if self.first < 0:
            return self.kind
        if self.second < 0:
            return f"{self.kind} of rank {self.first}"
        return f"{self.kind} {self.first} -> {self.second}"


@dataclass(frozen=True, slots=True)
class Wire:
    """One direction of a link of ``bandwidth`` bytes a second.

    Each message occupies it for ``alpha`` seconds (LogGP's o) besides its bytes; during the
    ``latency`` seconds of flight it is free.
    """

    bandwidth: float
    alpha: float = 0.0
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ArgumentError(f"bandwidth={self.bandwidth}: bytes a second, more than 0")
        for name in ("alpha", "latency"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ArgumentError(f"{name}={value}: seconds, at least 0")


@dataclass(frozen=True, slots=True)
class Links:
    """The wires between ranks, in bytes a second and direction, and seconds.

    ``topology`` is one of

    - ``switch``: each rank has one egress and one ingress port of B for all its peers;
    - ``pairs``: each ordered pair of ranks has a wire of its own;
    - ``memory``: all hops share one memory of B bytes copied a second, the case of CPU ranks
      that nothing paces; α occupies the core of the rank that runs the step;
    - ``machine``: each ordered pair occupies the links of its way, which others share: a message
      from rank i to rank j occupies ``ways[i][j]``.

    With infinite ``local_bandwidth`` copies within a rank cost nothing. Without ``nodes`` all ranks
    share one. ``network`` is the port that each rank has to other nodes, None: the same as inside;
    ``per_port`` consecutive ranks of a node share each of them.
    """

    bandwidth: float
    alpha: float = 0.0
    latency: float = 0.0
    topology: Topology = "switch"
    local_bandwidth: float = math.inf
    nodes: tuple[int, ...] = ()
    network: Wire | None = None
    ways: tuple[tuple[tuple[tuple[Port, Wire], ...], ...], ...] = ()
    per_port: int = 1
    inside: Wire = field(init=False, repr=False, compare=False)
    port_ranks: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Of each rank the first one that shares its port to other nodes."""

    def __post_init__(self) -> None:
        if self.topology not in get_args(Topology):
            known = ", ".join(get_args(Topology))
            raise ArgumentError(f"links={self.topology!r}: one of {known}")
        if (self.topology == "machine") != bool(self.ways):
            raise ArgumentError(
                f"links={self.topology!r}: ways=, the paths of a machine, belong to "
                f"links='machine' alone, which needs them"
            )
        if not self.local_bandwidth > 0:
            raise ArgumentError(f"local_bandwidth={self.local_bandwidth}: more than 0")
        if self.per_port < 1:
            raise ArgumentError(f"per_port={self.per_port}: at least 1 rank for each port")
        wire = Wire(self.bandwidth, self.alpha, self.latency)
        object.__setattr__(self, "inside", wire)
        object.__setattr__(self, "port_ranks", tuple(_port_ranks(self.nodes, self.per_port)))

    def wire(self, src: int, dst: int) -> Wire:
        """The wire that carries a message from one rank to another."""
        if self.nodes and self.nodes[src] != self.nodes[dst]:
            return self.network or self.inside
        return self.inside

    def flight(self, src: int, dst: int) -> float:
        """Seconds between the end of a transfer and its arrival; 0 within a rank."""
        return 0.0 if src == dst else self.wire(src, dst).latency

    def ports(self, src: int, dst: int) -> tuple[tuple[Port, Wire], ...]:
        """The ports that a message from ``src`` to another rank occupies.

        A memory is no port of a message: all that a step touches loads it, see
        :meth:`ringcoll.model.loads.Ports.loads`.
        """
        if self.topology == "machine":
            return self.ways[src][dst]
        wire = self.wire(src, dst)
        if self.nodes and self.nodes[src] != self.nodes[dst]:
            out, into = self.port_ranks[src], self.port_ranks[dst]
            return (Port("network egress", out), wire), (Port("network ingress", into), wire)
        if self.topology == "pairs":
            return ((Port("link", src, dst), wire),)
        if self.topology == "memory":
            return ()
        return (Port("egress", src), wire), (Port("ingress", dst), wire)


def _port_ranks(nodes: tuple[int, ...], per_port: int) -> Iterator[int]:
    filling: dict[int, tuple[int, int]] = {}
    for rank, node in enumerate(nodes):
        first, sharing = filling.get(node, (rank, 0))
        if sharing == per_port:
            first, sharing = rank, 0
        filling[node] = first, sharing + 1
        yield first


def equal_nodes(nranks: int, nodes: int) -> tuple[int, ...]:
    """The node of each rank where ``nodes`` nodes hold equally many consecutive ranks."""
    if nodes < 1 or nranks % nodes:
        raise ArgumentError(f"nodes={nodes}: {nranks} ranks do not divide among them")
    return tuple(rank // (nranks // nodes) for rank in range(nranks))
