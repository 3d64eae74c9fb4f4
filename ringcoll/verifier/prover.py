"""The proof of a plan: a fold over :func:`ringcoll.plan.walk`.

What is folded is, for every chunk of memory, the expression of contributions that it holds
(``expressions``), and for every block a vector clock (``clocks``). One walk is enough: what
happens before what does not depend on the schedule, and without races what memory holds does not
either.

A verifier is worth what it rejects: ``mutants`` breaks proven plans in every small way and
``schedules``, which shares nothing with this file, judges what gets through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ringcoll.collectives import Collective
from ringcoll.dtypes import Accumulate
from ringcoll.errors import ArgumentError, EntryViolation, ExitViolation, Race, WrongResult
from ringcoll.labels import Label
from ringcoll.launch import PROTOCOLS, Launch
from ringcoll.lower import lower
from ringcoll.plan import HELLO, Chunk, Plan, Step, walk
from ringcoll.verifier.cells import FREE, INPUT_ONLY, OUTPUT, Numbers, Row
from ringcoll.verifier.clocks import Clocks
from ringcoll.verifier.expressions import NOTHING, Expressions, Flaw, wanted_text


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found out on the way.

    Args:
        steps: how many steps were folded.
        blocks: how many blocks ran them.
        rounds: the longest chain of steps that move data, each after the one before.
        roundings: how often a result was rounded to the dtype at most; 0 if nothing is reduced.
        total: no rank returns before all have entered.
        rank_order: every result is the left fold of the contributions in rank order.

    """

    steps: int
    blocks: int
    rounds: int
    roundings: int
    total: bool
    rank_order: bool


@dataclass(frozen=True, slots=True)
class Rules:
    """Which rules are enforced: all of them. Tests blind one, to see that mutants get through."""

    waits: bool = True
    overlap: bool = True
    exit: bool = True


ALL_RULES = Rules()


def verify(
    plan: Plan,
    *,
    protocol: str = "Simple",
    nodes: Sequence[int] | None = None,
    deterministic: bool = False,
    accumulate: Accumulate = "wide",
) -> Proof:
    """Prove a plan that carries its waits and signals, such as a lowered one.

    :func:`ringcoll.prove` proves an algorithm's plan, which has none yet, in every launch.

    Args:
        plan: what is to run, in place if its collective says so.
        protocol: "Simple", or "LL" or "LL128", where signals ride in the lines that they announce.
        nodes: the node of every rank; across nodes only copies of a local source are legal.
        deterministic: whether results must be left folds in rank order.
        accumulate: "wide" keeps partials in the accumulator's type, "dtype" rounds each.

    Raises:
        IllegalStep: a step that means nothing, or that ``nodes`` forbid.
        Deadlock: a wait that is never answered.
        UnawaitedSignal: a signal that is never taken.
        Race: two accesses to one chunk in no order.
        EntryViolation: memory of a rank touched before it entered.
        ExitViolation: memory of a rank touched after it returned.
        WrongResult: a step or the end leaves what must not be there.

    Example:
        >>> from ringcoll.algorithms import build
        >>> verify(build("barrier", "dissemination", 4)).rounds
        0

    """
    prover = Prover(
        plan.collective,
        protocol=protocol,
        nodes=nodes,
        deterministic=deterministic,
        accumulate=accumulate,
    )
    try:
        return prover.prove(plan)
    except (Race, EntryViolation, ExitViolation) as error:
        if plan.synchronised:
            raise
        raise type(error)(
            f"{error}; this plan has no waits and signals yet: ringcoll.prove(plan) derives and "
            f"proves them"
        ) from None


@lru_cache(maxsize=256)
def prove_launch(
    plan: Plan, launch: Launch, *, deterministic: bool = False, accumulate: Accumulate = "wide"
) -> Proof:
    """Lower an algorithm's plan and prove what would run.

    Errors number the steps of a block without the waits for entry that lowering puts before them.
    """
    lowered = lower(plan, launch)
    prover = Prover(
        lowered.collective,
        protocol=launch.protocol,
        nodes=launch.nodes or None,
        deterministic=deterministic and plan.collective.reduces,
        accumulate=accumulate,
    )
    for block, steps in lowered.steps.items():
        if steps[0] not in plan.steps.get(block, ())[:1] and _only_enters(steps[0]):
            prover.numbers.leading[block] = 1
    return prover.prove(lowered)


