"""Calls in functions that torch compiles: the graph ends before them, and begins anew behind."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import ringcoll
from ringcoll.torch import hooks


@pytest.fixture
def comm():
    (made,) = ringcoll.init_all(1, device="cpu")
    with made:
        yield made
    torch.compiler.reset()


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_a_communicators_calls(comm, kind, warm):
    twice = ringcoll.premul_sum(2.0)

    @torch.compile(backend="eager")
    def step(x):
        y = x * 2
        moved = y if kind == "tensor" else np.full(4, 2.0, "float32")
        gathered = torch.empty(4)
        comm.all_reduce(moved, op=twice)
        comm.all_gather_v(moved, gathered, [4])
        comm.all_reduce(moved, op=twice, async_op=True).wait()
        return gathered + 1, torch.as_tensor(moved)

    if warm:
        comm.all_reduce(torch.ones(4), op=twice)
    for _ in range(3):
        gathered, moved = step(torch.ones(4))
        assert gathered.tolist() == [5.0] * 4 and moved.tolist() == [8.0] * 4


class Bucket:
    """What of DDP's is used."""

    def __init__(self, buffer):
        self.memory = buffer

    def buffer(self):
        return self.memory

    def parameters(self):
        return [self.memory]


@pytest.mark.parametrize("hook", [hooks.all_reduce, hooks.bf16_compress])
def test_hooks(comm, hook):
    buffer = torch.ones(4)

    @torch.compile(backend="eager")
    def step(x):
        buffer.copy_(x * 2)
        future = hook(comm, Bucket(buffer))
        return future.wait() + 1

    for _ in range(3):
        assert step(torch.ones(4)).tolist() == [3.0] * 4
