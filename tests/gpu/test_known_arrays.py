"""What the compiled part reads: CuPy's arrays, tensors by DLPack's table, and attributes."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import pytest

from ringcoll.cuda.raw import RawArray
from ringcoll.cuda.readers import NO_MEMORY, Library
from ringcoll.dtypes import dtype_of
from ringcoll.executors.cuda import launches as module
from ringcoll.executors.cuda.launches import Launches, StreamOwners
from ringcoll.executors.cuda.params import Parameter
from tests.gpu.known_calls import DEVICE, HELD, WORDS, Prepared, words, x
from tests.gpu.noted_rank import STREAM

pytestmark = pytest.mark.skipif(
    module._launches is None, reason="the compiled part has not been built"
)


def test_arrays_of_cupy_are_read(known):
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(1 << 20, 4096, None, DEVICE), 0)
    a = cupy.ndarray((64,), "float32", memptr=memory)
    libraries: Any = {cupy.ndarray: Library(None, None)}  # type: ignore[arg-type]
    known.launches._libraries = libraries
    known.add(a)
    for array_, at in ((a, 0), (a[:], 0), (a.reshape(8, 8), 0), (cupy.ndarray.view(a), 0)):
        known.noted.clear()
        assert known.make("all_reduce", array_, None, "sum", 0)
        assert known.noted == [words(STREAM, (1 << 20) + at, (1 << 20) + at)]
    wide = cupy.ndarray((128,), "float32", memptr=memory)
    other = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(1 << 20, 4096, None, 0), 0)
    assert known.make("all_reduce", wide[2:66], None, "sum", 0)
    assert known.noted[-1][2] == (1 << 20) + 8
    for array_ in (
        wide, wide[::2], a.view("int32"), a[:0], wide[1:65], a.reshape(8, 8).T,
        cupy.ndarray((64,), "float32", memptr=other),
    ):  # fmt: skip
        assert not known.make("all_reduce", array_, None, "sum", 0)


class DLTensor(ctypes.Structure):
    """As DLPack has it."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


READ = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
CURRENT = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_uint64)
)


class Table(ctypes.Structure):
    """DLPack's table of functions."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("before", ctypes.c_void_p),
        ("others", ctypes.c_void_p * 3),
        ("tensor_of", READ),
        ("current_stream", CURRENT),
    ]


AT = NO_MEMORY


class Tensor:
    """An array that such a table reads, by these fields."""

    dtype, size = dtype_of("float32"), 8

    def __init__(self, **fields: Any) -> None:
        plain = {"data": AT, "device_type": 2, "device_id": DEVICE, "code": 2, "bits": 32}
        self.fields: dict[str, Any] = {**plain, "lanes": 1, "byte_offset": 0, **fields}
        self.shape, self.strides = fields.pop("shape", (8,)), fields.pop("strides", (1,))
        for name in ("shape", "strides"):
            self.fields.pop(name, None)

    def is_neg(self) -> bool:
        return False


@READ
def tensor_of(tensor, at):
    for name, value in tensor.fields.items():
        setattr(at[0], name, value)
    at[0].ndim = len(tensor.shape)
    tensor.kept = [(ctypes.c_int64 * len(each))(*each) for each in (tensor.shape, tensor.strides)]
    at[0].shape, at[0].strides = (
        ctypes.cast(k, ctypes.POINTER(ctypes.c_int64)) for k in tensor.kept
    )
    return 0


def capsule(table: Table) -> object:
    made = ctypes.pythonapi.PyCapsule_New
    made.restype = ctypes.py_object
    made.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
    found: object = made(ctypes.addressof(table), b"dlpack_exchange_api", None)
    return found


def test_tensors_are_read_by_dlpacks_table(known):
    asked, status = list[tuple[int, int]](), 0

    @CURRENT
    def current_stream(device_type, device, at):
        asked.append((device_type, device))
        at[0] = STREAM
        return status

    others = (ctypes.c_void_p * 3)()
    table = Table(1, 3, None, others, tensor_of, current_stream)
    newer = Table(2, 0, ctypes.addressof(table), others, READ(), CURRENT())
    compiled: Any = known.launches._launches
    assert compiled.learn(Tensor, module._launches.DLPACK, capsule(newer), known.stream)
    known.launches._learnt[Tensor] = True
    assert known.add(Tensor()) is not None
    call = "all_reduce", None, "sum", 0
    for tensor, at in (
        (Tensor(), AT),
        (Tensor(data=2 * AT, byte_offset=64), 2 * AT + 64),
        (Tensor(shape=(2, 4), strides=(4, 1)), AT),
        (Tensor(shape=(1, 8, 1), strides=(3, 1, 7)), AT),
    ):
        assert known.make(call[0], tensor, *call[1:]), tensor.fields
        assert known.noted[-1] == words(STREAM, at, at)
    assert {*asked} == {(2, DEVICE)}
    launched = len(known.noted)
    for tensor in (
        Tensor(device_type=13), Tensor(device_id=0), Tensor(code=5), Tensor(lanes=2),
        Tensor(bits=64), Tensor(code=0), Tensor(data=AT - 8), Tensor(data=AT + 4),
        Tensor(shape=(2, 4), strides=(1, 2)), Tensor(shape=(0,)), Tensor(shape=(9,)),
    ):  # fmt: skip
        assert not known.make(call[0], tensor, *call[1:]), tensor.fields
    negative = Tensor()
    negative.is_neg = lambda: True  # type: ignore[method-assign]
    assert not known.make(call[0], negative, *call[1:])
    assert len(known.noted) == launched
    known.add(None, Tensor(), name="recv", places=(2, 0, 1, 0))
    asked.clear()
    assert known.make("recv", None, Tensor(), "sum", 0) and asked == [(2, DEVICE)]
    status = 1
    with pytest.raises(RuntimeError, match="stream"):
        known.make(call[0], Tensor(), *call[1:])
    for missing in (
        Table(1, 3, None, others, READ(), current_stream),
        Table(1, 3, None, others, tensor_of, CURRENT()),
    ):
        assert not compiled.learn(int, module._launches.DLPACK, capsule(missing), None)


def test_attributes_are_those_that_python_would_read(known, monkeypatch):
    """Slots are read where they lie, but not of a class that has changed, or has another's."""
    call = "all_reduce", x(4096), None, "sum", 0
    known.add(x(4096))
    assert known.make(*call)
    with monkeypatch.context() as patched:
        patched.setattr(StreamOwners, "now", property(lambda _self: {}))
        assert not known.make(*call)
    assert known.make(*call)

    class Other:
        __slots__ = ("other",)
        now = StreamOwners.__dict__["now"]

    class Told(Parameter):
        __slots__ = ()

        def __setattr__(self, name, value):
            told.append(name)
            super().__setattr__(name, value)

    libraries: Any = {RawArray: Library(None, None)}  # type: ignore[arg-type]
    odd: Any = Other()
    odd.other = known.owners.now
    launches = Launches(known.path, odd, known.groups, libraries)
    launches.add(call, Prepared(known), (0, 0, 0, 0), (32, 0))
    with pytest.raises(TypeError, match="now"):
        launches.make(*call)
    told, prepared = list[str](), Prepared(known)
    prepared.kernel.parameter = Told(array("Q", [7] * WORDS), HELD)
    prepared.kernel.parameter.filled = (1,)
    known.launches.add(call, prepared, (0, 0, 0, 0), (32, 0))
    told.clear()
    assert known.make(*call) and told == ["filled"]
