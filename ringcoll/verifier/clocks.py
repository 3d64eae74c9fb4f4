"""Happens-before: vector clocks over blocks, and the accesses that they leave in no order.

The k-th signal of a pair of blocks is taken by its k-th wait in every legal order, so what happens
before what is a property of the plan, not of a schedule: one walk finds every race. For each cell
the last write and the reads since are kept, as FastTrack does (Flanagan and Freund, 2009).

In the protocols LL and LL128 a signal whose waiter itself reads SCRATCH lines that the signal's
step wrote rides in those lines. It orders nothing but them, so no clock is joined over it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

from ringcoll.errors import EntryViolation, ExitViolation, Race, UnawaitedSignal
from ringcoll.verifier.cells import NOBODY, Numbers, Row

_NEVER = -1


class _Message(NamedTuple):
    """A signal on its way: what its sender knew when it was posted."""

    clock: list[int]
    sender: int
    time: int
    entered: int
    heard: int
    depth: int
    writes: tuple[int, ...]


class Clocks:
    """What every block knows of the others, grown step by step.

    A block's time is the number of its steps so far. ``clock[b][a]`` is the last step of block a
    that the next step of block b comes after. ``entered[b]`` is the mask of ranks that b knows to
    have entered; ``heard`` counts lines received in-band too: they prove that their sender has
    started, but order no other memory.
    """

    def __init__(self, numbers: Numbers, *, in_band: bool) -> None:
        self.numbers, self.in_band = numbers, in_band
        count, cells = len(numbers.blocks), len(numbers.names)
        self.count = count
        self.rank = [block.rank for block in numbers.blocks]
        self.time = [0] * count
        self.clock = [[0] * count] * count
        self.entered = [1 << rank for rank in self.rank]
        self.heard = list(self.entered)
        self.depth = [0] * count
        self.sent: defaultdict[int, deque[_Message]] = defaultdict(deque)
        self.writer = [_NEVER] * cells
        self.written = [0] * cells
        self.writes = [0] * cells
        self.readers: list[dict[int, int] | None] = [None] * cells
        self.left: dict[tuple[int, int], tuple[int, int]] = {}

    def where(self, b: int, time: int = 0) -> str:
        """A step as messages name it; the current one if no time is given."""
        block = self.numbers.blocks[b]
        at = (time or self.time[b]) - 1 - self.numbers.leading.get(block, 0)
        return f"{block}, step {max(0, at)}"

    def last_writer(self, cell: int) -> str:
        """The step that wrote a cell last, or the empty string."""
        last = self.writer[cell]
        return self.where(last, self.written[cell]) if last != _NEVER else ""

    def step(self, b: int, row: Row) -> None:
        """Let block ``b`` do its next step; raises Race, or EntryViolation before an entry."""
        self.time[b] += 1
        if row.hellos:
            self.entered[b] |= row.hellos
            self.heard[b] |= row.hellos
        lines = self._take(b, row) if row.waits else None
        time, clock, rank = self.time[b], self.clock[b], self.rank[b]
        writer, written, readers = self.writer, self.written, self.readers
        home, entered = self.numbers.home, self.entered[b]
        for cell in row.reads:
            last = writer[cell]
            if last != b and last >= 0 and clock[last] < written[cell]:
                self._read_anyway(b, cell, lines)
            since = readers[cell]
            if since is None:
                readers[cell] = {b: time}
            else:
                since[b] = time
            if home[cell] != rank and home[cell] >= 0:
                self._away(b, cell, entered, "reads")
        for cell in row.writes:
            last = writer[cell]
            since = readers[cell]
            if since:
                for reader, read in since.items():
                    if reader != b and clock[reader] < read:
                        self._race(b, "writes", cell, "read", reader, read)
                since.clear()
            elif last != b and last >= 0 and clock[last] < written[cell]:
                self._race(b, "writes", cell, "write", last, written[cell])
            writer[cell], written[cell] = b, time
            if self.in_band:
                self.writes[cell] += 1
            if home[cell] != rank and home[cell] >= 0:
                self._away(b, cell, entered, "writes")
        if row.writes:
            self.depth[b] += 1
        for to in row.signals:
            self.sent[b * self.count + to].append(
                _Message(clock, b, time, entered, self.heard[b], self.depth[b], row.writes)
            )

    def _take(self, b: int, row: Row) -> dict[int, tuple[int, int]]:
        """Join the clocks of the signals that are awaited; returns the lines that are one."""
        lines: dict[int, tuple[int, int]] = {}
        clock = self.clock[b]
        for sender in row.waits:
            message = self.sent[sender * self.count + b].popleft()
            self.depth[b] = max(self.depth[b], message.depth)
            self.heard[b] |= message.heard
            if self.in_band:
                carried = self._carried(message, row)
                if carried:
                    lines.update(dict.fromkeys(carried, (sender, message.time)))
                    continue
            self.entered[b] |= message.entered
            clock = list(map(max, clock, message.clock))
            clock[sender] = max(clock[sender], message.time)
        # Never changed in place: messages on their way share it.
        self.clock[b] = clock
        return lines

    def _carried(self, message: _Message, row: Row) -> list[int]:
        home = self.numbers.home
        return [c for c in message.writes if home[c] == NOBODY and c in row.reads]

    def _read_anyway(self, b: int, cell: int, lines: dict[int, tuple[int, int]] | None) -> None:
        """A read of a cell whose last write the clock does not cover: is it ordered in-band?"""
        last, time = self.writer[cell], self.written[cell]
        if lines and lines.get(cell) == (last, time):
            if self.writes[cell] > 1:
                self._race(b, "reads in-band", cell, "second write", last, time)
            return
        # Every earlier read was itself ordered after the write: to come after one is enough.
        clock = self.clock[b]
        for reader, read in (self.readers[cell] or {}).items():
            if reader == b or clock[reader] >= read:
                return
        self._race(b, "reads", cell, "write", last, time)

    def _away(self, b: int, cell: int, entered: int, verb: str) -> None:
        """An access to another rank's INPUT or OUTPUT."""
        owner = self.numbers.home[cell]
        if not entered >> owner & 1:
            raise EntryViolation(
                f"{self.numbers.collective}: {self.where(b)}: {verb} "
                f"{self.numbers.cell_text(cell)}; seen no sign that rank {owner} has entered, "
                f"wanted a wait for its hello or for a signal that comes after it"
            )
        self.left[b, owner] = self.time[b], cell

    def _race(self, b: int, verb: str, cell: int, other: str, a: int, time: int) -> None:
        raise Race(
            f"{self.numbers.collective}: {self.where(b)}: {verb} {self.numbers.cell_text(cell)}; "
            f"seen in no order with the {other} by {self.where(a, time)}, "
            f"wanted a chain of signals from there to here"
        )

    def check_signals(self) -> None:
        """Every signal was taken."""
        for pair, queue in self.sent.items():
            if queue:
                sender, to = divmod(pair, self.count)
                raise UnawaitedSignal(
                    f"{self.numbers.collective}: {self.where(sender, queue[0].time)}: "
                    f"signals {self.numbers.blocks[to]}; seen {len(queue)} more signals than "
                    f"waits for them, wanted as many"
                )

    def check_exits(self) -> None:
        """Every access to p's memory comes before the end of one of p's blocks."""
        blocks_of: dict[int, list[int]] = {}
        for b, time in enumerate(self.time):
            if time:
                blocks_of.setdefault(self.rank[b], []).append(b)
        for (b, owner), (time, cell) in self.left.items():
            own = blocks_of.get(owner, [])
            if not any(self.clock[o][b] >= time for o in own):
                ends = (
                    f"the end of any of its {len(own)} blocks" if own else "a rank without blocks"
                )
                raise ExitViolation(
                    f"{self.numbers.collective}: {self.where(b, time)}: touches "
                    f"{self.numbers.cell_text(cell)}; seen in no order with {ends}, "
                    f"wanted a signal that rank {owner} awaits before it returns"
                )

    def unheard(self) -> tuple[int, int] | None:
        """Ranks (p, q) such that p may return before q has entered; None if there are none."""
        nranks = self.numbers.collective.nranks
        heard = [1 << rank for rank in range(nranks)]
        for b, mask in enumerate(self.heard):
            if self.time[b]:
                heard[self.rank[b]] |= mask
        for rank, mask in enumerate(heard):
            for other in range(nranks):
                if not mask >> other & 1:
                    return rank, other
        return None
