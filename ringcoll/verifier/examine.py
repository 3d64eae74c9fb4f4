"""Everything that is proven about one built-in algorithm for one number of ranks.

Its plan is lowered for each way of running it, mapped and staged, in place and out of place,
sliced and whole. Each lowered plan is proven, then broken in small ways: the verifier must reject
every mutant, or independent code must show that the mutant is equivalent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from ringcoll.algorithms import Algorithm, build, name_of, options
from ringcoll.errors import ArgumentError, ArgumentTypeError, LaunchRefused, PlanError
from ringcoll.launch import Launch
from ringcoll.lower import lower
from ringcoll.plan import Buffer, Plan
from ringcoll.verifier.induction import verify_slices
from ringcoll.verifier.launches import describe, every_launch, prove_calls
from ringcoll.verifier.mutants import MAY_PASS, launch_mutants, mutants, sample
from ringcoll.verifier.prover import ALL_RULES, Prover, Rules
from ringcoll.verifier.reachability import History, history
from ringcoll.verifier.schedules import objection
from ringcoll.verifier.symmetry import check_symmetry

Mode = Literal["sample", "all", "none"]

SMALL = 3
"""Up to so many ranks everything is tried: all S, all mutants, calls in a row."""

WINDOW = 2
PAIR_WINDOW = 4
"""Of two ranks as well, as on GPUs (``PAIR_SLOTS`` of ``tuner/measured.py``)."""


@dataclass(frozen=True, slots=True)
class Case:
    """One algorithm for one number of ranks; what crosses ``nodes`` goes by message."""

    collective: str
    algorithm: Algorithm
    nranks: int
    slices: tuple[int, ...] = (1, WINDOW + 1)
    mutants: Mode = "sample"
    seed: int = 0
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Counts and failures as JSON objects; mutants by kind: made, rejected, equivalent."""

    plans: int = 0
    steps: int = 0
    kinds: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    failures: tuple[dict[str, Any], ...] = ()

    def join(self, other: Outcome) -> Outcome:
        """Both outcomes as one."""
        kinds = dict(self.kinds)
        for kind, counts in other.kinds.items():
            a, b, c = kinds.get(kind, (0, 0, 0))
            kinds[kind] = a + counts[0], b + counts[1], c + counts[2]
        return Outcome(
            self.plans + other.plans,
            self.steps + other.steps,
            kinds,
            self.failures + other.failures,
        )

    def mutants(self) -> tuple[int, int, int]:
        """Mutants made, rejected and equivalent, of all kinds."""
        made, rejected, equivalent = (sum(c[i] for c in self.kinds.values()) for i in range(3))
        return made, rejected, equivalent

    def as_json(self) -> dict[str, Any]:
        """The object that ``ringcoll verify --json`` writes."""
        names = ("made", "rejected", "equivalent")
        return {
            "plans": self.plans,
            "steps": self.steps,
            "mutants": {
                **dict(zip(names, self.mutants(), strict=True)),
                "kinds": {
                    kind: dict(zip(names, counts, strict=True))
                    for kind, counts in sorted(self.kinds.items())
                },
            },
            "failures": list(self.failures),
        }


def examine(case: Case) -> Outcome:
    """Prove one algorithm for one number of ranks in every launch, and its mutants."""
    total = Outcome()
    for given in _variants(case):
        try:
            plan = build(case.collective, case.algorithm, case.nranks, **given)
        except ArgumentError:
            # Not an algorithm for this number of ranks: a send has two.
            return Outcome()
        except (PlanError, ArgumentTypeError) as error:
            total = total.join(_failure(case, given.get("root", 0), "not lowered", error))
            continue
        try:
            lowered = _lowered(case, plan)
        except PlanError as error:
            total = total.join(_failure(case, plan.collective.root, "not lowered", error))
            continue
        total = total.join(_prove_plan(case, plan))
        broken = _to_break(case, list(lowered))
        for launch in lowered:
            doubted = launch in broken
            total = total.join(_prove_launch(case, plan, launch, lowered[launch], doubted=doubted))
    return total


def _variants(case: Case) -> list[dict[str, Any]]:
    """The first and the last rank as root; of a few ranks also two rings, there and back."""
    takes = options(case.collective, case.algorithm)
    given: dict[str, Any] = {}
    if "nodes" in takes and case.nodes:
        given["nodes"] = [case.nodes.count(node) for node in sorted(set(case.nodes))]
    if "root" in takes:
        return [{"root": root, **given} for root in sorted({0, case.nranks - 1})]
    if "rings" in takes and case.nranks == SMALL + 1:
        ring = range(case.nranks)
        return [{}, {"rings": (ring, ring[::-1])}]
    return [given]


def _lowered(case: Case, plan: Plan) -> dict[Launch, Plan]:
    """The plan of every launch that can carry it."""
    found = {}
    for launch in every_launch(case.slices, WINDOW, case.nodes):
        with suppress(LaunchRefused):
            found[launch] = lower(plan, launch)
    return found


