"""The compiled part reads torch's tensors as Python does."""

from __future__ import annotations

import numpy as np
import pytest

import ringcoll
from ringcoll.arguments.host_arrays import HostArrays
from ringcoll.dtypes import DTYPES
from ringcoll.executors.cpu import small_calls
from ringcoll.executors.cpu.tensors import tensor_reader

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(
    small_calls._small_calls is None or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="the compiled part has not been built, or torch has no table of DLPack's functions",
)


@pytest.fixture
def left():
    """The tensors that the compiled part leaves to Python."""
    return []


@pytest.fixture
def arrays(left):
    """Views by the compiled part alone."""

    def nothing(tensor):
        left.append(tensor)

    return HostArrays(lambda torch, _python: tensor_reader(torch, nothing))


def tensors():
    """Of every type, of several shapes, some that begin within their storage."""
    for row in DTYPES:
        kind = getattr(torch, row.name)
        for shape in ((6,), (2, 3), (1, 6, 1), ()):
            yield torch.ones(shape, dtype=torch.float32).to(kind)
        yield torch.ones(9).to(kind)[2:7]
        yield torch.ones(4, 3).to(kind)[1:3]
    yield torch.nn.Parameter(torch.ones(3), requires_grad=False)
    yield torch.ones(4, 3).T[:, :1].T  # whose strides say more than they are asked


def test_what_is_taken_is_what_python_takes(arrays, left):
    taken = 0
    for tensor in tensors():
        wanted, found = HostArrays().view(tensor), arrays.view(tensor)
        if left:
            assert left.pop() is tensor and (tensor.is_complex() or "float8" in str(tensor.dtype))
            continue
        taken += 1
        assert type(found) is np.ndarray and found.flags.writeable and found.flags.c_contiguous
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        assert found.ctypes.data == wanted.ctypes.data == tensor.data_ptr()
    assert taken > 60


def test_what_is_left_is_read_by_python(arrays, left):
    x, shrunk, freed = torch.ones(4), torch.ones(4), torch.ones(4)
    inner = shrunk[1:]
    shrunk.untyped_storage().resize_(12)
    freed.untyped_storage().resize_(0)
    ours = [
        (x.clone().requires_grad_(), "requires grad"),
        (torch._neg_view(x), "its elements are others"),
        (torch.ones(4, 4)[:, 0], "strided"),
        (torch.ones(4, device="meta"), "has no memory"),
        (torch.ones(0), "empty"),
        (shrunk, "its storage ends before it"),
        (freed, "its storage is gone"),
        (inner, "nor has it what begins within it"),
    ]
    for tensor, why in ours:
        assert arrays.view(tensor) is tensor, why
        assert left.pop() is tensor, why
    assert arrays.view(shrunk[:3]).tolist() == [1] * 3 and left == []
    assert HostArrays(tensor_reader).view(torch.ones(2).to(torch.complex64)).tolist() == [1, 1]


def test_no_other_table_is_taken(arrays):
    part, table = small_calls._small_calls, torch.Tensor.__dlpack_c_exchange_api__
    for wrong in (None, 1, object()):
        with pytest.raises(ValueError, match="table"):
            part.TensorReader(wrong, (), len)
    with pytest.raises(ValueError, match="types"):
        part.TensorReader(table, ((2, 32, np.dtype("f4")),) * 17, len)
    with pytest.raises(TypeError):
        part.TensorReader(table, ((2, 32, "f4"),), len)
    with pytest.raises(TypeError, match="wanted a tensor"):
        part.TensorReader(table, (), len)()
    assert part.TensorReader(table, (), len)(torch.ones(3)) == 3, "of no type"


@pytest.mark.parametrize("compiled", [True, False])
def test_calls_on_tensors(compiled):
    def work(comm):
        x, y = torch.full((5,), comm.rank + 1.0), torch.empty(2, 5)
        for _ in range(4):
            comm.all_gather(x, y)
        comm.all_reduce(x)
        return x.tolist(), y.tolist()

    for sums, rows in ringcoll.spawn(work, 2, device="cpu", timeout=20, compiled=compiled):
        assert sums == [3] * 5 and rows == [[1] * 5, [2] * 5]
