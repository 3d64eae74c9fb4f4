"""What a communicator knows of its machine, for its choices and for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ringcoll.algorithms import ALGORITHMS
from ringcoll.algorithms.channels import Channels
from ringcoll.model.links import Links

if TYPE_CHECKING:  # most ranks on CPUs know no machine
    from ringcoll.model.machine import Machine
    from ringcoll.topology.rings import RingSet
    from ringcoll.topology.system import System


@dataclass(frozen=True, slots=True, repr=False)
class Topology:
    """The machine that a communicator's ranks have found, the same on all of them.

    ``str()`` of it is the matrix, the rings and their limits, as ``ringcoll topo`` prints them. A
    notebook shows the same as tables.

    Args:
        system: the machine with the ranks' GPUs alone, GPU i the i-th rank's; None: not known.
        rings: the best of it, their orders in ranks; None where the machine is not known.
        stored: the rings that calls go along: the same, unless some of them need GPUs that relay;
            None where calls go along none of the machine's.
        links: by which algorithms are compared; None where nothing is known of them.
        reason: why the machine is not known, or not gone by; "" where it is.
        machine: what the choice of plans goes by.

    Example:
        >>> [comm] = ringcoll.init_all(1)
        >>> comm.topology
        <ringcoll.Topology: not known: CPU ranks, and no topo_file>

    """

    system: System | None = None
    rings: RingSet | None = None
    stored: RingSet | None = None
    links: Links | None = None
    reason: str = ""
    machine: Machine | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        if self.system is None or self.rings is None:
            return f"<ringcoll.Topology: not known: {self.reason}>"
        gpus, rings = len(self.system.gpus), self.rings
        parts = [f"{gpus} GPUs", f"{_rings(len(rings.rings))}, {rings.bandwidth:.4g} GB/s"]
        if self.reason:
            parts.append(f"calls do not use them: {self.reason}")
        return f"<ringcoll.Topology: {'; '.join([self.system.title, *parts])}>"

    def _repr_html_(self) -> str:
        """The matrix and the rings as tables, for notebooks."""
        from html import escape

        if self.system is None or self.rings is None:
            return f"<pre>{escape(repr(self))}</pre>"
        from ringcoll.topology.draw.matrix import matrix

        rows = [row for host in self.system.hosts for row in matrix(self.system, host)]
        rings = [
            ["ring of ranks", "GB/s"],
            *([" → ".join(map(str, r.order)), f"{r.bandwidth:.4g}"] for r in self.rings.rings),
        ]
        return f"<p>{escape(repr(self)[1:-1])}</p>{_table(rows)}{_table(rings)}"

    def format_use(self, collective: str, wanted: int | None = None) -> Iterator[str]:
        """How calls of a collective use the machine, a line each: for ``explain``."""
        if self.system is None or self.rings is None:
            yield f"the machine is not known: {self.reason}"
            return
        yield f"machine: {self.system.title}"
        if self.stored is None or self.machine is None:
            if self.reason:
                yield f"calls do not use it: {self.reason}"
            return
        if not {"ring", "chain"} & {*ALGORITHMS[collective]}:
            return
        channels = self.machine.channels
        if self.machine.all_pairs:
            yield "all ranks reach each other alike: no order of a ring is better than another"
        elif channels is None:
            yield f"no ring exceeds the one in rank order: {self.stored.bandwidth:.4g} GB/s"
        if self.stored.rings != self.rings.rings:
            yield (
                f"rings on which GPUs relay would carry {self.rings.bandwidth:.4g} GB/s; none "
                f"relays yet"
            )
        if channels is None:
            return
        many = _rings(len(channels.rings))
        yield f"ring and chain go along {many}, {self.stored.bandwidth:.4g} GB/s together:"
        if wanted is not None and wanted > len(channels.rings):
            yield f"  (channels={wanted}: in turns, every other turn the other way round)"
        yield from _listed(channels if wanted is None else channels.taken(wanted))
        if collective == "all_reduce":
            from ringcoll.model.machine import format_gain

            for line in format_gain(self.system, self.stored, stored=True):
                yield line.rstrip()

    def __str__(self) -> str:
        return "\n".join(self._parts()).rstrip("\n")

    def _parts(self) -> Iterator[str]:
        system, rings = self.system, self.rings
        if system is None or rings is None:
            yield f"the machine is not known: {self.reason}"
            return
        from ringcoll.model.machine import format_gain
        from ringcoll.topology.draw.matrix import format_matrix
        from ringcoll.topology.draw.words import format_machine, format_notes, format_rings

        yield "GPU i of this table is rank i's\n"
        yield format_matrix(system)
        yield format_rings(system, rings)
        yield from format_gain(system, rings)
        if self.reason:
            yield f"calls do not use them: {self.reason}\n"
        elif self.stored is not None and self.stored.rings != rings.rings:
            yield "no GPU relays for others yet, so that calls go along these:"
            yield format_rings(system, self.stored)
        yield format_machine(system)
        yield from filter(None, [format_notes(system)])


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as HTML; the first is the head."""
    from html import escape

    head, *rest = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in rest)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _rings(count: int) -> str:
    return "1 ring" if count == 1 else f"{count} rings"


def _listed(channels: Channels) -> Iterator[str]:
    count, total = len(channels.rings), sum(channels.weights)
    for ring, weight in zip(channels.rings, channels.weights, strict=True):
        part = "" if count == 1 else f", with {weight} of {total} parts of the bytes"
        yield f"  {' '.join(map(str, ring))}{part}"
