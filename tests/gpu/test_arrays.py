"""Every device array as a pointer and a count, or a refusal that says what would be right."""

import ctypes
import re
import sys
import types
import weakref

import ml_dtypes
import numpy as np
import pytest

from ringcoll.cuda.arrays import device_array, from_pointer
from ringcoll.dtypes import DTYPES, dtype_of
from ringcoll.errors import ArgumentError, ArgumentTypeError

cupy = pytest.importorskip("cupy")

WHERE = "all_reduce on rank 2"


@pytest.fixture
def memory(stand_in):
    """4 KiB of device 1."""
    runtime = stand_in(2)
    runtime.setDevice(1)
    pointer = runtime.malloc(4096)
    runtime.setDevice(0)
    return pointer


def view(obj, **how):
    return device_array(obj, argument="sendbuf", where=WHERE, **how)


def refusal(obj, kind=ArgumentError, **how):
    with pytest.raises(kind) as caught:
        view(obj, **how)
    message = str(caught.value)
    assert message.startswith(f"{WHERE}: sendbuf ")
    return message


def made(pointer, shape, dtype, ordinal=1):
    block = cupy.cuda.UnownedMemory(pointer, 4096, None, ordinal)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(block, 0))


class Foreign:
    """An array by its protocol alone."""

    dtype: object

    def __init__(self, pointer, shape=(6,), typestr="<f4", **more):
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": typestr,
            "data": (pointer, False),
            **more,
        }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (6,), (2, 3)])
def test_cupy_arrays(memory, dtype, shape):
    x = made(memory, shape, dtype.numpy)
    seen = view(x, ordinal=1)
    assert (seen.pointer, seen.count, seen.dtype) == (memory, x.size, dtype)
    assert (seen.nbytes, seen.ordinal, seen.readonly) == (x.nbytes, 1, False)
    assert seen.owner is x


def test_parts_of_cupy_arrays(memory):
    x = made(memory, (4, 6), "float32")
    assert view(x[2:]).pointer == memory + 48
    assert "pass cupy.ascontiguousarray(array)" in refusal(x[:, 1])
    assert "of shape (6, 4) with strides (4, 24) is not contiguous in C order" in refusal(x.T)
    assert "is not one of int8" in refusal(made(memory, 3, "f4,i4"), ArgumentTypeError)


def test_another_device_is_refused(memory):
    x = made(memory, 4, "float32")
    assert "is on device 1, but this rank is on device 0" in refusal(x, ordinal=0)
    assert view(made(memory, 0, "float32"), ordinal=0).count == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_raw_pointers(memory, dtype):
    raw = from_pointer(memory, (2, 3), dtype, "cuda:1")
    assert raw.device == 1
    assert raw.__dlpack_device__() == (2, 1)
    assert weakref.ref(raw)() is raw  # calls are kept as long as their arrays live
    seen = view(raw)
    assert (seen.pointer, seen.count, seen.dtype, seen.nbytes) == (
        memory,
        6,
        dtype,
        6 * dtype.itemsize,
    )
    # The same by the protocol, as other libraries take it.
    other = Foreign(memory)
    other.__cuda_array_interface__ = raw.__cuda_array_interface__
    other.dtype = raw.dtype.numpy
    again = view(other)
    assert (again.pointer, again.count, again.dtype, again.ordinal) == (memory, 6, dtype, 1)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((0, 3, "float32"), ArgumentError, "null pointer"),
        ((-1, 3, "float32"), ArgumentError, "ptr=-1"),
        (("a", 3, "float32"), ArgumentTypeError, "ptr='a'"),
        ((2**64, 3, "float32"), ArgumentError, "ptr=0x10000000000000000 is too large"),
        ((2**64, 3, "float32", "cpu"), ArgumentError, "ptr=0x10000000000000000 is too large"),
        ((2**64, 0, "float32", "cpu"), ArgumentError, "ptr=0x10000000000000000 is too large"),
        ((2**64 - 8, 3, "float32", "cpu"), ArgumentError, "the last address, 0xffffffffffffffff"),
        ((4096, 2**61, "float32", "cpu"), ArgumentError, "shape=2305843009213693952 of float32"),
        ((4096, (2**70, 0), "float32", "cpu"), ArgumentError, "at most 9223372036854775807 bytes"),
        ((4098, 3, "float32"), ArgumentError, "not aligned to 4 bytes"),
        ((4096, -3, "float32"), ArgumentError, "shape=-3"),
        ((4096, (1, 2.5), "float32"), ArgumentTypeError, "shape=2.5"),
        ((4096, 3, "float99"), ArgumentTypeError, "not one of"),
        ((4096, 3, "float32", -1), ArgumentError, "device=-1"),
        ((4096, 3, "float32", "tpu"), ArgumentError, "device='tpu'"),
        ((4096, 3, "float32", True), ArgumentTypeError, "device=True"),
    ],
)
def test_bad_pointers_are_refused(arguments, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        from_pointer(*arguments)


def test_the_protocol(memory):
    seen = view(Foreign(memory, (2, 3), "|i1", version=2, strides=None))
    assert (seen.pointer, seen.count, seen.dtype.name, seen.ordinal) == (memory, 6, "int8", 1)
    assert view(Foreign(memory, (2, 3), strides=(12, 4))).count == 6
    assert view(Foreign(memory, (2, 1, 3), strides=(12, 99, 4))).count == 6
    assert view(Foreign(memory, (2, 0, 3), strides=(1, 2, 3))).count == 0
    assert view(Foreign(0, (0,))).ordinal == 0
    assert view(Foreign(None, (0,), data=(None, False))).count == 0


def test_read_only_arrays_are_seen_as_such(memory):
    x = Foreign(memory, data=(memory, True))
    assert view(x).readonly


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"version": 1}, "of version 1"),
        ({"version": 4}, "of version 4"),
        ({"shape": None}, "malformed"),
        ({"shape": (2, -3)}, "with a negative length"),
        ({"data": 5}, "malformed"),
        ({"data": ("x", False)}, "malformed"),
        ({"strides": 5}, "malformed"),
        ({"mask": object()}, "mask"),
        ({"typestr": ">f4"}, "is not one of int8"),
        ({"typestr": "<V2"}, "is not one of int8"),
        ({"typestr": "nonsense"}, "is not one of int8"),
        ({"typestr": 7}, "is not one of int8"),
    ],
)
def test_what_the_protocol_must_not_say(memory, more, message):
    assert message in refusal(Foreign(memory, **more), ArgumentTypeError)


