"""The plan: for every block of every rank, a short list of steps.

A step waits for signals, reduces its sources into its destinations and posts signals. Copy is a
reduce of one source, a barrier is a step without data. A plan is a sequential program: what it
means is ``order``, run one step at a time. Everything else in the library is a fold over
:func:`walk`: the proof, the clock, the numpy definition and the rows that an executor runs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import NamedTuple

from ringcoll.chunks import Buffer, Chunk
from ringcoll.collectives import Collective
from ringcoll.errors import ArgumentTypeError, Deadlock, IllegalStep

__all__ = [
    "HELLO",
    "Block",
    "Buffer",
    "Chunk",
    "Plan",
    "Step",
    "Symmetry",
    "check_steps",
    "check_types",
    "format_plan",
    "hello",
    "walk",
]

HELLO = -1
"""The channel of a rank's *hello*, the pseudo-block that announces that the rank has entered."""


class Block(NamedTuple):
    """One sequential program of a rank: a lane (pipeline stage) of a channel (ring, tree)."""

    rank: int
    channel: int = 0
    lane: int = 0

    def __str__(self) -> str:
        if self.channel == HELLO:
            return f"hello of rank {self.rank}"
        return f"rank {self.rank} channel {self.channel} lane {self.lane}"


def hello(rank: int) -> Block:
    """The pseudo-block whose signal means "``rank`` has entered the call".

    It is level-triggered: any block may wait for it, none takes it, no step posts it.
    """
    return Block(rank, HELLO, 0)


class Step(NamedTuple):
    """Take one signal from each of ``waits``, reduce ``srcs`` into ``dsts``, post ``signals``.

    A block listed m times in ``waits`` takes m signals. Sources are reduced in the order written.
    All chunks of a step have one size.
    """

    srcs: tuple[Chunk, ...] = ()
    dsts: tuple[Chunk, ...] = ()
    waits: tuple[Block, ...] = ()
    signals: tuple[Block, ...] = ()

    def __str__(self) -> str:
        parts = []
        if self.waits:
            parts.append("wait " + ", ".join(map(_short, self.waits)))
        if self.dsts:
            parts.append(" + ".join(map(str, self.srcs)) + " -> " + ", ".join(map(str, self.dsts)))
        if self.signals:
            parts.append("signal " + ", ".join(map(_short, self.signals)))
        return "; ".join(parts) or "nothing"


def _short(block: Block) -> str:
    if block.channel == HELLO:
        return f"hello {block.rank}"
    return f"{block.rank}.{block.channel}.{block.lane}"


@dataclass(frozen=True, slots=True)
class Symmetry:
    """Ranks as points of a torus: shifting all ranks maps the plan to itself.

    ``shape`` is the torus of the ranks (row-major); a ring of n is ``(n,)``, nodes × local ranks
    is ``(nodes, local)``. ``chunks`` is the torus on which the chunk indices of a segment shift
    along with the ranks, ``()`` where they stay put. Block-to-block signals shift likewise.
    """

    shape: tuple[int, ...]
    chunks: tuple[int, ...] = ()


