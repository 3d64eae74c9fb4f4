"""A unit test of sharded code, without GPUs and without a launcher: pytest test_sharded_layer.py.

The marker of ringcoll's pytest plugin runs a test on every rank of a communicator, a thread a rank.
"""

import numpy as np
import pytest


def column_parallel(comm, x, weight):
    """Multiply by a matrix of which every rank holds some columns; all ranks get the product."""
    columns = np.array_split(np.arange(weight.shape[1]), comm.nranks)
    mine = np.ascontiguousarray((x @ weight[:, columns[comm.rank]]).T)  # a row for each column
    product = np.empty((weight.shape[1], len(x)), mine.dtype)
    comm.all_gather_v(mine, product, [len(x) * len(part) for part in columns])
    return product.T


def row_parallel(comm, x, weight):
    """Multiply by a matrix of which every rank holds some rows; the partial products are summed."""
    rows = np.array_split(np.arange(len(weight)), comm.nranks)[comm.rank]
    product = np.ascontiguousarray(x[:, rows] @ weight[rows])
    comm.all_reduce(product)
    return product


@pytest.mark.ringcoll(nranks=[1, 2, 3, 4])
@pytest.mark.parametrize("layer", [column_parallel, row_parallel])
def test_a_sharded_layer_multiplies_like_the_whole_one(comm, layer):
    random = np.random.default_rng(0)  # the same numbers on every rank
    x, weight = random.standard_normal((5, 12)), random.standard_normal((12, 7))
    np.testing.assert_allclose(layer(comm, x, weight), x @ weight)


def test_a_rank_that_passes_another_count_is_told(ringcoll_spawn):
    import ringcoll

    def work(comm):
        comm.all_reduce(np.zeros(3 + comm.rank))

    with pytest.raises(ringcoll.MismatchError, match="count"):
        ringcoll_spawn(work, 2)
