"""The rows that an executor runs: one period of a lowered plan, repeated S times.

A lowered plan of S slices repeats: slice s does to its chunks what slice 0 did to its own, and the
only edges between slices are credits, from slice s to slice s + W. So one period with two guards
says it all: *await* credits only from slice W on, *grant* them only while slice s + W exists.
:func:`encode` takes the period from a short lowering and refuses a plan that does not repeat.

Why that holds for every S: an edge is derived from a conflict, and slices share memory only where
they share a SCRATCH slot, W apart. A path that could make an edge redundant never leads from a
slice to an earlier one, so whether an edge stays is decided between its own two slices, and a
shift of both by one slice changes nothing. Entry waits stand before all slices and exit waits
after them; both are decided by the first and by the last slice alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ringcoll.collectives import Collective
from ringcoll.errors import LaunchRefused
from ringcoll.labels import StepLabels, labels
from ringcoll.launch import Launch
from ringcoll.lower import place, synchronise, without_signals
from ringcoll.plan import HELLO, Block, Buffer, Chunk, Plan, Step


@dataclass(frozen=True, slots=True)
class Row:
    """One step of the period. Blocks are numbers into ``Program.blocks``.

    ``srcs`` and ``dsts`` are unsliced chunks; ``waits`` and ``signals`` hold for every slice,
    ``awaits`` (credits taken) from slice W on, ``grants`` (credits given) up to slice S - W - 1.
    """

    srcs: tuple[Chunk, ...]
    dsts: tuple[Chunk, ...]
    labels: StepLabels
    waits: tuple[int, ...]
    signals: tuple[int, ...]
    awaits: tuple[int, ...]
    grants: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockProgram:
    """What one block runs: await ``entry`` ranks' hellos, the rows S times, post, await the end."""

    block: Block
    entry: tuple[int, ...]
    rows: tuple[Row, ...]
    exit_signals: tuple[int, ...]
    exit_waits: tuple[int, ...]

    @property
    def messages(self) -> bool:
        """Whether its rows send or receive messages between nodes; then all of them do."""
        return any(c.buffer is Buffer.WIRE for row in self.rows for c in (*row.srcs, *row.dsts))