@dataclass(frozen=True, repr=False)
class Plan:
    """A collective's program. ``order`` is its meaning, ``steps`` its projection per block.

    ``print(plan)`` shows who moves what when, as ``ringcoll explain`` does; a notebook shows the
    same as a table.
    """

    collective: Collective
    order: tuple[tuple[Block, Step], ...]
    symmetry: Symmetry | None = None
    steps: Mapping[Block, tuple[Step, ...]] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __hash__(self) -> int:
        # Kept: whatever is made of a plan is found again by it, and a long one takes milliseconds.
        if not self._hash:
            known = hash((self.collective, self.order, self.symmetry))
            object.__setattr__(self, "_hash", known or 1)
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_hash": 0}  # another process hashes names otherwise

    def __post_init__(self) -> None:
        steps: defaultdict[Block, list[Step]] = defaultdict(list)
        for block, step in self.order:
            steps[block].append(step)
        object.__setattr__(self, "steps", {block: tuple(s) for block, s in steps.items()})

    def __repr__(self) -> str:
        return f"Plan({self.collective}: {len(self.order)} steps in {len(self.steps)} blocks)"

    def __str__(self) -> str:
        # By name: the model stands above plans, and only who looks at a plan loads it.
        return str(import_module("ringcoll.model.explain").plan_text(self))

    def _repr_html_(self) -> str:
        return str(import_module("ringcoll.model.explain").plan_html(self))

    @property
    def nranks(self) -> int:
        """How many ranks take part."""
        return self.collective.nranks

    @property
    def synchronised(self) -> bool:
        """Whether the plan carries waits and signals: a lowered one, or one with its own."""
        return any(step.waits or step.signals for _, step in self.order)

    def blocks(self, rank: int) -> tuple[Block, ...]:
        """The blocks of ``rank``, in the order in which they first appear."""
        return tuple(block for block in self.steps if block.rank == rank)

    def inputs(self, rank: int) -> tuple[Chunk, ...]:
        """The INPUT chunks of ``rank``."""
        count = self.collective.chunks_in("INPUT", rank)
        return tuple(Chunk(rank, Buffer.INPUT, i) for i in range(count))

    def scratch(self) -> int:
        """How many SCRATCH chunks the largest rank uses."""
        return self._used(Buffer.SCRATCH)

    def messages(self) -> int:
        """How many messages the rank gets that gets the most from other nodes."""
        return self._used(Buffer.WIRE)

    def _used(self, buffer: Buffer) -> int:
        used = (
            chunk.index + chunk.size
            for _, step in self.order
            for chunk in (*step.srcs, *step.dsts)
            if chunk.buffer is buffer
        )
        return max(used, default=0)

    def with_order(self, order: tuple[tuple[Block, Step], ...]) -> Plan:
        """The same collective with another program."""
        return replace(self, order=order)


def check_steps(plan: Plan) -> None:
    """Refuse steps that have no meaning: see :class:`ringcoll.errors.IllegalStep`."""
    collective = plan.collective
    limits = {
        (rank, buffer): collective.chunks_in(buffer.name, rank)
        for rank in range(plan.nranks)
        for buffer in (Buffer.INPUT, Buffer.OUTPUT)
    }
    for position, (block, step) in enumerate(plan.order):
        why = _flaw(collective, limits, block, step)
        if why:
            at = sum(other == block for other, _ in plan.order[:position])
            raise IllegalStep(f"{collective}: {block}, step {at}: {why}: {step}")


def _flaw(
    collective: Collective, limits: Mapping[tuple[int, Buffer], int], block: Block, step: Step
) -> str:
    """Why a step has no meaning, or nothing."""
    if not 0 <= block.rank < collective.nranks or block.channel < 0 or block.lane < 0:
        return f"there is no such block among {collective.nranks} ranks"
    if bool(step.srcs) != bool(step.dsts):
        return "sources without destinations or the reverse"
    sizes = set()
    for chunk in (*step.srcs, *step.dsts):
        sizes.add(chunk.size)
        limit = limits.get((chunk.rank, chunk.buffer))
        if not chunk.buffer.given and 0 <= chunk.rank < collective.nranks:
            limit = chunk.index + chunk.size
        if limit is None or chunk.index < 0 or not 1 <= chunk.size <= limit - chunk.index:
            return f"{chunk} lies outside of the buffer of {limit or 0} chunks"
    if len(sizes) > 1:
        return "chunks of different sizes in one step"
    if len(step.dsts) > 1:
        cells = [collective.cell(unit) for dst in step.dsts for unit in dst.units()]
        if len(set(cells)) < len(cells):
            return "the same destination twice"
    return ""


