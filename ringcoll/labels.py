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
    """Raw: unscaled INPUT of one rank. Final: what OUTPUT gets, finished. Partial: between."""

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
    """What a cell holds: whose contributions, what they are, and how long it is."""

    ranks: int
    label: Label
    extent: Chunk


def labels(plan: Plan) -> tuple[StepLabels, ...]:
    """For every step of ``plan.order`` what it handles.

    A collective that does not reduce moves final values only. What a rank of a prefix gets is final
    where a step writes it to OUTPUT, that of any other collective where every rank contributed. All
    chunks have size 1 (see :func:`ringcoll.lower.slices.split`).
    """
    collective = plan.collective
    everyone = (1 << plan.nranks) - 1
    given = Label.RAW if collective.reduces else Label.FINAL
    held = {
        collective.cell(chunk): _Content(1 << rank, given, chunk)
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
        ranks = 0
        for content in sources:
            ranks |= content.ranks
        if collective.kind.prefix:
            final = any(collective.cell(dst)[1] == "O" for dst in step.dsts)
        else:
            final = ranks == everyone
        label = _label(sources, extent, final=final, reduces=collective.reduces)
        for dst in step.dsts:
            held[collective.cell(dst)] = _Content(ranks, label.dst, extent)
        found.append(label)
    return tuple(found)


def _label(sources: list[_Content], extent: Chunk, *, final: bool, reduces: bool) -> StepLabels:
    kinds = tuple(content.label for content in sources)
    if not reduces:
        return StepLabels(kinds, Label.FINAL, (-1,) * len(sources), False, extent)
    copied = kinds[0] if len(kinds) == 1 else Label.PARTIAL
    result = Label.FINAL if final else copied
    owners = tuple(c.ranks.bit_length() - 1 if c.label is Label.RAW else -1 for c in sources)
    return StepLabels(kinds, result, owners, len(kinds) > 1 or kinds[0] is not result, extent)
