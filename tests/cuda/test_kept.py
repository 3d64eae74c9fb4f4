"""Kept calls know their buffers again, by fakes: no GPU is needed."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from ringcoll.config import Config
from ringcoll.dtypes import premul_sum

pytest.importorskip("cupy")

from ringcoll.communicator.enqueuing import Enqueuer


class Tensor:
    """As torch's: some of it changes in place."""

    def __init__(self, count: int) -> None:
        self.count, self.pointer, self.dtype, self.contiguous = count, 4096, "float32", True

    def data_ptr(self) -> int:
        return self.pointer

    def numel(self) -> int:
        return self.count

    def is_contiguous(self) -> bool:
        return self.contiguous


class State:
    """Counts what is prepared and what is run."""

    def __init__(self) -> None:
        self.prepared: list[int] = []
        self.ran: list[int] = []
        self.lock = threading.RLock()
        self.fabric, self.device = SimpleNamespace(rank=0), SimpleNamespace(ordinal=0)
        self.symmetric, self.config = SimpleNamespace(changes=0), Config()

    def prepare(self, call, _config):
        self.prepared.append(call.count)
        return SimpleNamespace(changes=0, count=call.count)

    def run(self, enqueued, _stream=None):
        self.ran.append(enqueued.ready.count)


@pytest.fixture
def state() -> State:
    return State()


@pytest.fixture
def enqueuer(state, monkeypatch) -> Enqueuer:
    stream = SimpleNamespace(cuda_stream=0)
    torch = SimpleNamespace(
        Tensor=Tensor, cuda=SimpleNamespace(current_stream=lambda _ordinal=None: stream)
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    made = Enqueuer(state, 2)

    def view(buffer, *_):
        return None if buffer is None else np.zeros(buffer.count, "float32")

    monkeypatch.setattr(made, "_view", view)
    return made


def test_a_tensor_that_stays_as_it_is_is_prepared_once(state, enqueuer):
    x = Tensor(8)
    for _ in range(3):
        enqueuer("all_reduce", x, None, "sum", 0, {})
    assert (state.prepared, state.ran) == ([8], [8, 8, 8])


def test_factors_that_differ_in_the_sign_of_zero_are_two_calls(state, enqueuer):
    x = Tensor(8)
    for factor in (0.0, -0.0, 0.0, complex(1, -0.0), complex(1, 0.0), 1):
        enqueuer("all_reduce", x, None, premul_sum(factor), 0, {})
    assert len(state.prepared) == 5


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("count", 5), ("pointer", 8192), ("dtype", "int32"), ("contiguous", False)],
)
def test_a_tensor_that_changed_in_place_is_prepared_again(state, enqueuer, attribute, value):
    x = Tensor(8)
    enqueuer("all_reduce", x, None, "sum", 0, {})
    setattr(x, attribute, value)
    enqueuer("all_reduce", x, None, "sum", 0, {})
    assert state.prepared == [8, x.count]
    assert state.ran[-1] == x.count


def test_a_cupy_array_keeps_its_size_and_type():
    import cupy

    memory = np.zeros(64, np.uint8)
    owner = cupy.cuda.UnownedMemory(memory.ctypes.data, 64, memory, 0)
    array = cupy.ndarray((4,), "float32", cupy.cuda.MemoryPointer(owner, 0))
    for attribute, value in (("size", 2), ("dtype", np.dtype("int32")), ("strides", (8,))):
        with pytest.raises(AttributeError):
            setattr(array, attribute, value)
    array.shape = (2, 2)
    assert (array.nbytes, array.data.ptr) == (16, memory.ctypes.data)
    assert not hasattr(array, "resize")