def _only_enters(step: Step) -> bool:
    """Whether a step does nothing but wait for ranks to enter."""
    return not (step.srcs or step.dsts or step.signals) and all(
        wait.channel == HELLO for wait in step.waits
    )


def is_total(plan: Plan, *, protocol: str = "Simple") -> bool:
    """Whether every rank ends only after all ranks have entered."""
    numbers = Numbers(plan.collective)
    numbers.admit(plan)
    clocks = Clocks(numbers, in_band=PROTOCOLS[protocol].in_band)
    return _order(plan, numbers, clocks).unheard() is None


def _order(plan: Plan, numbers: Numbers, clocks: Clocks) -> Clocks:
    """Fold the clocks alone."""
    for block, step in walk(plan):
        clocks.step(numbers.block(block), numbers.row(step))
    clocks.check_signals()
    return clocks


class Prover:
    """Proves plans of one collective: a plan and its mutants, numbered once.

    Options as for :func:`verify`. Without ``data`` order alone is proven, as of calls in a row.
    """

    def __init__(
        self,
        collective: Collective,
        *,
        protocol: str = "Simple",
        nodes: Sequence[int] | None = None,
        deterministic: bool = False,
        accumulate: Accumulate = "wide",
        data: bool = True,
    ) -> None:
        if protocol not in PROTOCOLS:
            raise ArgumentError(f"protocol={protocol!r}: one of {', '.join(PROTOCOLS)}")
        if accumulate not in ("wide", "dtype"):
            raise ArgumentError(f"accumulate={accumulate!r}: 'wide' or 'dtype'")
        if nodes is not None and len(nodes) != collective.nranks:
            raise ArgumentError(f"nodes: {len(nodes)} given for the {collective.nranks} ranks")
        self.in_band = PROTOCOLS[protocol].in_band
        self.deterministic, self.data = deterministic, data
        self.numbers = Numbers(collective, nodes)
        # Mutants share most of their trees too. What overlap allows must not be found again.
        self.trees = {
            overlap: Expressions(
                collective.nranks,
                rounds=accumulate == "dtype",
                overlap=overlap,
                prefix=collective.kind.prefix,
            )
            for overlap in (True, False)
        }

    def prove(self, plan: Plan, rules: Rules = ALL_RULES) -> Proof:
        """Prove one plan; raises as :func:`verify` does."""
        if not rules.waits:
            # Blind: as if every schedule were the order written down.
            order = tuple((b, s._replace(waits=(), signals=())) for b, s in plan.order)
            plan = plan.with_order(order)
        numbers = self.numbers
        numbers.admit(plan)
        clocks = Clocks(numbers, in_band=self.in_band)
        memory = _Memory(numbers, self.trees[rules.overlap])
        for block, step in walk(plan):
            b, row = numbers.block(block), numbers.row(step)
            if rules.waits:
                clocks.step(b, row)
            if self.data:
                try:
                    memory.step(row)
                except Flaw as flaw:
                    where = f"{plan.collective}: {clocks.where(b)}"
                    raise WrongResult(f"{where}: {flaw}: {step}") from None
        if rules.waits:
            clocks.check_signals()
            if rules.exit:
                clocks.check_exits()
            self._check_barrier(clocks)
        if self.data:
            memory.check_result(clocks, deterministic=self.deterministic)
        return Proof(
            steps=len(plan.order),
            blocks=len(plan.steps),
            rounds=max(clocks.depth, default=0),
            roundings=memory.roundings,
            total=clocks.unheard() is None,
            rank_order=memory.rank_order,
        )

    def _check_barrier(self, clocks: Clocks) -> None:
        unheard = clocks.unheard()
        if self.numbers.collective.name == "barrier" and self.data and unheard:
            rank, other = unheard
            raise WrongResult(
                f"{self.numbers.collective}: rank {rank}, last step of its blocks: seen no sign "
                f"that rank {other} has entered, wanted one before rank {rank} returns"
            )


