"""What a chunk holds while a reducing plan runs: a raw contribution, a partial or the final value.

The label decides the type of a SCRATCH slot (partial: the accumulator's, else the dtype's) and
which half of the operator a step applies: ``load`` to raw sources, ``finish`` to a final result.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from ringcoll.errors import IllegalStep
from ringcoll.plan import Chunk, Plan


class Label(Enum):
    """Raw: unscaled INPUT of one rank. Final: every contribution, finished. Partial: between."""

    RAW = "raw"
    PARTIAL = "partial"
    FINAL = "final"


class StepLabels(NamedTuple):
    """What a step handles: the labels of its sources and of what it writes.

    ``owners`` are the ranks whose contributions the raw sources are (premul_sum scales each by its
    own rank's factor), -1 for the others. ``reduces``: the operator is applied, else the step
    copies. ``extent`` is the INPUT or OUTPUT chunk of as many elements as the step moves, which
    SCRATCH alone does not fix; None without data.
    """

    srcs: tuple[Label, ...]
    dst: Label
    owners: tuple[int, ...]
    reduces: bool
    extent: Chunk | None


class _Content(NamedTuple):
    """What a cell holds: whose contributions, whether unscaled, and how long it is."""

    ranks: int
    raw: bool
    extent: Chunk


def labels(plan: Plan) -> tuple[StepLabels, ...]:
    """For every step of ``plan.order`` what it handles.

    A collective that does not reduce moves final values only. All chunks have size 1 (see
    :func:`ringcoll.lower.slices.split`).
    """
    collective = plan.collective
    everyone = (1 << plan.nranks) - 1
    held = {
        collective.cell(chunk): _Content(1 << rank, collective.reduces, chunk)
        for rank in range(plan.nranks)
        for chunk in plan.inputs(rank)
    }
    found = []
    for block, step in plan.order:
        if not step.dsts:
            found.append(StepLabels((), Label.FINAL, (), False, None))
            continue
        contents = [held.get(collective.cell(src)) for src in step.srcs]
        if None in contents:
            src = step.srcs[contents.index(None)]
            raise IllegalStep(
                f"{collective}: {block} reads {src}, which nothing has written: {step}"
            )
        sources = [content for content in contents if content is not None]
        chunks = (*step.dsts, *step.srcs)
        real = [chunk for chunk in chunks if chunk.buffer.given]
        extent = real[0] if real else sources[0].extent
        label = _label(sources, everyone, extent, reduces=collective.reduces)
        ranks = 0
        for content in sources:
            ranks |= content.ranks
        for dst in step.dsts:
            held[collective.cell(dst)] = _Content(ranks, label.dst is Label.RAW, extent)
        found.append(label)
    return tuple(found)


def _label(sources: list[_Content], everyone: int, extent: Chunk, *, reduces: bool) -> StepLabels:
    if not reduces:
        copies = (Label.FINAL,) * len(sources)
        return StepLabels(copies, Label.FINAL, (-1,) * len(sources), False, extent)
    kinds, union = [], 0
    for content in sources:
        union |= content.ranks
        whole = Label.FINAL if content.ranks == everyone else Label.PARTIAL
        kinds.append(Label.RAW if content.raw else whole)
    if union == everyone:
        result = Label.FINAL
    else:
        result = Label.RAW if kinds == [Label.RAW] else Label.PARTIAL
    owners = tuple(c.ranks.bit_length() - 1 if c.raw else -1 for c in sources)
    applies = len(kinds) > 1 or kinds[0] is not result
    return StepLabels(tuple(kinds), result, owners, applies, extent)
