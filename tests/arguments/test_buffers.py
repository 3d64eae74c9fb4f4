"""Every array as one flat view of the same memory, or a refusal that says what would be right."""

from __future__ import annotations

import array
import ctypes
import mmap
import re
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcoll.arguments.buffers import flat
from ringcoll.arguments.host_arrays import HostArrays
from ringcoll.dtypes import DTYPES
from ringcoll.errors import ArgumentError, ArgumentTypeError, UsageError
from ringcoll.executors.cpu.tensors import tensor_reader

WHERE = "all_reduce on rank 2"


def view(obj, *, writable=False, argument="sendbuf"):
    return flat(obj, argument=argument, where=WHERE, writable=writable)


def address(a):
    return a.__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (6,), (2, 3), (3, 0, 2), (1, 2, 3)])
def test_numpy_arrays(dtype, shape):
    x = np.zeros(shape, dtype.numpy)
    seen = view(x, writable=True)
    assert seen.ndim == 1
    assert (seen.size, seen.dtype) == (x.size, x.dtype)
    assert x.size == 0 or address(seen) == address(x)
    assert type(seen) is np.ndarray


@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    step=st.sampled_from([1, 2, -1]),
    turned=st.booleans(),
)
def test_what_is_taken_shares_memory_and_the_rest_is_refused(shape, step, turned):
    x = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    x = x[::step] if x.ndim else x
    x = x.T if turned else x
    if x.flags.c_contiguous:
        seen = view(x, writable=True)
        np.testing.assert_array_equal(seen, x.ravel())
        assert x.size == 0 or np.shares_memory(seen, x)
    else:
        with pytest.raises(ArgumentError, match="not contiguous"):
            view(x)


class Sub(np.ndarray):
    pass


def test_subclasses_become_plain():
    assert type(view(np.zeros(3).view(Sub))) is np.ndarray


def test_the_remedy_for_strides():
    with pytest.raises(
        ArgumentError, match=re.escape(f"{WHERE}: sendbuf of shape (3,) with strides (16,)")
    ) as caught:
        view(np.zeros(6)[::2])
    assert str(caught.value).endswith("pass np.ascontiguousarray(sendbuf)")
    with pytest.raises(ArgumentError, match="and take the result from there"):
        view(np.zeros(6)[::2], writable=True)
    with pytest.raises(ArgumentError, match=r"pass its transpose \.T"):
        view(np.zeros((2, 3)).T)


def test_read_only_arrays_are_send_buffers_only():
    x = np.zeros(3)
    x.flags.writeable = False
    assert address(view(x)) == address(x)
    with pytest.raises(ArgumentError, match=f"{WHERE}: recvbuf is read-only"):
        view(x, writable=True, argument="recvbuf")


@pytest.mark.parametrize(
    ("x", "remedy"),
    [
        (np.zeros(3, ">f4"), r": pass x\.astype\('float32'\)"),
        (np.zeros(3, "f4,i4"), r": pass x\.view\('uint8'\), the bytes"),
        (np.array([None]), ""),
        (np.array(["a"]), ""),
        (np.zeros(3, "M8[s]"), r": pass x\.view\('int64'\)"),
        (np.zeros(3, np.longdouble), r": pass x\.astype\('float64'\)"),
        (np.zeros(3, np.clongdouble), r": pass x\.astype\('complex128'\)"),
        (np.zeros(3, ml_dtypes.float8_e4m3b11fnuz), ""),
        (np.zeros(3, "V4"), r": pass x\.view\('uint8'\), the bytes"),
    ],
    ids=lambda x: str(getattr(x, "dtype", "remedy")),
)
def test_other_element_types_are_refused(x, remedy):
    words = rf"{WHERE}: sendbuf: .* is not one of int8.*\(native byte order\){remedy}$"
    with pytest.raises(ArgumentTypeError, match=words):
        view(x)


def test_masked_arrays_are_refused():
    with pytest.raises(ArgumentTypeError, match=r"mask.*sendbuf\.data"):
        view(np.ma.masked_array([1.0, 2.0], [True, False]))


