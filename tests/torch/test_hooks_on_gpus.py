"""DDP's communication hooks on GPUs: the same numbers, buckets without a copy, CUDA graphs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

import ringcoll
from ringcoll.bootstrap import run_ranks
from ringcoll.torch import hooks

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("hooks_program.py")


class Bucket:
    """What of DDP's is used."""

    def __init__(self, buffer):
        self._buffer = buffer
        self._parameters = [torch.nn.Parameter(torch.zeros(1))]

    def buffer(self):
        return self._buffer

    def parameters(self):
        return self._parameters


@pytest.mark.parametrize("nranks", [1, pytest.param(2, marks=pytest.mark.multi_gpu)])
def test_ddp_trains_alike_with_hooks(tmp_path, nranks):
    argv = [sys.executable, str(PROGRAM), str(tmp_path), "cuda"]
    statuses = run_ranks(argv, nranks, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert statuses == [0] * nranks
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(nranks)]
    for rank in said:
        assert rank["plain"] == pytest.approx(rank["own"], rel=1e-4)
        assert rank["group"] == rank["plain"]
        assert rank["bf16"] == pytest.approx(rank["own"], rel=2e-2)
        assert rank["rebuilt"]
        assert rank["reached"] == [True]
        assert rank["digests"] == said[0]["digests"]


@pytest.mark.parametrize("hook", [hooks.all_reduce, hooks.bf16_compress])
def test_the_callers_stream_waits_for_the_future(hook):
    def work(comm):
        bucket = Bucket(torch.zeros(1 << 20, device=comm.device))
        hook(comm, bucket).wait()
        for value in (1.0, 3.0):
            torch.cuda._sleep(10_000_000)  # what is written after it must still be seen
            bucket.buffer().fill_(value)
            found = hook(comm, bucket).wait() + 1
            assert float(found.min()) == float(found.max()) == value + 1

    ringcoll.spawn(work, 1, device="cuda", timeout=20)


@pytest.mark.parametrize("hook", [hooks.all_reduce, hooks.bf16_compress])
def test_a_step_is_captured_in_a_graph(hook):
    def work(comm):
        known, new = (Bucket(torch.zeros(1000, device=comm.device)) for _ in range(2))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            hook(comm, known).wait()
            for dtype in (torch.float32, torch.bfloat16):  # staged, as under capture a new one is
                comm.all_reduce(torch.zeros(1000, dtype=dtype, device=comm.device), op="avg")
            torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for bucket in (known, new):  # one of them is met under capture
                bucket.buffer().add_(1)
                hook(comm, bucket).wait()
                bucket.buffer().mul_(2)
        for _ in range(2):  # 0 becomes 2, and that 6
            graph.replay()
        torch.cuda.synchronize()
        comm.check()
        return [{*bucket.buffer().tolist()} for bucket in (known, new)]

    assert ringcoll.spawn(work, 1, device="cuda", timeout=20) == [[{6.0}, {6.0}]]