def test_a_missing_field_is_named(memory):
    x = Foreign(memory)
    del x.__cuda_array_interface__["shape"]
    assert "KeyError('shape')" in refusal(x, ArgumentTypeError)


def test_types_that_the_protocol_cannot_name(memory):
    x = Foreign(memory, typestr="<V2")
    x.dtype = np.dtype(ml_dtypes.bfloat16)
    assert view(x).dtype is dtype_of("bfloat16")
    x = Foreign(memory, typestr="<f1")
    x.dtype = np.dtype(ml_dtypes.float8_e5m2)
    assert view(x).dtype is dtype_of("float8_e5m2")
    x.dtype = np.dtype("float32")
    assert "contradictory dtype" in refusal(x, ArgumentTypeError)


def test_strides_with_gaps_are_refused(memory):
    assert "is not contiguous in C order" in refusal(Foreign(memory, (2, 3), strides=(16, 4)))
    assert "is not contiguous in C order" in refusal(Foreign(memory, (2, 3), strides=(4,)))


@pytest.mark.parametrize(
    "obj", [np.zeros(3), bytearray(8), np.ma.masked_array([1.0]), (ctypes.c_float * 3)()], ids=type
)
def test_host_arrays_are_refused_with_the_remedy(stand_in, obj):
    stand_in(1)
    message = refusal(obj)
    assert "comm.xp is cupy here" in message
    assert "device='cpu'" in message


def test_host_memory_behind_the_protocol_is_refused(memory):
    host = (ctypes.c_float * 6)()
    assert "in host memory" in refusal(Foreign(ctypes.addressof(host)))


@pytest.mark.parametrize("obj", [None, 3, "max", [1, 2], np.float32(1), object(), {1: 2}], ids=type)
def test_what_is_no_array_is_refused(stand_in, obj):
    stand_in(1)
    assert "wanted a" in refusal(obj, ArgumentTypeError)


class Capsule:
    """An array by DLPack alone."""

    def __init__(self, number):
        self.number = number

    def __dlpack_device__(self):
        return (self.number, 0)

    def __dlpack__(self, **_how):
        raise BufferError("nothing to show")


def test_dlpack(memory, monkeypatch):
    assert "on the host" in refusal(Capsule(1))
    assert "DLPack's type 10" in refusal(Capsule(10))
    assert "that CuPy cannot import by DLPack" in refusal(Capsule(2), ArgumentTypeError)
    x = made(memory, 5, "int16")
    monkeypatch.setattr(cupy, "from_dlpack", lambda _obj: x)
    seen = view(Capsule(2))
    assert (seen.pointer, seen.count, seen.owner) == (memory, 5, x)


class Tensor:
    """What of torch's tensors is looked at."""

    is_cuda, layout, requires_grad = True, "strided", False
    shape = (2, 3)
    dtype = "torch.bfloat16"
    device = types.SimpleNamespace(index=1)

    def __init__(self, **given):
        self.__dict__.update(given)
        self.contiguous = given.get("contiguous", True)

    def data_ptr(self):
        return 4096

    def storage_offset(self):
        return 4

    def untyped_storage(self):
        return types.SimpleNamespace(nbytes=lambda: self.__dict__.get("held", 20))

    def numel(self):
        return 6

    def stride(self):
        return (1, 2)

    def is_contiguous(self):
        return self.contiguous

    def is_conj(self):
        return self.__dict__.get("conj", False)

    def is_neg(self):
        return False


@pytest.fixture
def torch(monkeypatch):
    current = types.SimpleNamespace(current_stream=lambda d: types.SimpleNamespace(cuda_stream=70))
    fake = types.SimpleNamespace(Tensor=Tensor, strided="strided", cuda=current)
    monkeypatch.setitem(sys.modules, "torch", fake)


@pytest.mark.usefixtures("torch")
def test_torch_tensors():
    seen = view(Tensor(), ordinal=1)
    assert (seen.pointer, seen.count, seen.dtype.name, seen.nbytes, seen.ordinal) == (
        4096,
        6,
        "bfloat16",
        12,
        1,
    )
    assert "tensor on cpu" in refusal(Tensor(is_cuda=False, device="cpu"))
    assert "pass tensor.contiguous()" in refusal(Tensor(contiguous=False))
    assert "to_dense" in refusal(Tensor(layout="torch.sparse_coo"), ArgumentTypeError)
    assert "resolve_conj" in refusal(Tensor(conj=True))
    assert "storage of 19 bytes, and it needs 20" in refusal(Tensor(held=19), ArgumentTypeError)
    assert view(Tensor(requires_grad=True)).count == 6
    assert "is not one of int8" in refusal(Tensor(dtype="torch.quint8"), ArgumentTypeError)
