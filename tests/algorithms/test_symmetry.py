"""A plan that declares a symmetry is mapped to itself by shifting all ranks along any axis."""

from __future__ import annotations

import math

import pytest

from ringcoll.algorithms import ALGORITHMS, build
from ringcoll.plan import Block, Buffer

ALL = [(c, a) for c, builders in ALGORITHMS.items() for a in builders]


def shifted(index, shape, axis):
    """The point ``index`` of the torus ``shape`` (row-major), shifted by one along ``axis``."""
    stride = math.prod(shape[axis + 1 :])
    at = index // stride % shape[axis]
    return index + ((at + 1) % shape[axis] - at) * stride


def shifted_chunk(plan, chunk, axis):
    """INPUT and OUTPUT: segments shift where there is one a rank, chunks of a segment where the
    symmetry says so. SCRATCH stays put."""
    symmetry, chunks = plan.symmetry, plan.collective.chunks
    cells = []
    for i in range(chunk.index, chunk.index + chunk.size):
        segment, c = divmod(i, chunks)
        if chunk.buffer is not Buffer.SCRATCH:
            if plan.collective.segments(chunk.buffer.name) > 1:
                segment = shifted(segment, symmetry.shape, axis)
            if symmetry.chunks:
                c = shifted(c, symmetry.chunks, axis)
            i = segment * chunks + c
        cells.append((shifted(chunk.rank, symmetry.shape, axis), chunk.buffer.value, i))
    return tuple(cells)


def program(plan, axis=None):
    """Each block's steps in order, as sets of cells: the order of sources is not shifted."""

    def rank(r):
        return r if axis is None else shifted(r, plan.symmetry.shape, axis)

    def cells(chunks):
        if axis is None:
            return sorted(
                tuple((u.rank, u.buffer.value, u.index) for u in k.units()) for k in chunks
            )
        return sorted(shifted_chunk(plan, chunk, axis) for chunk in chunks)

    return {
        (rank(block.rank), block.channel, block.lane): [
            (
                cells(step.srcs),
                cells(step.dsts),
                [(rank(b.rank), b.channel, b.lane) for b in step.waits],
                [(rank(b.rank), b.channel, b.lane) for b in step.signals],
            )
            for step in steps
        ]
        for block, steps in plan.steps.items()
    }


def check(plan):
    assert plan.symmetry is not None
    assert math.prod(plan.symmetry.shape) == plan.nranks
    assert math.prod(plan.symmetry.chunks or (plan.collective.chunks,)) == plan.collective.chunks
    for axis in range(len(plan.symmetry.shape)):
        assert program(plan, axis) == program(plan)


@pytest.mark.parametrize(("collective", "algorithm"), ALL)
def test_declared_symmetries_hold(collective, algorithm):
    for nranks in (1, 2, 3, 4, 8, 9, 12):
        if collective == "send" and nranks != 2:
            continue
        plan = build(collective, algorithm, nranks)
        if plan.symmetry is not None:
            check(plan)


def test_ring_of_any_stride_is_symmetric():
    check(build("all_reduce", "ring", 7, rings=[[0, 3, 6, 2, 5, 1, 4]]))
    assert build("all_reduce", "ring", 4, rings=[[0, 2, 1, 3]]).symmetry is None
    assert build("all_reduce", "ring", 4, rings=[[0, 1, 2, 3], [3, 2, 1, 0]]).symmetry is None


def test_rooted_plans_are_not_symmetric():
    assert build("broadcast", "chain", 4).symmetry is None


def test_check_sees_what_is_not_symmetric():
    plan = build("all_gather", "ring", 4)
    order = tuple(item for item in plan.order if item[0] != Block(2))
    with pytest.raises(AssertionError):
        check(plan.with_order(order))