def walk(plan: Plan) -> Iterator[tuple[Block, Step]]:
    """Yield the steps in a legal order: as near to ``order`` as the signals allow.

    A pair of blocks is one FIFO count with one producer and one consumer, so blocks form a Kahn
    network: if one legal order ends, all do; else it raises Deadlock.
    """
    count: defaultdict[tuple[Block, Block], int] = defaultdict(int)
    stuck: dict[Block, deque[Step]] = {}
    done: defaultdict[Block, int] = defaultdict(int)

    def ready(block: Block, step: Step) -> bool:
        if len(step.waits) == 1:
            wait = step.waits[0]
            return wait.channel == HELLO or count[wait, block] > 0
        wanted: defaultdict[Block, int] = defaultdict(int)
        for wait in step.waits:
            if wait.channel != HELLO:
                wanted[wait] += 1
        return all(count[wait, block] >= n for wait, n in wanted.items())

    def take(block: Block, step: Step) -> None:
        for wait in step.waits:
            if wait.channel != HELLO:
                count[wait, block] -= 1
        for signal in step.signals:
            count[block, signal] += 1
        done[block] += 1

    for block, step in plan.order:
        if block in stuck:
            stuck[block].append(step)
            continue
        if not ready(block, step):
            stuck[block] = deque([step])
            continue
        take(block, step)
        yield block, step
        woken = [signal for signal in step.signals if signal in stuck]
        while woken:
            late = woken.pop()
            queue = stuck.get(late)
            while queue and ready(late, queue[0]):
                next_step = queue.popleft()
                take(late, next_step)
                yield late, next_step
                woken.extend(s for s in next_step.signals if s in stuck and s != late)
            if queue is not None and not queue:
                del stuck[late]
    if stuck:
        raise Deadlock(_stuck_message(plan, stuck, done, count))


def _stuck_message(
    plan: Plan,
    stuck: Mapping[Block, deque[Step]],
    done: Mapping[Block, int],
    count: Mapping[tuple[Block, Block], int],
) -> str:
    lines = [f"{plan.collective}: {len(stuck)} blocks wait for ever"]
    for block, queue in sorted(stuck.items()):
        waits = queue[0].waits
        for wait in sorted({w for w in waits if w.channel != HELLO}):
            seen, wanted = count.get((wait, block), 0), waits.count(wait)
            if seen < wanted:
                at = done.get(block, 0)
                lines.append(
                    f"  {block}, step {at}: seen {seen} of {wanted} signals wanted of {wait}"
                )
    return "\n".join(lines)


def format_plan(plan: Plan) -> str:
    """The plan as text that a person can review: one line a step, in ``order``."""
    lines = [str(plan.collective)]
    lines += [f"{_short(block):>8} | {step}" for block, step in plan.order]
    return "\n".join(lines) + "\n"


def check_types(plan: Plan) -> None:
    """Refuse what is no plan by its types, as a first algorithm may hold them.

    Raises:
        ArgumentTypeError: naming the step, what stands there and what is wanted.
        IllegalStep: a chunk is of a rank that does not exist.

    """
    if not isinstance(plan.collective, Collective):
        raise ArgumentTypeError(
            f"plan: its collective is {plan.collective!r}, wanted a Collective, as "
            f"Collective('all_reduce', nranks)"
        )
    if not isinstance(plan.order, tuple):
        raise ArgumentTypeError(f"plan: its order is a {type(plan.order).__name__}, wanted a tuple")
    steps: defaultdict[Block, int] = defaultdict(int)  # as all errors number them: in their block
    for position, (block, step) in enumerate(plan.order):
        if not (isinstance(block, Block) and isinstance(step, Step)):
            raise ArgumentTypeError(
                f"plan, entry {position} of its order: ({block!r}, {step!r}), wanted a pair "
                "(Block, Step)"
            )
        where = f"{plan.collective}: {block}, step {steps[block]}"
        steps[block] += 1
        for name, kind in _FIELDS:
            values = getattr(step, name)
            if not isinstance(values, tuple) or not all(isinstance(v, kind) for v in values):
                raise ArgumentTypeError(
                    f"{where}: {name}={values!r}, wanted a tuple of {kind.__name__}, as "
                    f"({kind.__name__}(...),)"
                )
        for chunk in (*step.srcs, *step.dsts):
            if not isinstance(chunk.buffer, Buffer):
                raise ArgumentTypeError(
                    f"{where}: the buffer of a chunk is {chunk.buffer!r}, wanted Buffer.INPUT, "
                    "OUTPUT or SCRATCH"
                )
            if chunk.rank not in range(plan.nranks):
                raise IllegalStep(
                    f"{where}: seen a chunk of rank {chunk.rank!r}, wanted one of the ranks 0 to "
                    f"{plan.nranks - 1}"
                )


_FIELDS = (("srcs", Chunk), ("dsts", Chunk), ("waits", Block), ("signals", Block))