class _Memory:
    """The expression in every cell."""

    def __init__(self, numbers: Numbers, expressions: Expressions) -> None:
        self.numbers, self.expressions = numbers, expressions
        self.collective = numbers.collective
        self.prefix = self.collective.kind.prefix
        self.alone = self.collective.reduces and self.collective.nranks == 1
        self.held = [NOTHING] * len(numbers.names)
        for cell, (rank, index) in numbers.before:
            self.held[cell] = expressions.leaf(rank, index)
        self.roundings = 0
        self.rank_order = True

    def step(self, row: Row) -> None:
        """Let a step reduce its sources into its destinations."""
        held, guard, numbers = self.held, self.numbers.guard, self.numbers
        for srcs, dsts in row.columns:
            if len(srcs) == 1:
                whole = held[srcs[0]]
                if self.alone:
                    # One contribution is all there are: a copy of it applies the operator.
                    whole = self.expressions.stored(whole) if whole != NOTHING else NOTHING
            else:
                if not self.collective.reduces:
                    raise Flaw(
                        f"seen {len(srcs)} sources, wanted one: {self.collective.name} "
                        f"does not combine"
                    )
                values = [held[src] for src in srcs]
                whole = (
                    NOTHING if NOTHING in values else self.expressions.reduce(values[0], values[1:])
                )
            if whole == NOTHING:
                empty = next(src for src in srcs if held[src] == NOTHING)
                raise Flaw(f"seen nothing in {numbers.cell_text(empty)}, wanted a contribution")
            if self.prefix and any(numbers.guard[dst] == OUTPUT for dst in dsts):
                whole = self.expressions.finished(whole)
            for dst in dsts:
                if guard[dst] != FREE:
                    self._guard(dst, whole)
                held[dst] = whole

    def _guard(self, dst: int, whole: int) -> None:
        if self.numbers.guard[dst] == INPUT_ONLY:
            raise Flaw(
                f"seen a write to {self.numbers.cell_text(dst)}, "
                f"wanted INPUT to stay as the caller gave it"
            )
        if self.expressions.label[whole] is Label.PARTIAL:
            raise Flaw(
                f"seen a partial, {self.expressions.show(whole)}, written to OUTPUT "
                f"{self.numbers.cell_text(dst)}, wanted partials in SCRATCH only"
            )

    def check_result(self, clocks: Clocks, *, deterministic: bool) -> None:
        """OUTPUT holds what the collective promises, and equal chunks are equal trees."""
        expressions, reduces, held = self.expressions, self.collective.reduces, self.held
        trees: dict[tuple[int, int], int] = {}
        for cell, chunk, leaves in self.numbers.after:
            whole, (rank, index) = held[cell], leaves[0]
            if not reduces:
                if whole != expressions.leaf(rank, index):
                    raise self._wrong(clocks, cell, chunk, wanted_text(self.collective, leaves))
                continue
            count = len(leaves)  # a reduction is of all ranks, or of the first ones
            if not expressions.is_final(whole, index, count):
                raise self._wrong(clocks, cell, chunk, wanted_text(self.collective, leaves))
            tree = trees.setdefault((index, count), whole)
            if tree != whole:
                other = f"{expressions.show(tree)} as on another rank: bits would differ"
                raise self._wrong(clocks, cell, chunk, other)
            self.roundings = max(self.roundings, expressions.roundings[whole])
            if whole != expressions.in_rank_order(index, count):
                self.rank_order = False
                if deterministic:
                    other = "the left fold in rank order: this algorithm is not deterministic"
                    raise self._wrong(clocks, cell, chunk, other)

    def _wrong(self, clocks: Clocks, cell: int, chunk: Chunk, wanted: str) -> WrongResult:
        where = clocks.last_writer(cell) or f"rank {chunk.rank}, no step writes this chunk"
        return WrongResult(
            f"{self.collective}: {where}: at the end, {chunk}: seen "
            f"{self.expressions.show(self.held[cell])}, wanted {wanted}"
        )
