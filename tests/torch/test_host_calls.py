"""The calls whose host times are measured on GPUs, made by CPU ranks with numpy in CuPy's place."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import ringcoll
from benchmarks.gpu import host_calls


class WithoutOptions:
    """A communicator of CPU ranks that ignores what only GPU ranks take."""

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def all_reduce(self, *buffers, stream=None, max_sms=None, protocol=None, **options):
        return self._comm.all_reduce(*buffers, **options)


@pytest.fixture
def no_cupy(monkeypatch):
    """CuPy's names that the kinds use."""
    same = "zeros", "empty", "full", "full_like", "repeat", "arange"
    cupy = SimpleNamespace(**{name: getattr(np, name) for name in same})
    cupy.RawKernel = lambda *_: lambda *_: None
    cupy.cuda = SimpleNamespace(get_current_stream=object, Stream=lambda **_: None)
    zeros = torch.zeros
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))


@pytest.mark.parametrize("nranks", [2, 3])
def test_every_kind_has_right_results_and_a_wrong_call_is_counted(no_cupy, monkeypatch, nranks):
    monkeypatch.setattr(host_calls, "NEW", 6)
    monkeypatch.setattr(host_calls, "LARGE", 1 << 20)

    def work(comm):
        made = WithoutOptions(comm)
        kinds = host_calls.kinds(made)
        wrong = [host_calls.wrong_of(kind, comm.rank, comm.barrier) for kind in kinds.values()]
        compared = [kind for kind in kinds.values() if kind.received is not None]
        for kind in compared:
            silent = host_calls.Kind(comm.barrier, kind.sent, kind.received, kind.wanted)
            assert host_calls.wrong_of(silent, comm.rank, comm.barrier) == len(kind.received)
        new = [*host_calls.new_counts(made, comm.barrier)]
        return sum(wrong), len(compared), len(new), sum(unequal for _, _, unequal in new)

    assert ringcoll.spawn(work, nranks, device="cpu") == [(0, 24, 12, 0)] * nranks
