"""A pipelined plan for every number of slices, proven for the first few.

Let W be the window. :func:`verify_slices` proves the lowered plan for S = 1 … 2W + 2 slices and
checks that from S = W on all of them are the same period, repeated: the rows that an executor runs.
Then the plan is right for every larger S, by induction over S.

- *Edges* run from a step to a later one of the same slice or, as credits, from slice s to slice
  s + W. All lead forward in the slice-major order, so that order is legal: nothing deadlocks, and
  the period takes as many signals as it posts.
- *Results.* INPUT and OUTPUT chunks belong to one slice; a SCRATCH slot belongs to slices W apart.
  If no two accesses race, slice s computes from its own slice what slice 0 did from its own.
- *Races* are between steps of one slice, or of slices s and s + W that share a slot; between
  slices further apart they follow by a chain of these. Whether two steps within W + 1 consecutive
  slices are ordered is decided by the steps of these slices alone, and each window of W + 1
  consecutive slices is a shifted copy of one that the plan of 2W + 2 slices has: its first, one of
  its middle or its last. So what is ordered there is ordered in every plan.
- *Entry and exit.* Entry waits stand before the first slice. The last access of a block to
  another rank's memory is in its last slice, before the exit waits, in every plan alike.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ringcoll.dtypes import Accumulate
from ringcoll.encode import encode, expand
from ringcoll.errors import WrongResult
from ringcoll.launch import Launch
from ringcoll.lower import lower
from ringcoll.plan import Block, Plan, Step
from ringcoll.verifier.prover import Proof, verify


def verify_slices(
    plan: Plan,
    launch: Launch,
    *,
    deterministic: bool = False,
    accumulate: Accumulate = "wide",
) -> tuple[Proof, ...]:
    """Prove a plan for every number of slices that a launch's window can carry.

    The launch's own number of slices is ignored. The proofs are for S = 1 … 2W + 2; for S = 1 alone
    if the plan brings its own signals. WrongResult: the plan of some S is not the period, repeated;
    else errors are those of :func:`ringcoll.verifier.prover.verify` for the first S that is wrong.
    """
    # Hand-written signals are kept as they are: such a plan has one slice.
    longest = 1 if plan.synchronised else 2 * launch.window + 2
    proofs = []
    for count in range(1, longest + 1):
        lowered = lower(plan, replace(launch, slices=count))
        proofs.append(
            verify(
                lowered,
                protocol=launch.protocol,
                nodes=launch.nodes or None,
                deterministic=deterministic,
                accumulate=accumulate,
            )
        )
        # One slice is fused: its lanes are one block, a program of its own.
        if count > 1:
            check_period(plan, replace(launch, slices=longest), lowered, count)
    return tuple(proofs)


def check_period(plan: Plan, launch: Launch, lowered: Plan, count: int) -> None:
    """Refuse a lowered plan that is not the encoded period, repeated ``count`` times."""
    if count < launch.slots:
        return
    program = encode(plan, launch)
    for rows in program.programs:
        repeated = list(expand(program, rows, count))
        written = lowered.steps.get(rows.block, ())
        for at in range(max(len(repeated), len(written))):
            seen = written[at] if at < len(written) else None
            wanted = repeated[at] if at < len(repeated) else None
            if _bag(seen) != _bag(wanted):
                raise WrongResult(
                    f"{lowered.collective}: {rows.block}, step {at}: seen {seen}, wanted {wanted}, "
                    f"the period of {launch.slices} slices repeated {count} times"
                )


def _bag(step: Step | None) -> tuple[object, ...] | None:
    """A step; the order in which it waits and signals does not matter."""
    if step is None:
        return None
    waits: Counter[Block] = Counter(step.waits)
    return step.srcs, step.dsts, waits, Counter(step.signals)
