"""The blocks, the memory and the steps of a plan as small integers.

Made once for a plan and kept for its mutants, which share all but one or two of its steps: a proof
then touches lists of integers only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ringcoll.collectives import Collective, Leaf
from ringcoll.errors import IllegalStep
from ringcoll.plan import HELLO, Block, Buffer, Chunk, Plan, Step, check_steps

NOBODY = -1
"""The home of SCRATCH and of messages: their accesses are subject to no entry or exit rule."""

FREE, OUTPUT, INPUT_ONLY = 0, 1, 2
"""What may be written to a cell: anything, no partials, nothing."""


class Row(NamedTuple):
    """A step in numbers.

    ``columns`` are the element-wise reductions (sources, destinations), one for each chunk of
    size 1; ``reads`` and ``writes`` are all their cells; ``hellos`` is a mask of ranks.
    """

    waits: tuple[int, ...]
    hellos: int
    columns: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    signals: tuple[int, ...]


class Numbers:
    """The numbering of one collective's memory and of the steps seen so far.

    Of every cell: ``home`` is the rank whose INPUT or OUTPUT it is, or :data:`NOBODY`; ``guard``
    says what may be written there. ``before`` lists (cell, contribution) for all of INPUT,
    ``after`` (cell, chunk, contributions) for all of OUTPUT. With ``nodes`` steps across nodes are
    checked.
    """

    def __init__(self, collective: Collective, nodes: Sequence[int] | None = None) -> None:
        self.collective = collective
        self.nodes = nodes
        self.leading: dict[Block, int] = {}  # first steps of a block that errors do not count
        self.home: list[int] = []
        self.guard: list[int] = []
        self.names: list[tuple[int, str, int]] = []
        self.blocks: list[Block] = []
        self._cells: dict[tuple[int, str, int], int] = {}
        self._blocks: dict[Block, int] = {}
        self._rows: dict[int, Row] = {}
        self._kept: list[Step] = []
        ranks = range(collective.nranks)
        self.after: list[tuple[int, Chunk, tuple[Leaf, ...]]] = [
            (self._cell(chunk, OUTPUT), chunk, leaves)
            for rank in ranks
            for i, leaves in collective.after(rank).items()
            for chunk in (Chunk(rank, Buffer.OUTPUT, i),)
        ]
        self.before: list[tuple[int, Leaf]] = [
            (self._cell(Chunk(rank, Buffer.INPUT, i), INPUT_ONLY), leaf)
            for rank in ranks
            for i, leaf in collective.before(rank).items()
        ]

    def _cell(self, chunk: Chunk, guard: int = FREE) -> int:
        name = self.collective.cell(chunk)
        number = self._cells.get(name)
        if number is None:
            number = self._cells[name] = len(self.names)
            self.names.append(name)
            self.home.append(chunk.rank if chunk.buffer.given else NOBODY)
            self.guard.append(guard)
        return number

    def cell_text(self, cell: int) -> str:
        """A cell as plans print it."""
        rank, letter, index = self.names[cell]
        return f"{rank}.{letter}[{index}]"

    def block(self, block: Block) -> int:
        """The number of a block."""
        number = self._blocks.get(block)
        if number is None:
            number = self._blocks[block] = len(self.blocks)
            self.blocks.append(block)
        return number

    def row(self, step: Step) -> Row:
        """The numbers of a step that :meth:`admit` has seen."""
        return self._rows[id(step)]

    def admit(self, plan: Plan) -> None:
        """Number the steps of a plan that are new, after checking that they mean something."""
        for block in plan.steps:
            self.block(block)
        fresh = [entry for entry in plan.order if id(entry[1]) not in self._rows]
        try:
            # Only what is new: a mutant shares nearly all steps with the plan before it.
            self._check(Plan(self.collective, tuple(fresh)))
        except IllegalStep:
            # The same complaint with the step's number in the whole plan.
            self._check(plan)
            raise
        for _, step in fresh:
            # The id stays taken while the step is kept.
            self._kept.append(step)
            self._rows[id(step)] = self._number(step)

    def _check(self, plan: Plan) -> None:
        check_steps(plan)
        position: defaultdict[Block, int] = defaultdict(int)
        for block, step in plan.order:
            flaw = _flaw_of_signals(block, step, plan.nranks) or self._flaw_of_chunks(step)
            if self.nodes is not None and not flaw:
                flaw = _flaw_of_nodes(block, step, self.nodes)
            if flaw:
                at = position[block]
                raise IllegalStep(f"{self.collective}: {block}, step {at}: {flaw}: {step}")
            position[block] += 1

    def _flaw_of_chunks(self, step: Step) -> str:
        size = step.srcs[0].size if step.srcs else 1
        if size == 1:
            return ""
        at = {self.collective.cell(u): k for dst in step.dsts for k, u in enumerate(dst.units())}
        for src in step.srcs:
            for k, unit in enumerate(src.units()):
                if at.get(self.collective.cell(unit), k) != k:
                    return f"seen {src} to overlap a destination, wanted the same chunk or another"
        return ""

    def _number(self, step: Step) -> Row:
        size = step.srcs[0].size if step.srcs else 0
        srcs = [[self._cell(unit) for unit in chunk.units()] for chunk in step.srcs]
        dsts = [[self._cell(unit) for unit in chunk.units()] for chunk in step.dsts]
        hellos = 0
        for wait in step.waits:
            if wait.channel == HELLO:
                hellos |= 1 << wait.rank
        return Row(
            tuple(self.block(wait) for wait in step.waits if wait.channel != HELLO),
            hellos,
            tuple((_at(srcs, k), _at(dsts, k)) for k in range(size)),
            _flat(srcs),
            _flat(dsts),
            tuple(self.block(signal) for signal in step.signals),
        )


def _at(cells: list[list[int]], k: int) -> tuple[int, ...]:
    return tuple(chunk[k] for chunk in cells)


def _flat(cells: Iterable[list[int]]) -> tuple[int, ...]:
    return tuple(cell for chunk in cells for cell in chunk)


def _flaw_of_signals(block: Block, step: Step, nranks: int) -> str:
    """A hello is level-triggered: nobody posts it, and waiting for it twice is a mistake."""
    hellos = [wait for wait in step.waits if wait.channel == HELLO]
    if len(set(hellos)) < len(hellos):
        return "seen one hello awaited twice, wanted once"
    for wait in hellos:
        if wait.rank == block.rank or not 0 <= wait.rank < nranks:
            return f"seen a wait for the {wait}, wanted that of another of {nranks} ranks"
    if any(signal.channel == HELLO for signal in step.signals):
        return "seen a hello among the signals, wanted a block: entering a call posts the hello"
    if block in step.signals or block in step.waits:
        return "seen a signal between a block and itself, wanted another block"
    return ""


def _flaw_of_nodes(block: Block, step: Step, nodes: Sequence[int]) -> str:
    """Between nodes the only step is a copy of one local source to remote destinations."""
    here = nodes[block.rank]
    far = [chunk for chunk in (*step.srcs, *step.dsts) if nodes[chunk.rank] != here]
    if not far:
        return ""
    if any(chunk in step.srcs for chunk in far):
        return f"seen a source on node {nodes[far[0].rank]}, wanted one on node {here}"
    if len(step.srcs) > 1:
        return f"seen {len(step.srcs)} sources reduced into another node, wanted a copy of one"
    if step.srcs[0].rank != block.rank:
        return f"seen a source of rank {step.srcs[0].rank}, wanted one of rank {block.rank}"
    return ""
