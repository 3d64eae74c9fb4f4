"""What a call costs on the host before the first byte moves: ``pytest benchmarks/test_host.py``."""

# ruff: noqa: D103  # a name says what is timed

from __future__ import annotations

import numpy as np
import pytest

import ringcoll
from ringcoll.algorithms import ALGORITHMS, build
from ringcoll.arguments.calls import prepare
from ringcoll.encode import encode
from ringcoll.launch import Launch
from ringcoll.lower import lower
from ringcoll.model.links import Links
from ringcoll.model.predict import predict
from ringcoll.tuner import CpuRanks, Limits
from ringcoll.tuner.predicted import predicted

RANKS = 8
SHAPES = (("all_reduce", "ring"), ("all_reduce", "two_shot"), ("broadcast", "chain"))


def plan_of(shape):
    collective, algorithm = shape
    return build(collective, algorithm, RANKS)


@pytest.fixture
def comm():
    with ringcoll.init() as made:
        yield made


def test_call_of_kept_arguments(benchmark, comm):
    array = comm.empty(2, "float32")
    comm.all_reduce(array)
    benchmark(comm.all_reduce, array)
    assert array.size == 2


def test_call_with_an_option(benchmark, comm):
    array = comm.empty(2, "float32")
    benchmark(comm.all_reduce, array, algorithm="one_shot")
    assert array.size == 2


def test_call_of_a_new_array(benchmark, comm):
    def call() -> int:
        array = np.zeros(2, np.float32)
        comm.all_reduce(array)
        return array.size

    assert benchmark(call) == 2


def test_check_of_arguments(benchmark):
    array = np.zeros(1024, np.float32)
    call = benchmark(prepare, "all_reduce", rank=0, nranks=RANKS, sendbuf=array, op="sum")
    assert call.count == 1024


@pytest.mark.parametrize("shape", SHAPES, ids="-".join)
def test_build(benchmark, shape):
    collective, algorithm = shape
    builder = ALGORITHMS[collective][algorithm]
    plan = benchmark(builder, RANKS)
    assert plan.nranks == RANKS


@pytest.mark.parametrize("shape", SHAPES, ids="-".join)
def test_lower(benchmark, shape):
    plan = plan_of(shape)
    lowered = benchmark(lower, plan, Launch(slices=2))
    assert len(lowered.order) >= len(plan.order)


@pytest.mark.parametrize("shape", SHAPES, ids="-".join)
def test_encode_again(benchmark, shape):
    plan = plan_of(shape)
    program = benchmark(encode, plan, Launch(slices=64))
    assert program.programs


@pytest.mark.parametrize("shape", SHAPES, ids="-".join)
def test_verify(benchmark, shape):
    lowered = lower(plan_of(shape), Launch())
    assert benchmark(ringcoll.verify, lowered) is not None


@pytest.mark.parametrize("shape", SHAPES, ids="-".join)
def test_predict(benchmark, shape):
    plan, links = plan_of(shape), Links(1e10, 1e-6)
    assert benchmark(predict, plan, 1 << 20, links, slices=16).seconds > 0


def test_tuner_that_remembers(benchmark):
    call = "all_reduce", 1 << 20, CpuRanks(RANKS), Limits()
    predicted(*call)
    assert benchmark(predicted, *call).algorithm
