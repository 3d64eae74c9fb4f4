"""Kept calls know their buffers again, by fakes: no GPU is needed."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ringcoll.config import Config
from ringcoll.dtypes import premul_sum

pytest.importorskip("cupy")

from ringcoll import ANY, Communicator
from ringcoll.arguments.calls import prepare_recv
from ringcoll.communicator.enqueuing import Enqueuer
from ringcoll.communicator.group import group
from ringcoll.errors import ArgumentError, LaunchRefused


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
        self.cuda = SimpleNamespace(stream_order=SimpleNamespace(stream=None))
        self.refuses = False

    def prepare(self, call, _config):
        self.prepared.append(call.count)
        return SimpleNamespace(changes=0, count=call.count)

    def usable(self):
        pass

    def abort(self, _reason):
        pass

    def run(self, enqueued, _stream=None):
        if self.refuses:
            raise LaunchRefused("no")
        self.ran.append(enqueued.ready.count)
        self.cuda.stream_order.stream = enqueued.stream


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
        enqueuer.collective("all_reduce", x, None, "sum", 0, {})
    assert (state.prepared, state.ran) == ([8], [8, 8, 8])


@pytest.mark.parametrize(("source", "exact"), [(ANY, None), (ANY, True), (1, False)])
def test_a_receive_that_only_a_host_could_match_is_refused(enqueuer, source, exact):
    call = prepare_recv(np.zeros(3), source, exact, rank=0, nranks=2)
    with pytest.raises(ArgumentError, match="source=ANY and exact=False are for CPU ranks"):
        enqueuer.pairs("recv", [call], {}, ())


def test_a_rank_whose_host_sees_no_messages_cannot_probe(state):
    state.progress = None
    comm: Any = SimpleNamespace(rank=0, nranks=2, _state=state)
    with pytest.raises(ArgumentError, match="probe on rank 0 is for CPU ranks"):
        Communicator.probe(comm)


def test_factors_that_differ_in_the_sign_of_zero_are_two_calls(state, enqueuer):
    x = Tensor(8)
    for factor in (0.0, -0.0, 0.0, complex(1, -0.0), complex(1, 0.0), 1):
        enqueuer.collective("all_reduce", x, None, premul_sum(factor), 0, {})
    assert len(state.prepared) == 5


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("count", 5), ("pointer", 8192), ("dtype", "int32"), ("contiguous", False)],
)
def test_a_tensor_that_changed_in_place_is_prepared_again(state, enqueuer, attribute, value):
    x = Tensor(8)
    enqueuer.collective("all_reduce", x, None, "sum", 0, {})
    setattr(x, attribute, value)
    enqueuer.collective("all_reduce", x, None, "sum", 0, {})
    assert state.prepared == [8, x.count]
    assert state.ran[-1] == x.count


class Stream:
    """As torch's."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


def test_the_stream_of_the_last_call_is_kept_alive_and_no_other(state, enqueuer):
    first, second = Stream(7), Stream(8)
    gone = weakref.ref(first)
    enqueuer.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": first})
    del first
    assert gone() is not None
    enqueuer.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": second})
    assert gone() is None


def test_a_call_that_is_refused_does_not_let_go_of_the_stream_before(state, enqueuer):
    first = Stream(7)
    gone = weakref.ref(first)
    enqueuer.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": first})
    del first
    state.refuses = True
    for handle in (8, 9):
        with pytest.raises(LaunchRefused):
            enqueuer.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": Stream(handle)})
    assert gone() is not None


def test_a_group_that_is_left_by_an_error_does_not_let_go_of_the_stream_before(state, enqueuer):
    first = Stream(7)
    gone = weakref.ref(first)
    enqueuer.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": first})
    del first
    with pytest.raises(KeyError), group():
        for handle in (8, 9):
            enqueuer.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": Stream(handle)})
        raise KeyError
    assert gone() is not None


def test_a_group_keeps_all_its_streams_until_the_next_call(state, enqueuer):
    """Sends and receives come last, wherever they stand in its body."""
    first, second = Stream(7), Stream(8)
    kept = weakref.ref(first), weakref.ref(second)
    state.executor = SimpleNamespace(task=lambda _calls: iter(()))
    state.yield_to_worker = lambda: None
    state.fabric.check = lambda: None
    state.prepare = lambda *_: SimpleNamespace(changes=0, timeout=1.0)
    with group():
        enqueuer.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": first})
        enqueuer.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": second})
    del first, second
    gc.collect()
    state.cuda.stream_order.stream = 7
    assert None not in [ref() for ref in kept]
    with group():
        enqueuer.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": Stream(9)})
        assert [ref() is None for ref in kept] == [False, True]


def test_waiting_orders_the_current_stream_of_the_arrays_library(state, enqueuer, monkeypatch):
    ordered: list[int] = []
    event = SimpleNamespace(order=ordered.append)
    state.cuda.record, state.cuda.failure = lambda _stream: event, lambda: None
    state.cuda.device = state.device
    options = {"stream": Stream(7), "async_op": True}
    work = enqueuer.collective("all_reduce", Tensor(8), None, "sum", 0, options)
    sys.modules["torch"].cuda.current_stream().cuda_stream = 8
    work.wait()
    assert ordered == [8]


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
