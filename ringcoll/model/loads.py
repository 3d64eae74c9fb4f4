"""Which ports a step of a plan occupies, and how much it puts on each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ringcoll.model.links import Links, Port, Wire
from ringcoll.model.symmetry import Torus
from ringcoll.plan import Block, Buffer, Chunk, Step

Sizes = Callable[[Chunk], float]
"""Bytes of an INPUT or OUTPUT chunk of size 1; SCRATCH holds what was written there."""


class Load(NamedTuple):
    """What a step puts on a port: ``times`` messages of ``width`` (chunks, or bytes) on a wire."""

    port: int
    wire: Wire
    width: float
    times: int


class Ports:
    """Numbers the ports; on a torus a port stands for the same port of every rank."""

    def __init__(self, links: Links, torus: Torus | None) -> None:
        self.links, self.torus = links, torus
        # The memory serves all the ranks that one stands for.
        self.shared = 1 if torus is None else torus.collective.nranks // torus.representatives
        self.ports: list[Port] = []
        self.numbers: dict[Port, int] = {}
        self.core = Wire(links.local_bandwidth)
        self.memory = Wire(links.bandwidth)
        self.alone = Wire(math.inf, links.alpha)

    def loads(self, block: Block, step: Step, width: float, silent: bool) -> tuple[Load, ...]:
        """What a step occupies. In a plan without any data, each signal is a message of none.

        A memory and a core carry half a chunk for each chunk read and for each chunk written: a
        copy of one chunk is a chunk.
        """
        hops = [(src.rank, block.rank) for src in step.srcs if src.rank != block.rank]
        hops += [(block.rank, dst.rank) for dst in step.dsts if dst.rank != block.rank]
        if silent:
            hops += [(block.rank, to.rank) for to in step.signals if to.rank != block.rank]
        touched = len(step.srcs) + len(step.dsts)
        times: dict[tuple[int, Wire, float], int] = {}

        def load(port: Port, wire: Wire, width: float, count: int) -> None:
            key = self.number(port), wire, width
            times[key] = times.get(key, 0) + count

        for src, dst in hops:
            for port, wire in self.links.ports(src, dst):
                load(port, wire, width, 1)
        core = Port("core", block.rank)
        if self.links.topology == "memory":
            load(Port("memory"), self.memory, width / 2, touched * self.shared)
            load(core, self.alone, 0.0, len(hops))
            load(core, self.core, width / 2, touched)
        elif touched and not hops and self.core.bandwidth != math.inf:
            load(core, self.core, width / 2, touched)
        return tuple(Load(*key, count) for key, count in times.items() if count)

    def number(self, port: Port) -> int:
        """The port's number; on a torus all ports of one kind and distance have one."""
        if self.torus is not None and port.first >= 0:
            second = port.second
            if second >= 0:
                second = self.torus.moved(second, port.first)
            port = Port(port.kind, self.torus.home(port.first), second)
        if port not in self.numbers:
            self.numbers[port] = len(self.ports)
            self.ports.append(port)
        return self.numbers[port]


def widths(steps: Sequence[tuple[Block, Step]], sizes: Sizes | None) -> Iterator[float]:
    """Of each step, how much one of its chunks holds."""
    if sizes is None:
        for _, step in steps:
            yield float(step.srcs[0].size) if step.srcs else 0.0
        return
    held: dict[Chunk, float] = {}
    for _, step in steps:
        total = 0.0
        for units in zip(*(chunk.units() for chunk in (*step.srcs, *step.dsts)), strict=True):
            known = [sizes(u) for u in units if u.buffer is not Buffer.SCRATCH]
            known = known or [held[u] for u in units[: len(step.srcs)] if u in held]
            size = max(known, default=0.0)
            held.update((u, size) for u in units[len(step.srcs) :] if u.buffer is Buffer.SCRATCH)
            total += size
        yield total
