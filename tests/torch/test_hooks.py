"""DDP's communication hooks: numbers, what is kept for a bucket, and errors instead of waiting."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import ringcoll
from ringcoll.bootstrap import run_ranks
from ringcoll.errors import ArgumentError, ArgumentTypeError, MismatchError
from ringcoll.torch import hooks

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("hooks_program.py")


class Bucket:
    """What of DDP's is used."""

    def __init__(self, buffer, parameters):
        self._buffer, self._parameters = buffer, parameters

    def buffer(self):
        return self._buffer

    def parameters(self):
        return self._parameters


def bucket(values, dtype="float32"):
    buffer = torch.tensor(values, dtype=getattr(torch, dtype))
    return Bucket(buffer, [torch.nn.Parameter(torch.zeros(1))])


def reaches(comm, buffer):
    return comm._state.symmetric.lookup(buffer.data_ptr(), buffer.nbytes) is not None


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("hook", [hooks.all_reduce, hooks.bf16_compress])
def test_gradients_are_averaged_in_place(hook, dtype):
    def work(comm):
        first, second = bucket([comm.rank, 2.0, -4.0], dtype), bucket([8.0 * comm.rank], dtype)
        futures = [hook(comm, first), hook(comm, second), hook(comm, first)]
        found = [future.wait() for future in futures]
        assert found[0] is found[2] is first.buffer()
        return first.buffer().tolist(), second.buffer().tolist()

    assert ringcoll.spawn(work, 3, device="cpu", timeout=20) == [([1.0, 2.0, -4.0], [8.0])] * 3


def test_bf16_is_added_in_float32_and_rounded_once():
    # 1 + 3 * 2^-8: in bfloat16 each addition of 2^-8 to 1 would be lost.
    values = [4.0, 2.0**-6, 2.0**-6, 2.0**-6]

    def work(comm):
        one, other = bucket([values[comm.rank]]), bucket([values[comm.rank]], "bfloat16")
        found = hooks.bf16_compress(comm, one).wait(), hooks.all_reduce(comm, other).wait()
        return found[0].dtype, [float(x[0]) for x in found]

    right = float(torch.tensor(sum(values) / 4).to(torch.bfloat16))
    assert right > 1
    found = ringcoll.spawn(work, 4, device="cpu", timeout=20)
    assert found == [(torch.float32, [right, right])] * 4


def test_a_bucket_is_registered_once_and_forgotten_when_its_parameters_move():
    def work(comm):
        registered = []
        real = comm.register

        def noting(array):
            registered.append(array.data_ptr())
            return real(array)

        comm.register = noting
        old, other = bucket([1.0, 2.0]), bucket([3.0])
        for _ in range(3):
            for each in (old, other):
                hooks.all_reduce(comm, each).wait()
        assert registered == [old.buffer().data_ptr(), other.buffer().data_ptr()]
        assert reaches(comm, old.buffer())
        assert reaches(comm, other.buffer())
        rebuilt = Bucket(torch.ones(3), old.parameters())
        hooks.all_reduce(comm, rebuilt).wait()
        assert reaches(comm, rebuilt.buffer())
        assert reaches(comm, other.buffer())
        assert not reaches(comm, old.buffer())
        return len(registered)

    assert ringcoll.spawn(work, 2, device="cpu", timeout=20) == [3, 3]


@pytest.mark.parametrize("hook", [hooks.all_reduce, hooks.bf16_compress])
def test_memory_of_buckets_that_are_gone_is_let_go(hook):
    def work(comm):
        gone = bucket(list(range(1000)))
        hook(comm, gone).wait()
        comm.synchronize()
        seen = weakref.ref(gone.buffer())
        del gone
        gc.collect()
        assert seen() is not None  # no other bucket may come to lie here before it is forgotten
        for _ in range(2):
            hook(comm, bucket([1.0])).wait()
            comm.synchronize()
            gc.collect()
        return seen() is None

    assert ringcoll.spawn(work, 2, device="cpu", timeout=20) == [True, True]


def test_nothing_keeps_a_communicator_alive():
    with ringcoll.init_all(1, device="cpu")[0] as comm:
        hooks.all_reduce(comm, bucket([1.0])).wait()
        hooks.bf16_compress(comm, bucket([1.0])).wait()
    seen = weakref.ref(comm)
    del comm
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("hook", [hooks.all_reduce, hooks.bf16_compress])
def test_ranks_with_other_buckets_get_an_error_at_once(hook):
    def work(comm):
        with pytest.raises(MismatchError):
            hook(comm, bucket([1.0] * (1 + comm.rank))).wait()
        return True

    assert ringcoll.spawn(work, 2, device="cpu", timeout=20) == [True, True]