def _failure(case: Case, root: int, how: str, error: object, kind: str = "") -> Outcome:
    what = {
        "collective": case.collective,
        "algorithm": name_of(case.algorithm),
        "ranks": case.nranks,
        "root": root,
        "launch": how,
        "mutant": kind or None,
        "error": f"{type(error).__name__}: {error}" if isinstance(error, Exception) else error,
    }
    return Outcome(failures=(what,))


def _prove_plan(case: Case, plan: Plan) -> Outcome:
    """What does not depend on one launch: symmetry; of few ranks all S, and calls in a row."""
    try:
        check_symmetry(plan)
    except PlanError as error:
        return _failure(case, plan.collective.root, "not lowered", error)
    total = Outcome()
    if case.nranks > SMALL:
        return total
    for window in (1, WINDOW, PAIR_WINDOW) if case.nranks == 2 else (1, WINDOW):
        for launch in every_launch((1,), window, case.nodes):
            try:
                proofs = verify_slices(plan, launch)
            except LaunchRefused:
                continue
            except PlanError as error:
                how = describe(launch).replace("S=1", "every S")
                total = total.join(_failure(case, plan.collective.root, how, error))
                continue
            total = total.join(Outcome(len(proofs), sum(proof.steps for proof in proofs)))
    try:
        prove_calls(plan, case.nodes)
    except PlanError as error:
        total = total.join(_failure(case, plan.collective.root, "calls in a row", error))
    return total


def _prove_launch(
    case: Case, plan: Plan, launch: Launch, lowered: Plan, *, doubted: bool
) -> Outcome:
    how = describe(launch)
    prover = Prover(lowered.collective, nodes=case.nodes or None)
    try:
        proof = prover.prove(lowered)
    except PlanError as error:
        return _failure(case, plan.collective.root, how, error)
    total = Outcome(1, proof.steps)
    if not doubted:
        return total
    before = history(lowered)
    # Roots differ by names only, so one of them is broken in every way.
    one_root = not plan.collective.kind.has_root or plan.collective.root == case.nranks - 1
    everything = case.mutants == "all" or (case.nranks <= SMALL and one_root)
    broken: Iterable[tuple[str, Plan]] = (
        mutants(lowered, seed=case.seed) if everything else sample(lowered, seed=case.seed)
    )
    for kind, mutant in (*broken, *launch_mutants(plan, launch)):
        total = total.join(_judge(case, prover, plan, before, how, kind, mutant))
    return total


def _to_break(case: Case, carried: Sequence[Launch]) -> Sequence[Launch]:
    """The launches of which mutants are made: all, or in a sample two or one."""
    if case.mutants != "sample":
        return carried if case.mutants == "all" else ()
    few, many = (
        Launch(slices=pick(case.slices), window=WINDOW, nodes=case.nodes) for pick in (min, max)
    )
    staged: frozenset[Buffer] = frozenset()
    wanted = [
        replace(many, mapped=staged, in_place=True),
        few,
        replace(many, in_place=True),
        replace(few, mapped=staged),
    ]
    # The long one for 5 ranks, neither few nor a power of two.
    first = 0 if case.nranks <= SMALL else (case.nranks - 5) % len(wanted)
    by_turns = [launch for launch in (*wanted[first:], *wanted[:first]) if launch in carried]
    return by_turns[:2] if case.nranks <= SMALL else by_turns[:1]


def _judge(
    case: Case, prover: Prover, plan: Plan, before: History, how: str, kind: str, mutant: Plan
) -> Outcome:
    verdict = judge(kind, mutant, before, prover, seed=case.seed)
    counts = Outcome(kinds={kind: (1, int(verdict.rejected), int(verdict.equivalent))})
    if verdict.failure:
        error = f"{verdict.failure}: {_changes(before.plan, mutant)}"
        counts = counts.join(_failure(case, plan.collective.root, how, error, kind))
    return counts


class Verdict(NamedTuple):
    """What became of a mutant: just one of the three."""

    rejected: bool = False
    equivalent: bool = False
    failure: str = ""


def judge(
    kind: str,
    mutant: Plan,
    before: History,
    prover: Prover,
    *,
    rules: Rules = ALL_RULES,
    seed: int = 0,
) -> Verdict:
    """Whether the verifier rejects a mutant, and if not, whether independent code lets it pass.

    ``before`` is the history of the plan that was broken, ``seed`` that of the random schedules.
    """
    if mutant.collective != before.plan.collective:
        prover = Prover(mutant.collective, nodes=prover.numbers.nodes)
    try:
        prover.prove(mutant, rules)
    except PlanError:
        return Verdict(rejected=True)
    if kind not in MAY_PASS:
        return Verdict(failure="accepted, and every mutant of this kind must be rejected")
    reason = objection(mutant, before=before, seed=seed)
    return Verdict(failure=f"accepted, but {reason}") if reason else Verdict(equivalent=True)


def _changes(before: Plan, after: Plan) -> str:
    """The first three steps that differ."""
    different = [
        f"{old[0]}: {old[1]} became {new[0]}: {new[1]}"
        for old, new in zip(before.order, after.order, strict=False)
        if old != new
    ]
    return "; ".join(different[:3])