@dataclass(frozen=True, slots=True)
class Program:
    """A lowered plan for any number of slices that its window allows, a program a block.

    ``collective`` is the plan's before slicing, with ``in_place`` of the launch. Each of the
    ``scratch`` chunks a rank has ``slots`` slots, W'. ``heard``: for each rank the ranks that have
    entered when it ends, bit p for rank p. ``total``: they are all ranks, for each.
    """

    collective: Collective
    programs: tuple[BlockProgram, ...]
    scratch: int
    slots: int
    heard: tuple[int, ...]
    total: bool = field(init=False, compare=False, repr=False)
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        parts = self.collective, self.programs, self.scratch, self.slots, self.heard
        object.__setattr__(self, "_hash", hash(parts))
        all_ranks = (1 << len(self.heard)) - 1
        total = all_ranks == 1 or all(mask == all_ranks for mask in self.heard)
        object.__setattr__(self, "total", total)

    def __hash__(self) -> int:
        """Computed once: what follows from a program is kept by it."""
        return self._hash

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks, by number."""
        return tuple(program.block for program in self.programs)

    def of(self, rank: int) -> tuple[BlockProgram, ...]:
        """The programs of one rank."""
        return tuple(p for p in self.programs if p.block.rank == rank)


def encode(plan: Plan, launch: Launch) -> Program:
    """The program of ``lower(plan, launch)``, found without spelling out every slice.

    Where signals ride in the data, the rows have no others. A plan that does not repeat from slice
    W on is refused.
    """
    short = min(launch.slices, 2 * launch.window + 2)
    return _encode(plan, launch if short == launch.slices else replace(launch, slices=short))


@lru_cache(maxsize=512)
def _encode(plan: Plan, launch: Launch) -> Program:
    placed = place(plan, launch)
    lowered = synchronise(placed, launch)
    heard = _heard(lowered)
    if launch.in_band:
        lowered = without_signals(lowered)
    count = launch.slices
    blocks = list(lowered.steps)
    number = {block: i for i, block in enumerate(blocks)}
    rows_of: dict[Block, list[tuple[Step, StepLabels]]] = {b: [] for b in blocks}
    for (block, step), label in zip(placed.order, labels(placed), strict=True):
        rows_of[block].append((step, label))

    by_hand = any(step.waits for _, step in plan.order)
    programs = []
    for block in blocks:
        entry, steps = _entered(lowered.steps[block], by_hand=by_hand)
        period = len(rows_of[block])
        body, tail = steps[: period * count], steps[period * count :]
        rows = []
        for i, (step, label) in enumerate(rows_of[block]):
            column = body[i::period] if period else []
            waits, awaits = _guarded([s.waits for s in column], launch.slots, credit_first=False)
            signals, grants = _guarded([s.signals for s in column], launch.slots, credit_first=True)
            if waits is None or signals is None:
                raise LaunchRefused(
                    f"{plan.collective}: {block}, row {i} does not repeat from slice to slice; "
                    f"slices=1 runs it"
                )
            rows.append(
                Row(
                    step.srcs,
                    step.dsts,
                    label,
                    tuple(number[w] for w in waits),
                    tuple(number[s] for s in signals),
                    tuple(number[w] for w in awaits),
                    tuple(number[s] for s in grants),
                )
            )
        exit_signals = tuple(number[s] for step in tail for s in step.signals)
        exit_waits = tuple(number[w] for step in tail for w in step.waits)
        programs.append(BlockProgram(block, entry, tuple(rows), exit_signals, exit_waits))
    return Program(placed.collective, tuple(programs), placed.scratch(), launch.slots, heard)


def _entered(steps: Sequence[Step], *, by_hand: bool) -> tuple[tuple[int, ...], list[Step]]:
    """The ranks whose hellos a block awaits at its beginning, and its steps without these waits.

    Lowering puts a step that awaits only hellos before all others. ``by_hand``: the plan's own
    steps wait; a hello that one awaits later may as well be awaited first, since no rank needs
    anything before it enters.
    """
    if not by_hand:
        first = steps[0].waits if steps else ()
        if first and all(wait.channel == HELLO for wait in first):
            return tuple(wait.rank for wait in first), list(steps[1:])
        return (), list(steps)
    waits = [wait for step in steps for wait in step.waits if wait.channel == HELLO]
    rest = [
        step._replace(waits=tuple(wait for wait in step.waits if wait.channel != HELLO))
        for step in steps
    ]
    return tuple(dict.fromkeys(wait.rank for wait in waits)), rest


Guarded = tuple[tuple[Block, ...] | None, tuple[Block, ...]]


def _guarded(column: list[tuple[Block, ...]], slots: int, *, credit_first: bool) -> Guarded:
    """Split one row's edges, slice by slice, into those of every slice and credits.

    Credits are absent from the first W slices (taken) or from the last W (given). None if the
    slices do not follow that pattern.
    """
    bare = column[-1] if credit_first else column[0]
    if all(edges == bare for edges in column):
        return bare, ()
    full = column[0] if credit_first else column[-1]
    extra = Counter(full) - Counter(bare)
    credits = tuple(b for b in full if extra[b])
    last = len(column) - 1
    # Few of the slices differ.
    kinds = {(s, (last - at if credit_first else at) >= slots) for at, s in enumerate(column)}
    for edges, has_credits in kinds:
        if Counter(edges) != (Counter(bare) + extra if has_credits else Counter(bare)):
            return None, ()
    return bare, credits


def _heard(lowered: Plan) -> tuple[int, ...]:
    """For each rank the ranks that are known to have entered when it ends: bits."""
    knows = {block: 1 << block.rank for block in lowered.steps}
    sent: dict[tuple[Block, Block], list[int]] = {}
    taken: Counter[tuple[Block, Block]] = Counter()
    for block, step in lowered.order:
        for wait in step.waits:
            if wait.channel == HELLO:
                knows[block] |= 1 << wait.rank
            else:
                posted = sent.get((wait, block), [])
                at = taken[wait, block]
                taken[wait, block] += 1
                knows[block] |= posted[at] if at < len(posted) else 0
        for signal in step.signals:
            sent.setdefault((block, signal), []).append(knows[block])
    ends = [0] * lowered.nranks
    for block, mask in knows.items():
        ends[block.rank] |= mask
    return tuple(ends)


def expand(program: Program, block: BlockProgram, slices: int) -> Iterator[Step]:
    """The steps of one block for S slices, as :func:`ringcoll.lower.lower` spells them out."""
    names = program.blocks
    slots = min(program.slots, slices)

    def cut(chunk: Chunk, at: int) -> Chunk:
        if chunk.buffer is Buffer.SCRATCH:
            return Chunk(chunk.rank, chunk.buffer, chunk.index * slots + at % slots)
        return Chunk(chunk.rank, chunk.buffer, chunk.index * slices + at)

    if block.entry:
        yield Step(waits=tuple(Block(rank, HELLO) for rank in block.entry))
    for at in range(slices):
        for row in block.rows:
            waits = row.waits + (row.awaits if at >= slots else ())
            signals = row.signals + (row.grants if at < slices - slots else ())
            yield Step(
                tuple(cut(c, at) for c in row.srcs),
                tuple(cut(c, at) for c in row.dsts),
                tuple(names[w] for w in sorted(waits)),
                tuple(names[s] for s in sorted(signals)),
            )
    if block.exit_signals:
        yield Step(signals=tuple(names[s] for s in block.exit_signals))
    if block.exit_waits:
        yield Step(waits=tuple(names[w] for w in block.exit_waits))