def test_a_rank_that_knows_a_bucket_which_others_do_not_ends_by_the_deadline():
    told = {}

    def work(comm):
        known = bucket([1.0])
        hooks.all_reduce(comm, known).wait()
        try:
            hooks.all_reduce(comm, known if comm.rank else bucket([2.0])).wait()
        except (ringcoll.Error, RuntimeError) as error:
            told[comm.rank] = error

    with pytest.raises(ringcoll.Error):  # the communicator is broken
        ringcoll.spawn(work, 2, device="cpu", timeout=1)
    assert sorted(told) == [0, 1]


def test_an_error_of_the_worker_arrives_through_the_future():
    def fail():
        raise ringcoll.MachineError("on purpose")

    with ringcoll.init_all(1, device="cpu")[0] as comm:
        with pytest.raises(RuntimeError, match="MachineError: on purpose"):
            hooks._on_worker(comm, torch.ones(1), fail).wait()
        assert hooks.all_reduce(comm, bucket([3.0])).wait().tolist() == [3.0]


@pytest.mark.parametrize(
    ("state", "buffer", "kind", "words"),
    [
        (None, torch.ones(2), ArgumentTypeError, "state is a NoneType"),
        ("comm", torch.ones(2).to_sparse(), ArgumentTypeError, "sparse gradients"),
        ("comm", torch.ones(2, dtype=torch.int32), ArgumentTypeError, "torch.int32: pass floats"),
    ],
)
def test_what_cannot_be_is_refused_at_once(state, buffer, kind, words):
    with ringcoll.init_all(1, device="cpu")[0] as comm, pytest.raises(kind, match=words):
        given: Any = comm if state else None
        hooks.bf16_compress(given, Bucket(buffer, []))


def test_other_devices_are_refused():
    class Elsewhere:
        layout, is_cuda, device = torch.strided, True, "cuda:0"

        def get_device(self):
            return 0

    with (
        ringcoll.init_all(1, device="cpu")[0] as comm,
        pytest.raises(ArgumentError, match="make it with device='cuda'"),
    ):
        hooks.all_reduce(comm, Bucket(Elsewhere(), []))


def test_on_gpus_a_call_follows_the_callers_stream_on_one_of_its_own(monkeypatch):
    """With streams that only note what they are told."""
    noted, now = [], ["the caller's"]

    class AsyncStream:
        def __init__(self, device):
            self.stream = f"own of {device}"

        def device_guard(self):
            return contextlib.nullcontext()

        def wait_stream(self, stream):
            noted.append(f"waits for {stream}")

        def set_current(self):
            now.append("own")
            return "before"

        def restore(self, before):
            noted.append(f"back to what was {before}")
            now.pop()

        def future(self, value):
            return value

    monkeypatch.setattr(hooks, "AsyncStream", AsyncStream)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: now[-1], raising=False
    )
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda _, stream: noted.append(f"kept for {stream}")
    )
    buffer = torch.ones(1)
    with ringcoll.init_all(1, device="cpu")[0] as comm:
        for _ in range(2):
            made = hooks._on_stream(comm, buffer, lambda: noted.append(f"call on {now[-1]}"))
            assert made is buffer
    once = ["waits for the caller's", "call on own", "back to what was before"]
    assert noted == [*once, "kept for own of cpu"] * 2


def test_ddp_trains_alike_with_hooks(tmp_path):
    """Two processes: DDP's own all_reduce, and each hook; buckets are rebuilt on the way."""
    argv = [sys.executable, str(PROGRAM), str(tmp_path), "cpu"]
    statuses = run_ranks(argv, 2, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert statuses == [0, 0]
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank in said:
        assert (
            rank["plain"] == rank["group"] == rank["own"]
        )  # two ranks: halving is exact, before or after
        assert rank["bf16"] == pytest.approx(rank["own"], rel=2e-2)
        assert rank["bf16"] != rank["own"]
        assert rank["rebuilt"]
        assert "RuntimeError" in rank["refused"]
    assert said[0]["digests"] == said[1]["digests"]
