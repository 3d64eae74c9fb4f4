"""An own algorithm: all_reduce on a 2-D torus, proven and run: python torus_all_reduce.py.

Ranks form a grid. Chunk j belongs to rank j. Sums go along the rows, then along the columns; the
results come back along the columns, then along the rows. The plan says only what moves where:
ringcoll derives signals, slices and staging, and proves the result before the first use.
"""

import math

import numpy as np

import ringcoll
from ringcoll import Block, Buffer, Chunk, Collective, Plan, Step


def torus(nranks):
    """Build the plan on the squarest grid of rows and columns."""
    rows = max(r for r in range(1, math.isqrt(nranks) + 1) if nranks % r == 0)
    columns = nranks // rows
    steps = []

    def step(rank, lane, sources, target):
        steps.append((Block(rank, lane=lane), Step(tuple(sources), (target,))))

    def row_sum(r, j):  # where row r keeps its sum of chunk j: on its rank in j's column
        return Chunk(r * columns + j % columns, Buffer.SCRATCH, j // columns)

    def result(rank, j):
        return Chunk(rank, Buffer.OUTPUT, j)

    grid = [(r, c, r * columns + c) for r in range(rows) for c in range(columns)]
    for r, c, rank in grid:  # 1. reduce-scatter along the row: the chunks of this column
        for j in range(c, nranks, columns):
            inputs = (Chunk(r * columns + p, Buffer.INPUT, j) for p in range(columns))
            step(rank, 0, inputs, row_sum(r, j))
    for _, _, rank in grid:  # 2. reduce-scatter along the column: one chunk a rank
        step(rank, 1, (row_sum(r, rank) for r in range(rows)), result(rank, rank))
    for _, c, rank in grid:  # 3. all-gather along the column
        for j in range(c, nranks, columns):
            if j != rank:
                step(rank, 2, [result(j, j)], result(rank, j))
    for r, c, rank in grid:  # 4. all-gather along the row
        for j in range(nranks):
            if j % columns != c:
                step(rank, 3, [result(r * columns + j % columns, j)], result(rank, j))
    return Plan(Collective("all_reduce", nranks, nranks), tuple(steps))


def work(comm):
    """Compare a sum by this algorithm with numpy's."""
    x = np.random.default_rng(comm.rank).integers(0, 100, 1000)
    want = sum(np.random.default_rng(rank).integers(0, 100, 1000) for rank in range(comm.nranks))
    comm.all_reduce(x, algorithm=torus)
    return bool((x == want).all())


if __name__ == "__main__":
    print(ringcoll.spawn(work, 6, device="cpu"))