@pytest.mark.parametrize(
    "x", [None, 3, 2.5, "max", [1, 2], (1, 2), np.float32(1), True, object(), {1: 2}], ids=type
)
def test_what_is_no_array_is_refused(x):
    with pytest.raises(ArgumentTypeError, match=f"{WHERE}: sendbuf is ") as caught:
        view(x)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: bytearray(8), "uint8"),
        (lambda: memoryview(bytearray(8)), "uint8"),
        (lambda: array.array("d", [1, 2]), "float64"),
        (lambda: array.array("q", [1, 2]), "int64"),
        (lambda: (ctypes.c_int16 * 4)(), "int16"),
        (lambda: mmap.mmap(-1, 4096), "uint8"),
    ],
    ids=["bytearray", "memoryview", "array-d", "array-q", "ctypes", "mmap"],
)
def test_the_buffer_protocol(make, name):
    obj = make()
    seen = view(obj, writable=True)
    assert seen.dtype == name
    seen[0] = 7
    assert np.asarray(memoryview(obj)).ravel()[0] == 7
    del seen


def test_bytes_are_read_only():
    np.testing.assert_array_equal(view(b"\x01\x02"), [1, 2])
    with pytest.raises(ArgumentError, match="read-only"):
        view(b"\x01\x02", writable=True)


class Interface:
    """Offers only ``__array_interface__``."""

    def __init__(self, x):
        self._x = x

    @property
    def __array_interface__(self):
        return self._x.__array_interface__


class Pack:
    """Offers only DLPack, on a device of choice."""

    def __init__(self, x, device=(1, 0)):
        self._x, self._device = x, device

    def __dlpack__(self, **how):
        return self._x.__dlpack__(**how)

    def __dlpack_device__(self):
        return self._device


class Cuda:
    @property
    def __cuda_array_interface__(self):
        return {"shape": (1,), "typestr": "<f4", "data": (1, False), "version": 3}


class Copier:
    """Only makes copies: numpy could convert it, a collective could not write to it."""

    def __array__(self, dtype=None, copy=None):
        return np.zeros(3)


@pytest.mark.parametrize("wrap", [Interface, Pack])
def test_other_protocols_share_memory(wrap):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    seen = view(wrap(x), writable=True)
    assert address(seen) == address(x)
    seen[5] = 9
    assert x[1, 2] == 9


def test_pinned_host_memory_is_host_memory():
    x = np.zeros(3)
    assert address(view(Pack(x, (3, 0)))) == address(x)


@pytest.mark.parametrize(
    ("obj", "device"),
    [
        (Cuda(), "CUDA"),
        (Pack(np.zeros(1), (2, 1)), "CUDA device 1"),
        (Pack(np.zeros(1), (10, 0)), "ROCm device 0"),
        (Pack(np.zeros(1), (99, 0)), "DLPack type 99 device 0"),
    ],
)
def test_a_buffer_on_another_device_is_refused(obj, device):
    with pytest.raises(ArgumentError, match=re.escape(f"another device ({device})")) as caught:
        view(obj)
    assert "comm.xp" in str(caught.value)
    assert "device='cpu'" in str(caught.value)


def test_a_copy_is_never_taken():
    with pytest.raises(ArgumentTypeError, match="is a Copier whose memory numpy cannot view"):
        view(Copier())


class Liar:
    """Claims memory that is not where its conversion puts it."""

    def __init__(self):
        self._x = np.zeros(4)

    @property
    def __array_interface__(self):
        return {**np.zeros(4).__array_interface__, "data": None}


def test_an_interface_without_memory_is_refused():
    with pytest.raises(UsageError, match=WHERE):
        view(Liar())


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    for name in ("float32", "float64", "float16", "int8", "int64", "uint8", "bool", "complex64"):
        x = torch.zeros(2, 3, dtype=getattr(torch, name))
        seen = view(x, writable=True)
        assert (seen.dtype, address(seen)) == (np.dtype(name), x.data_ptr())
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        x = torch.ones(3, dtype=torch.float32).to(getattr(torch, name))
        seen = view(x, writable=True)
        assert seen.dtype == getattr(ml_dtypes, name)
        assert address(seen) == x.data_ptr()
        assert (seen.astype(np.float32) == 1).all()


