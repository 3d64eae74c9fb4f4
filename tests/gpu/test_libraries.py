"""Arrays of raw pointers and of torch in calls of GPU ranks."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
import pytest

import ringcoll
from benchmarks.gpu.processes import run_ranks
from ringcoll.cuda.device import devices
from ringcoll.errors import ArgumentError, ArgumentTypeError
from ringcoll.executors.cuda import launches
from tests.gpu.ranks import on

pytestmark = pytest.mark.gpu

NRANKS = [
    pytest.param(1, id="one"),
    pytest.param("each", id="each its own", marks=pytest.mark.multi_gpu),
]


def spawned(work, nranks):
    n = min(8, len(devices())) if nranks == "each" else nranks
    return ringcoll.spawn(work, n, device="cuda", timeout=20), n


@pytest.mark.parametrize("nranks", NRANKS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_raw_pointers(nranks, symmetric):
    """Calls on memory that is known by its address alone, new objects and the same one again."""

    def work(comm):
        with on(comm):
            x = comm.empty(1000, "float32") if symmetric else comm.xp.empty(1000, "float32")
            raw = ringcoll.from_pointer(x.data.ptr, 1000, "float32", comm.device)
            for other in (
                raw,
                raw,
                ringcoll.from_pointer(x.data.ptr, 1000, "float32", comm.device),
            ):
                x.fill(comm.rank + 1)
                comm.all_reduce(other)
                comm.synchronize()
                found = {*x.get().tolist()}
            seen = comm.xp.from_dlpack(raw)
            assert seen.data.ptr == x.data.ptr
            return found

    found, n = spawned(work, nranks)
    assert found == [{n * (n + 1) / 2}] * n


@pytest.mark.parametrize("nranks", NRANKS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_tensors_of_symmetric_memory(nranks, dtype):
    torch = pytest.importorskip("torch")

    def work(comm):
        with on(comm):
            tensor = comm.empty((10, 100), dtype, like="torch")
            gc.collect()
            comm.empty(1, "uint8")  # frees what nobody holds
            assert comm._state.symmetric.lookup(tensor.data_ptr(), tensor.nbytes) is not None
            assert tensor.shape == (10, 100)
            assert str(tensor.device) == comm.device
            tensor.fill_(1)
            torch.cuda.synchronize(comm.device)
            comm.all_reduce(tensor)
            comm.synchronize()
            assert tuple(comm.empty(0, dtype, like="torch").shape) == (0,)
            return tensor.float().unique().tolist()

    found, n = spawned(work, nranks)
    assert found == [[1.0 if dtype == "bool" else float(n)]] * n


def test_a_tensor_whose_storage_was_freed_is_refused():
    torch = pytest.importorskip("torch")

    def work(comm):
        with on(comm):
            wide = torch.ones(64, device=comm.device)
            halves = wide[:32], wide[32:]
            for _ in range(3):
                for half in halves:
                    comm.all_reduce(half)
            comm.synchronize()
            for nbytes, why in (0, "freed by resize_|storage of 0 bytes"), (128, "of 128 bytes"):
                wide.untyped_storage().resize_(nbytes)
                for half in halves[nbytes // 128 :]:
                    with pytest.raises(ArgumentTypeError, match=why):
                        comm.all_reduce(half, tag=str(nbytes))  # a storage that is short: once
                if not nbytes:
                    with pytest.raises(ArgumentTypeError, match=why):
                        comm.all_reduce(halves[1])
            wide.untyped_storage().resize_(256)
            halves[1].fill_(1)
            comm.all_reduce(halves[1])
            comm.synchronize()
            return halves[1].unique().tolist()

    assert ringcoll.spawn(work, 1, device="cuda", timeout=20) == [[1.0]]


def freed(link):
    """A rank of two that share a GPU: what the compiled part makes of a view, then of none."""
    torch = pytest.importorskip("torch")
    torch.cuda.set_device(0)
    comm = ringcoll.init(link, device="cuda", timeout=20)
    wide = torch.ones(64, device="cuda")
    engine: Any = comm._engine
    half, make = wide[32:], engine._known.make
    call, made = ("all_reduce", half, None, "max", 0), False
    for _ in range(20):
        comm.all_reduce(half, op="max")
        time.sleep(0.05)  # its own kernel is loaded meanwhile
    for _ in range(20):  # now and then it is time to look at the other rank, which Python does
        if make(*call):
            made = True
        else:
            comm.all_reduce(half, op="max")
    comm.synchronize()
    wide.untyped_storage().resize_(0)
    made_again = any(make(*call) for _ in range(20))
    try:
        comm.all_reduce(half, op="max")
        error = ""
    except ArgumentTypeError as refused:
        error = str(refused)
    comm.close()
    link.send({"seen": [made, made_again, error]})


@pytest.mark.skipif(launches._launches is None, reason="the compiled part has not been built")
def test_the_compiled_part_leaves_a_view_of_freed_storage_to_python():
    pytest.importorskip("torch")
    found: list[Any] = []
    assert run_ranks(freed, 2, (), 90.0, lambda of: found.extend(m["seen"] for m in of)) is None
    assert len(found) == 2
    for made, made_again, error in found:
        assert (made, made_again) == (True, False)
        assert error.startswith("all_reduce on rank ")
        assert "storage" in error


def test_libraries_of_gpu_ranks():
    def work(comm):
        assert isinstance(comm.empty(3, like="cupy"), comm.xp.ndarray)
        assert not isinstance(comm.empty(3), np.ndarray)
        with pytest.raises(ArgumentError, match="device='cpu'"):
            comm.empty(3, like="numpy")

    ringcoll.spawn(work, 1, device="cuda", timeout=20)
