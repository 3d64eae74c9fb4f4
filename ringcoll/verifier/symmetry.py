"""Whether a plan has the symmetry that it declares: shifting all ranks maps it to itself.

A clock may fold one rank for all of a symmetric plan, so the declaration has to be true.
"""

from __future__ import annotations

import math

from ringcoll.errors import IllegalStep
from ringcoll.plan import Block, Buffer, Chunk, Plan, Step


def check_symmetry(plan: Plan) -> None:
    """Refuse a declared symmetry that an algorithm's plan does not have.

    Ranks shift along each axis of ``plan.symmetry.shape``, with them segments of buffers that hold
    one a rank, chunks of a segment where the symmetry says so, and blocks by their rank. SCRATCH
    stays put. The order of a step's sources is no part of it. The plan is not lowered: lowering
    cuts and stages each rank's own way.
    """
    symmetry, chunks = plan.symmetry, plan.collective.chunks
    if symmetry is None:
        return
    if (
        math.prod(symmetry.shape) != plan.nranks
        or math.prod(symmetry.chunks or (chunks,)) != chunks
    ):
        raise IllegalStep(
            f"{plan.collective}: declares {symmetry}, wanted axes whose product is "
            f"{plan.nranks} ranks and {chunks} chunks"
        )
    for axis in range(len(symmetry.shape)):
        shift = _Shift(plan, axis)
        for block, steps in plan.steps.items():
            image = shift.block(block)
            there = plan.steps.get(image, ())
            for at, step in enumerate(steps):
                if at == len(there) or shift.shape(step) != _shape(there[at]):
                    seen = there[at] if at < len(there) else f"no step {at}"
                    raise IllegalStep(
                        f"{plan.collective}: {block}, step {at}: {step}; seen {seen} in {image}, "
                        f"wanted its shift along axis {axis} of {symmetry.shape}"
                    )
            if len(there) > len(steps):
                raise IllegalStep(
                    f"{plan.collective}: {image}, step {len(steps)}: seen {there[len(steps)]}, "
                    f"wanted as many steps as {block} has: {len(steps)}"
                )


Shape = tuple[object, ...]


def _shape(step: Step) -> Shape:
    """A step without the order of its sources and destinations."""
    srcs, dsts = ({chunk.units() for chunk in chunks} for chunks in (step.srcs, step.dsts))
    return srcs, dsts, step.waits, step.signals


class _Shift:
    """The shift of a plan's ranks by one along an axis."""

    def __init__(self, plan: Plan, axis: int) -> None:
        self.plan, self.axis = plan, axis
        self.ranks = plan.symmetry.shape if plan.symmetry else ()
        self.chunks = plan.symmetry.chunks if plan.symmetry else ()

    def _along(self, index: int, shape: tuple[int, ...]) -> int:
        """A point of a row-major torus, moved by one along the axis."""
        stride = math.prod(shape[self.axis + 1 :])
        at = index // stride % shape[self.axis]
        return index + ((at + 1) % shape[self.axis] - at) * stride

    def block(self, block: Block) -> Block:
        return Block(self._along(block.rank, self.ranks), block.channel, block.lane)

    def units(self, chunk: Chunk) -> tuple[Chunk, ...]:
        """The images of the chunks of size 1 that a chunk is made of."""
        rank = self._along(chunk.rank, self.ranks)
        return tuple(Chunk(rank, u.buffer, self.index(u)) for u in chunk.units())

    def index(self, chunk: Chunk) -> int:
        if chunk.buffer is Buffer.SCRATCH:
            return chunk.index
        collective = self.plan.collective
        segment, within = divmod(chunk.index, collective.chunks)
        if collective.segments(chunk.buffer.name) > 1:
            segment = self._along(segment, self.ranks)
        if self.chunks:
            within = self._along(within, self.chunks)
        return segment * collective.chunks + within

    def shape(self, step: Step) -> Shape:
        """The image of a step, as :func:`_shape` writes it."""
        srcs, dsts = ({self.units(c) for c in chunks} for chunks in (step.srcs, step.dsts))
        waits, signals = (tuple(map(self.block, blocks)) for blocks in (step.waits, step.signals))
        return srcs, dsts, waits, signals
