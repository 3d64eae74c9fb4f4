"""Symmetric memory as the arrays of other libraries: the same memory, or a refusal at once."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

import ringcoll
from ringcoll.cuda.arrays import from_pointer
from ringcoll.dtypes import DTYPES
from ringcoll.errors import ArgumentError, ArgumentTypeError, MachineError


class Tensor:
    """What of torch's tensors is used, over numpy."""

    def __init__(self, array):
        self.array = array

    def view(self, kind):
        return Tensor(self.array.view(kind))

    def reshape(self, shape):
        return Tensor(self.array.reshape(shape))


@pytest.fixture
def torch(monkeypatch):
    kinds = {row.name: row.numpy for row in DTYPES if row.name != "uint64"}
    fake = types.SimpleNamespace(
        Tensor=Tensor,
        __version__="0.0",
        from_numpy=Tensor,
        empty=lambda shape, dtype, device: Tensor(np.empty(shape, dtype)),
        **kinds,
    )
    monkeypatch.setitem(sys.modules, "torch", fake)


def refused(kind, **how):
    with ringcoll.init_all(1, device="cpu")[0] as comm, pytest.raises(kind) as caught:
        comm.empty(3, how.pop("dtype", "float32"), **how)
    return str(caught.value)


def test_the_ranks_own_library_is_the_default():
    def work(comm):
        x, y = comm.empty((2, 3)), comm.empty((2, 3), "int8", like="numpy")
        return type(x), x.dtype, type(y), y.dtype

    assert (
        ringcoll.spawn(work, 2, device="cpu")
        == [(np.ndarray, np.dtype("float32"), np.ndarray, np.dtype("int8"))] * 2
    )


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex128"])
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 2)])
def test_a_tensor_is_of_symmetric_memory(dtype, shape):
    def work(comm):
        tensor = comm.empty(shape, dtype, like="torch")
        seen = tensor.array
        found = comm._state.symmetric.lookup(seen.ctypes.data, seen.nbytes)
        return seen.shape, str(seen.dtype), found is not None or not seen.nbytes

    assert ringcoll.spawn(work, 2, device="cpu") == [(shape, dtype, True)] * 2


@pytest.mark.usefixtures("torch")
def test_a_tensor_keeps_its_memory():
    def work(comm):
        tensor = comm.empty(3, "int32", like="torch")
        tensor.array[:] = comm.rank
        other = comm.empty(3, "int32")  # would be the same block, had it been let go
        other[:] = 7
        return tensor.array.tolist()

    assert ringcoll.spawn(work, 2, device="cpu") == [[0] * 3, [1] * 3]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "complex64"])
def test_real_tensors(dtype):
    torch = pytest.importorskip("torch")

    def work(comm):
        tensor = comm.empty((2, 2), dtype, like="torch")
        tensor.fill_(comm.rank + 1)
        comm.all_reduce(tensor)
        return tensor.dtype == getattr(torch, dtype), bool((tensor == 3).all())

    assert ringcoll.spawn(work, 2, device="cpu") == [(True, True)] * 2


def test_tensors_are_resized_between_calls():
    torch = pytest.importorskip("torch")

    def work(comm):
        x, y = torch.ones(4), torch.ones(4)
        comm.all_reduce(x)
        comm.all_reduce(x, y, async_op=True).wait()
        x.resize_(100).fill_(1)
        y.untyped_storage().resize_(0)
        y.untyped_storage().resize_(16)
        comm.all_reduce(x)
        comm.all_reduce(x[:4], y)
        return int(x.sum()), y.tolist()

    assert ringcoll.spawn(work, 2, device="cpu") == [(200, [4] * 4)] * 2


def test_other_libraries_are_refused():
    assert "device='cuda'" in refused(ArgumentError, like="cupy")
    assert "one of numpy, cupy, torch" in refused(ArgumentError, like="jax")
    assert "one of numpy, cupy, torch" in refused(ArgumentTypeError, like=np)
    assert refused(ArgumentError, like="cupy").startswith("empty on rank 0: like='cupy'")


@pytest.mark.usefixtures("torch")
def test_a_type_that_the_library_lacks_is_refused():
    assert "torch 0.0 has no uint64" in refused(ArgumentTypeError, like="torch", dtype="uint64")


def test_a_library_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "torch, which cannot be imported" in refused(MachineError, like="torch")


def test_a_library_that_one_rank_lacks_is_an_error_on_all(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)

    def work(comm):
        with pytest.raises(MachineError) as told:
            comm.empty(3, like="torch" if comm.rank == 1 else None)
        y = comm.empty(2, "int32")
        y[:] = comm.rank
        comm.all_reduce(y)
        return str(told.value), y.tolist()

    (zero, one), (text, other) = ringcoll.spawn(work, 2, device="cpu", timeout=5)
    assert zero == text
    assert zero.startswith("empty on rank 1: like='torch' needs torch, which cannot be imported")
    assert one == other == [1, 1]


def test_a_raw_pointer_of_the_host_is_an_array():
    def work(comm):
        memory = np.full(8, 77, "bfloat16")
        raw = ringcoll.from_pointer(memory.ctypes.data + 4, (2, 2), "bfloat16", device="cpu")
        raw[:] = comm.rank + 1
        for _ in range(2):
            comm.all_reduce(raw)
        comm.sendrecv(raw, 1 - comm.rank, out := raw.copy(), 1 - comm.rank)
        return raw.shape, memory.tolist(), set(out.ravel().tolist())

    wanted = [77.0] * 2 + [6.0] * 4 + [77.0] * 2
    assert ringcoll.spawn(work, 2, device="cpu") == [((2, 2), wanted, {6.0})] * 2
    assert ringcoll.from_pointer(0, (0, 3), "int8", device="cpu").shape == (0, 3)
    for wrong, said in ((0, "null pointer"), (4097, "not aligned to 4 bytes")):
        with pytest.raises(ArgumentError, match=said):
            ringcoll.from_pointer(wrong, 3, "float32", device="cpu")


def test_raw_pointers_of_a_device_are_for_gpu_ranks():
    assert ringcoll.from_pointer is from_pointer
    raw = ringcoll.from_pointer(4096, 3, "float32", "cuda:0")
    with (
        ringcoll.init_all(1, device="cpu")[0] as comm,
        pytest.raises(ArgumentError, match="on another device"),
    ):
        comm.all_reduce(raw)