def test_torch_tensors_that_require_grad():
    torch = pytest.importorskip("torch")
    x = torch.zeros(3, requires_grad=True)
    assert address(view(x)) == x.data_ptr()
    assert address(view(x.detach(), writable=True)) == x.data_ptr()
    with pytest.raises(ArgumentError, match=r"requires grad.*sendbuf\.detach\(\)"):
        view(x, writable=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_a_viewed_torch_tensor_can_still_be_resized(dtype):
    torch = pytest.importorskip("torch")
    x = torch.ones(4, dtype=getattr(torch, dtype))
    seen = view(x, writable=True)
    seen[0] = 3
    assert x[0] == 3
    assert x.resize_(100).numel() == 100
    x.untyped_storage().resize_(0)
    assert view(torch.ones(4)).tolist() == [1] * 4


def test_a_view_keeps_the_memory_of_a_torch_tensor():
    torch = pytest.importorskip("torch")
    x = torch.ones(1 << 20)
    seen = view(x[3:], writable=True)
    address, storage = x.data_ptr(), x.untyped_storage()
    assert storage.data_ptr() == address
    del x, storage
    others = [torch.zeros(1 << 20) for _ in range(4)]
    assert address not in [other.data_ptr() for other in others]
    assert (seen == 1).all()


def test_torch_tensors_that_have_no_plain_memory():
    torch = pytest.importorskip("torch")
    with pytest.raises(ArgumentError, match="not contiguous"):
        view(torch.zeros(2, 3).T)
    with pytest.raises(UsageError, match=WHERE):
        view(torch.zeros(3, device="meta"))
    conjugate = torch.zeros(3, dtype=torch.complex64).conj()
    with warnings.catch_warnings(action="ignore"):  # torch calls them a prototype
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    freed, shrunk, empty = torch.ones(4), torch.ones(4), torch.ones(0)
    freed.untyped_storage().resize_(0)
    shrunk.untyped_storage().resize_(12)
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(4)

    def make(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (4,))

    wraps = type("Wrapper", (torch.Tensor,), {"__new__": make, "__torch_dispatch__": None})
    refused = [
        (wraps(), "a subclass that wraps others"),
        (conjugate, r"conjugate bit is set: pass sendbuf\.resolve_conj"),
        (conjugate.imag, r"negative bit is set: pass sendbuf\.resolve_neg"),
        (torch.eye(3).to_sparse(), r"layout is torch\.sparse_coo: pass sendbuf\.to_dense"),
        (torch.eye(3).to_mkldnn(), ""),
        (nested, "it is nested: pass its parts"),
        (fake, "has no memory"),
        (torch._to_functional_tensor(torch.ones(4)), "has no memory"),
        (torch._efficientzerotensor(4), "has no memory"),
        (freed, r"storage was freed by resize_\(0\)"),
        (shrunk, "resized to 12 bytes, and it needs 16"),
    ]
    for tensor, words in refused:
        with pytest.raises(ArgumentTypeError, match=f"cannot view.*{words}"):
            view(tensor)
        for arrays in HostArrays(), HostArrays(tensor_reader):
            assert arrays.view(tensor) is tensor
    assert view(empty).size == 0
    assert view(torch.nn.Parameter(torch.ones(2))).tolist() == [1, 1]


def test_torch_tensors_inside_a_transform_are_refused():
    torch = pytest.importorskip("torch")
    seen = []

    def inside(x):
        with pytest.raises(UsageError, match=WHERE) as caught:
            view(x)
        for arrays in HostArrays(), HostArrays(tensor_reader):
            assert arrays.view(x) is x
        seen.append(str(caught.value))
        return x.sum()

    torch.func.grad(inside)(torch.ones(3))
    torch.vmap(inside)(torch.ones(2, 3))
    assert len(seen) == 2


def test_torch_dtypes_without_arithmetic_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(ArgumentTypeError, match=f"{WHERE}: sendbuf.*float8_e4m3fnuz"):
        view(torch.ones(3).to(torch.float8_e4m3fnuz))


def test_jax_arrays_are_read_only():
    jax = pytest.importorskip("jax")
    for name in ("float32", "bfloat16", "float8_e5m2", "int8", "bool"):
        x = jax.numpy.arange(6).astype(name).reshape(2, 3)
        seen = view(x)
        assert (seen.size, address(seen)) == (6, x.unsafe_buffer_pointer())
        with pytest.raises(ArgumentError, match="read-only"):
            view(x, writable=True)
