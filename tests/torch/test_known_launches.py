"""Tensors that the compiled part reads by DLPack's table: on the CPU, where it is the same."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from ringcoll.cuda.readers import Library
from ringcoll.executors.cuda import launches as module
from ringcoll.executors.cuda.launches import Launches, StreamOwners
from ringcoll.executors.cuda.params import Parameter
from tests.gpu.noted_rank import NotedRank

pytestmark = pytest.mark.skipif(
    module._launches is None or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="the compiled part has not been built, or torch has no table",
)

CPU = 1  # kDLCPU, whose only stream is 0
STREAMS = object()


class Kernel:
    """Notes the addresses of its launches."""

    pointers = 0

    def __init__(self, rank: NotedRank) -> None:
        self.parameter = Parameter(bytes(16), (((0, 0),), ((1, 0),), (), ()))
        self._noted = rank.noted

    def enqueue(self, *_stream: int) -> None:
        self._noted.append(tuple(self.parameter.words[:2]))


class Prepared:
    """A call that was launched before."""

    def __init__(self, rank: NotedRank) -> None:
        self.kernel, self.slot, self.number, self.taken = Kernel(rank), 1, 3, 0


@pytest.fixture
def rank(monkeypatch) -> Any:
    cupy: Any = SimpleNamespace(get_current_stream=None)  # which torch's arrays do not ask
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy)
    monkeypatch.setattr(module, "_DLPACK_CUDA", CPU)
    monkeypatch.setattr(module, "address_of", lambda _name: 0)
    made: Any = NotedRank(0)
    made.order.settled = 0
    made.owners = StreamOwners({0: STREAMS})
    kinds = torch.Tensor, torch.nn.Parameter
    libraries: Any = dict.fromkeys(kinds, Library(None, None, STREAMS))  # type: ignore[arg-type]
    made.launches = Launches(made.path, made.owners, set(), libraries)
    made.make = lambda x, y=None: made.launches.make("all_reduce", x, y, "sum", 0)

    def add(x: Any, y: Any = None) -> None:
        places = 0, 0, 0 if y is None else 1, 0
        nbytes = x.nbytes, 0 if y is None else y.nbytes
        made.launches.add(("all_reduce", x, y, "sum", 0), Prepared(made), places, nbytes)

    made.add = add
    return made


def test_a_tensor_of_the_shape_is_launched_where_it_lies(rank):
    x = torch.zeros(4, 8)
    rank.add(x)
    others = x, x[:], x.view(32), torch.zeros(32), x.view(1, 32, 1), torch.zeros(64)[32:]
    wanted = []
    for other in others:
        assert rank.make(other), other.shape
        wanted.append((other.data_ptr(), other.data_ptr()))
    assert rank.noted == wanted
    y = torch.zeros(32)
    rank.add(x, y)
    assert rank.make(x, torch.zeros(2, 16)) and rank.make(x), "both are known"
    parameter = torch.nn.Parameter(torch.zeros(32))
    assert not rank.make(parameter), "another type"
    rank.add(parameter)
    assert rank.make(parameter)
    assert rank.noted[-1][0] == parameter.data_ptr()


def test_what_python_would_refuse_or_read_otherwise_is_left_to_it(rank):
    x = torch.zeros(32)
    rank.add(x)

    class Other(torch.Tensor):  # type: ignore[misc]
        pass

    freed = torch.zeros(64)
    second = freed[32:]
    freed.untyped_storage().resize_(0)
    assert second.data_ptr() == 128, "its offset"
    others = (
        x[:31], second, torch.zeros(64)[::2], torch.zeros(4, 8).t(), x.double(), x.int(), x[:0],
        torch._neg_view(x), torch.zeros(32, dtype=torch.complex64).imag, torch.zeros(33)[1:],
        x.to_sparse(), torch._efficientzerotensor(32), torch.zeros(32, device="meta"),
        x.as_subclass(Other), torch.zeros(1).expand(32), x.to(torch.bfloat16),
    )  # fmt: skip
    for other in others:
        assert not rank.make(other), other
    whole = torch.zeros(16, dtype=torch.complex64)
    rank.add(whole)
    assert not rank.make(whole), "it may be one that is conjugated"
    assert rank.noted == [] and rank.make(x)


def test_types_of_one_size_are_not_taken_for_each_other(rank):
    kinds = torch.int16, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.bool
    for kind in kinds:
        rank.add(torch.zeros(32, dtype=kind))
        for other in kinds[kinds.index(kind) + 1 :]:
            assert not rank.make(torch.zeros(32, dtype=other)), (kind, other)
    assert rank.noted == []


def test_a_batched_tensor_is_left_to_python(rank):
    x, made = torch.zeros(4, 32), list[bool]()
    rank.add(torch.zeros(32))

    def seen(row):
        made.append(rank.make(row))
        return row

    torch.vmap(seen)(x)
    assert made == [False]
    assert rank.noted == []


def test_a_stream_that_nothing_keeps_is_left_to_python(rank):
    x = torch.zeros(32)
    rank.add(x)
    rank.owners.now = {0: object()}
    assert not rank.make(x)
    rank.owners.now = {0: STREAMS}
    assert rank.make(x)


def test_a_table_of_another_version_is_not_read(rank):
    class Header(ctypes.Structure):
        _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("at", ctypes.c_void_p)]

    header = (ctypes.c_char * 64)()
    Header.from_buffer(header).major = 2
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    )
    capsule = new(ctypes.addressof(header), b"dlpack_exchange_api", None)
    compiled = rank.launches._launches
    assert not compiled.learn(int, module._launches.DLPACK, capsule, None)
    Header.from_buffer(header).major = 1
    assert not compiled.learn(int, module._launches.DLPACK, capsule, None), "it reads no tensors"
