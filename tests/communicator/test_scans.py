"""scan and exscan by the public call: rank 0, in place, operators, and what is refused."""

from __future__ import annotations

import re
from functools import reduce

import numpy as np
import pytest

import ringcoll
from ringcoll.algorithms import ALGORITHMS


@pytest.mark.parametrize("size", [0, 3, 20_000])
def test_exscan_leaves_the_buffers_of_rank_0(size):
    def work(comm):
        x, y = np.full(size, comm.rank + 1), np.full(size, -1)
        comm.exscan(x, y)
        z = x.copy()
        comm.exscan(z)
        return x.tolist(), y.tolist(), z.tolist()

    first, second, third = ringcoll.spawn(work, 3)
    assert first == ([1] * size, [-1] * size, [1] * size)
    assert second == ([2] * size, [1] * size, [1] * size)
    assert third == ([3] * size, [3] * size, [3] * size)


def test_a_rank_alone():
    def work(comm):
        x, y = np.array([2.0, 3.0]), np.array([-1.0, -1.0])
        comm.exscan(x, y, op=ringcoll.premul_sum(2.0))
        comm.scan(x, op=ringcoll.premul_sum(2.0))
        return x.tolist(), y.tolist()

    assert ringcoll.spawn(work, 1) == [([4.0, 6.0], [-1.0, -1.0])]


@pytest.mark.parametrize("size", [100, 30_000])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["scan", "exscan"])
def test_deterministic_is_a_left_fold_rounded_once(name, dtype, size):
    rng, n = np.random.default_rng(5), 6
    inputs = [(rng.standard_normal(size) * 10.0 ** (rank % 3)).astype(dtype) for rank in range(n)]

    def work(comm):
        y = np.zeros_like(inputs[0])
        getattr(comm, name)(inputs[comm.rank], y, deterministic=True)
        return y

    for rank, seen in enumerate(ringcoll.spawn(work, n)):
        before = inputs[: rank + (name == "scan")]
        if before:
            wide = [term.astype("float32") for term in before]
            assert seen.tobytes() == reduce(np.add, wide).astype(dtype).tobytes()


def test_recursive_doubling_is_not_deterministic_and_says_which_are():
    def work(comm):
        comm.scan(np.ones(3), algorithm="recursive_doubling", deterministic=True)

    with pytest.raises(ringcoll.Error, match="pass one of one_shot, chain"):
        ringcoll.spawn(work, 6)


@pytest.mark.parametrize("name", ["scan", "exscan"])
def test_avg_has_no_meaning(name):
    def work(comm):
        getattr(comm, name)(np.ones(3), op="avg")

    wanted = f"{name} on rank 0: op='avg' has no meaning .* pass op='sum' and divide"
    with pytest.raises(ringcoll.ArgumentError, match=wanted):
        ringcoll.spawn(work, 1)


@pytest.mark.parametrize("size", [3, 20_000])
def test_a_scan_against_an_exscan_is_a_mismatch(size):
    def work(comm):
        with pytest.raises(ringcoll.MismatchError) as raised:
            getattr(comm, "scan" if comm.rank else "exscan")(np.ones(size))
            comm.barrier()  # rank 0 waits for nobody
        comm.abort()
        return str(raised.value)

    for text in ringcoll.spawn(work, 2):
        assert re.search(r"exscan count=\d+ .*scan count=\d+ ", text, re.DOTALL)


@pytest.mark.parametrize("algorithm", [None, *ALGORITHMS["scan"]])
def test_asynchronous_and_in_groups(algorithm):
    def work(comm):
        x, y, z = np.full(7, comm.rank + 1), np.zeros(7, int), np.zeros(7, int)
        first = comm.scan(x, y, async_op=True, algorithm=algorithm)
        comm.exscan(x, z, async_op=True, algorithm=algorithm).wait()
        first.wait()
        with ringcoll.group():
            comm.scan(x, op="max", algorithm=algorithm)
            comm.exscan(y, op="prod", algorithm=algorithm)
        return x[0], y[6], z[3]

    # y: 1, 3, 6, 10 by the scan, then the products before each rank.
    assert ringcoll.spawn(work, 4) == [(1, 1, 0), (2, 1, 1), (3, 3, 3), (4, 18, 6)]


def test_explain_names_the_algorithms():
    [comm] = ringcoll.init_all(1)
    assert "chain" in comm.explain("scan", 1 << 20)
    assert "one_shot" in comm.explain("exscan", 1 << 10)
