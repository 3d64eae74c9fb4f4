"""What a chunk holds while a reducing plan runs: a raw contribution, a partial or the final value.

The label decides the type of a SCRATCH slot (partial: the accumulator's, else the dtype's) and
which half of the operator a step applies: ``load`` to raw sources, ``finish`` to a final result.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from ringcoll.errors import IllegalStep
from ringcoll.plan import Plan

__all__ = ["Label", "StepLabels", "labels"]


class Label(Enum):
    """Raw: unscaled INPUT of one rank. Final: every contribution, finished. Partial: between."""

    RAW = "raw"
    PARTIAL = "partial"
    FINAL = "final"


class StepLabels(NamedTuple):
    """The labels of a step: of its sources and of what it writes.

    ``owners`` are the ranks whose contributions the raw sources are (premul_sum scales each by
    its own rank's factor), -1 for the others. ``reduces`` tells whether the operator is applied;
    if not, the step copies.
    """

    srcs: tuple[Label, ...]
    dst: Label
    owners: tuple[int, ...]
    reduces: bool


def labels(plan: Plan) -> tuple[StepLabels, ...]:
    """For every step of ``plan.order`` the labels of its sources and of what it writes.

    A collective that does not reduce moves final values only. All chunks have size 1 (see
    :func:`ringcoll.lower.slices.split`).

    Raises:
        IllegalStep: a step reads a chunk that nothing has written.

    """
    collective = plan.collective
    if not collective.reduces:
        return tuple(
            StepLabels((Label.FINAL,) * len(step.srcs), Label.FINAL, (-1,) * len(step.srcs), False)
            for _, step in plan.order
        )
    everyone = (1 << plan.nranks) - 1
    held: dict[tuple[int, str, int], int] = {}
    for rank in range(plan.nranks):
        for chunk in plan.inputs(rank):
            held[collective.cell(chunk)] = 1 << rank
    raw: set[tuple[int, str, int]] = set(held)
    found = []
    for block, step in plan.order:
        kinds, owners, union = [], [], 0
        for src in step.srcs:
            cell = collective.cell(src)
            mask = held.get(cell)
            if mask is None:
                raise IllegalStep(f"{collective}: {block} reads {src}, which nothing has written: {step}")
            union |= mask
            owners.append(mask.bit_length() - 1 if cell in raw else -1)
            if cell in raw:
                kinds.append(Label.RAW)
            else:
                kinds.append(Label.FINAL if mask == everyone else Label.PARTIAL)
        if union == everyone:
            result = Label.FINAL
        else:
            result = Label.RAW if kinds == [Label.RAW] else Label.PARTIAL
        for dst in step.dsts:
            cell = collective.cell(dst)
            held[cell] = union
            (raw.add if result is Label.RAW else raw.discard)(cell)
        reduces = len(kinds) > 1 or (bool(kinds) and kinds[0] is not result)
        found.append(StepLabels(tuple(kinds), result, tuple(owners), reduces))
    return tuple(found)
