"""What is refused in words that name the argument and the remedy."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import ringcoll
from ringcoll import ArgumentError, ArgumentTypeError, PlanError


def test_an_algorithm_that_is_not_deterministic_is_named_with_those_that_are():
    def work(comm):
        x = np.ones(3)
        with pytest.raises(PlanError) as caught:
            comm.all_reduce(x, deterministic=True, algorithm="recursive_doubling")
        message = str(caught.value)
        for text in ("all_reduce", "algorithm='recursive_doubling'", "deterministic=True"):
            assert text in message
        for text in ("Block", "step", "I[0]", "chunks"):
            assert text not in message
        named = message.partition("pass one of ")[2].partition(", or leave")[0].split(", ")
        assert "one_shot" in named
        for algorithm in named:
            comm.all_reduce(x, deterministic=True, algorithm=algorithm)
        others = set(ringcoll.algorithms.ALGORITHMS["all_reduce"]) - set(named)
        for algorithm in others:
            with pytest.raises((PlanError, ArgumentError)):
                comm.all_reduce(x, deterministic=True, algorithm=algorithm)
        return len(named)

    assert min(ringcoll.spawn(work, 4)) >= 1


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_communicator_is_neither_copied_nor_pickled(way):
    (comm,) = ringcoll.init_all(1)
    with comm:
        with pytest.raises(ArgumentTypeError, match=r"rank 0: a communicator cannot be copied or"):
            way(comm)
        comm.barrier()


@pytest.mark.parametrize("seconds", [10**400, -(10**400)])
def test_a_timeout_that_no_float_holds_is_refused(seconds):
    (comm,) = ringcoll.init_all(1)
    with comm:
        with pytest.raises(ArgumentError, match=r"timeout=-?10*: wanted seconds > 0"):
            comm.barrier(timeout=seconds)
        comm.barrier(timeout=1e300)
    with pytest.raises(ArgumentError, match=r"timeout=-?10*: wanted seconds > 0"):
        ringcoll.init_all(2, timeout=seconds)
    with pytest.raises(ArgumentError, match=r"pace=10*: wanted bytes/s"):
        ringcoll.init_all(2, pace=10**400)


def test_a_limit_of_a_wait_is_seconds_or_none():
    (comm,) = ringcoll.init_all(1)
    with comm:
        wrong: list = ["x", True, float("nan"), 10**400, [1]]
        for bad in wrong:
            work = comm.barrier(async_op=True)
            with pytest.raises(ringcoll.UsageError, match=r"Work.wait\(\): timeout=.*: wanted sec"):
                work.wait(timeout=bad)
            work.wait(timeout=None)
        for good in (1, 1e12, float("inf")):
            comm.barrier(async_op=True).wait(timeout=good)
        assert comm.probe(0, timeout=1e12, wait=False) is None
        with pytest.raises(ringcoll.UsageError, match=r"probe on rank 0: timeout='x': wanted"):
            comm.probe(0, timeout=wrong[0])


@pytest.mark.parametrize("value", ["yes", 1, 0, None, [], np.ones(2)], ids=repr)
def test_async_op_is_true_or_false(value):
    (comm,) = ringcoll.init_all(1)
    x = np.ones(3)
    calls = {
        "all_reduce": lambda: comm.all_reduce(x, async_op=value),
        "barrier": lambda: comm.barrier(async_op=value),
        "send": lambda: comm.send(x, 0, async_op=value),
        "all_gather_v": lambda: comm.all_gather_v(x, np.ones(3), [3], async_op=value),
    }
    with comm:
        for name, call in calls.items():
            with pytest.raises(ArgumentTypeError, match=f"{name} on rank 0: async_op=.*: wanted"):
                call()
        way: dict = {"async_op": np.True_}
        comm.all_reduce(x, **way).wait()
