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
from ringcoll.cuda import readers
from ringcoll.dtypes import premul_sum

pytest.importorskip("cupy")

from ringcoll import ANY, Communicator
from ringcoll.arguments.calls import prepare_recv
from ringcoll.arguments.vector import prepare_all_gather_v
from ringcoll.communicator.cuda.engine import CudaEngine
from ringcoll.communicator.group import group
from ringcoll.errors import ArgumentError, ArgumentTypeError, LaunchRefused
from ringcoll.executors.contract import LaunchRequest
from ringcoll.views import device_view

STRIDED = object()


class Tensor:
    """As torch's: some of it changes in place."""

    layout = STRIDED

    def __init__(self, count: int, pointer: int = 4096) -> None:
        self.count, self.pointer, self.dtype, self.contiguous = count, pointer, "float32", True

    def data_ptr(self) -> int:
        return self.pointer

    def numel(self) -> int:
        return self.count

    def get_device(self) -> int:
        return 0

    def is_contiguous(self) -> bool:
        return self.contiguous

    def is_neg(self) -> bool:
        return False

    is_conj = is_neg


class State:
    """Counts what is prepared and what is run; ``reached`` are the pointers that peers reach."""

    on_gpu, launches_on = True, None

    def __init__(self) -> None:
        self.prepared: list[int] = []
        self.ran: list[int] = []
        self.at: list[tuple[int, int]] = []
        self.reached: set[int] = set()
        self.any_class = False
        self.lock = threading.RLock()
        self.fabric, self.device = SimpleNamespace(rank=0), SimpleNamespace(ordinal=0)
        self.config = Config()
        self.cuda = SimpleNamespace(stream_order=SimpleNamespace(stream=None))
        self.refuses = False

    def memory_class(self, _call, _config, input_, output):
        given = input_[0], output[0], 0, 0
        return (input_[0] in self.reached, output[0] in self.reached), given, None

    def prepare(self, call, _config):
        self.prepared.append(call.count)
        return SimpleNamespace(any_class=self.any_class, count=call.count, timeout=1.0)

    def usable(self):
        pass

    def abort(self, _reason):
        pass

    def run(self, prepared, stream=None, addresses=None):
        if self.refuses:
            raise LaunchRefused("no")
        if isinstance(prepared, LaunchRequest):
            prepared, stream, addresses = prepared.prepared, prepared.stream, prepared.addresses
        self.ran.append(prepared.count)
        self.at.append(addresses[:2])
        self.cuda.stream_order.stream = stream


@pytest.fixture
def state() -> State:
    return State()


@pytest.fixture
def engine(state, monkeypatch) -> CudaEngine:
    stream = SimpleNamespace(cuda_stream=0, stream_id=7)
    torch = SimpleNamespace(
        Tensor=Tensor,
        nn=SimpleNamespace(Parameter=None),
        strided=STRIDED,
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda _ordinal: stream.cuda_stream),
        cuda=SimpleNamespace(current_stream=lambda _ordinal=None: stream),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(readers, "NO_MEMORY", 1)  # these tensors lie low
    made = CudaEngine(state, 2)

    def view(buffer, *_):
        if buffer is None:
            return None
        if not buffer.contiguous:
            raise ArgumentError("strided")
        return device_view(buffer.pointer, 4 * buffer.count, buffer.dtype)

    monkeypatch.setattr(made, "_view", view)
    return made


def test_a_tensor_that_stays_as_it_is_is_prepared_once(state, engine):
    x = Tensor(8)
    for _ in range(3):
        engine.collective("all_reduce", x, None, "sum", 0, {})
    assert (state.prepared, state.ran) == ([8], [8, 8, 8])


def test_tensors_of_one_shape_are_prepared_once_and_each_launch_has_its_address(state, engine):
    places = [4096, 8192, 4096, 12288]
    for pointer in places:
        engine.collective("all_reduce", Tensor(8, pointer), None, "sum", 0, {})
    assert (state.prepared, state.at) == ([8], [(at, at) for at in places])


def test_memory_of_another_class_is_another_preparation(state, engine):
    """What peers reach is looked up at each call: the same address may be reached no more."""
    x = Tensor(8)
    for reached in (set(), {4096}, set(), {4096}, {8192}):
        state.reached = reached
        engine.collective("all_reduce", x, None, "sum", 0, {})
    assert state.prepared == [8, 8]


def test_memory_of_any_class_shares_a_preparation_that_allows_it(state, engine):
    state.any_class = True
    for reached in (set(), {4096}, {8192}):
        state.reached = reached
        engine.collective("all_reduce", Tensor(8), None, "sum", 0, {})
    assert state.prepared == [8]


@pytest.mark.parametrize("place", [4096 + 4, 4096 + 2])
def test_memory_of_another_alignment_is_another_preparation(state, engine, place):
    for pointer in (4096, place, 4096 + 64, place + 64):
        engine.collective("all_reduce", Tensor(8, pointer), None, "sum", 0, {})
    assert state.prepared == [8, 8]


def test_two_buffers_that_come_to_overlap_are_checked_again(state, engine):
    x, y = Tensor(8, 4096), Tensor(8, 4096 + 32)
    engine.collective("all_reduce", x, y, "sum", 0, {})
    for pointer in (4096 + 24, 4096 - 24):
        with pytest.raises(ArgumentError, match="overlaps"):
            engine.collective("all_reduce", x, Tensor(8, pointer), "sum", 0, {})
    for _ in range(2):
        engine.collective("all_reduce", x, Tensor(8, 4096), "sum", 0, {})
    engine.collective("all_reduce", x, Tensor(8, 4096 - 32), "sum", 0, {})
    assert len(state.prepared) == 2
    assert state.at == [(4096, 4128), (4096, 4096), (4096, 4096), (4096, 4064)]


def test_a_slot_of_the_larger_buffer_is_found_wherever_both_lie(state, engine):
    """all_gather in place, by None and by the slot itself; rank 0 of 2."""
    for at in (4096, 8192):
        engine.collective("all_gather", None, Tensor(8, at), None, 0, {})
        engine.collective("all_gather", Tensor(4, at), Tensor(8, at), None, 0, {})
    assert state.at == [(4096, 4096)] * 2 + [(8192, 8192)] * 2
    assert state.prepared == [4, 4]
    with pytest.raises(ArgumentError, match="exactly slot 0"):
        engine.collective("all_gather", Tensor(4, 4112), Tensor(8, 4096), None, 0, {})


@pytest.mark.parametrize(("source", "exact"), [(ANY, None), (ANY, True), (1, False)])
def test_a_receive_that_only_a_host_could_match_is_refused(engine, source, exact):
    call = prepare_recv(np.zeros(3), source, exact, rank=0, nranks=2)
    with pytest.raises(ArgumentError, match="source=ANY and exact=False are for CPU ranks"):
        engine.pairs("recv", [call], {}, ())


def test_a_rank_whose_host_sees_no_messages_cannot_probe(state):
    state.progress = None
    comm: Any = SimpleNamespace(rank=0, nranks=2, _state=state)
    with pytest.raises(ArgumentError, match="probe on rank 0 is for CPU ranks"):
        Communicator.probe(comm)


def test_factors_that_differ_in_the_sign_of_zero_are_two_calls(state, engine):
    x = Tensor(8)
    for factor in (0.0, -0.0, 0.0, complex(1, -0.0), complex(1, 0.0), 1):
        engine.collective("all_reduce", x, None, premul_sum(factor), 0, {})
    assert len(state.prepared) == 5


@pytest.mark.parametrize(("attribute", "value"), [("count", 5), ("dtype", "int32")])
def test_a_tensor_that_changed_in_place_is_prepared_again(state, engine, attribute, value):
    x = Tensor(8)
    engine.collective("all_reduce", x, None, "sum", 0, {})
    setattr(x, attribute, value)
    engine.collective("all_reduce", x, None, "sum", 0, {})
    assert state.prepared == [8, x.count]
    assert state.ran[-1] == x.count


def test_a_tensor_that_is_contiguous_no_more_is_refused(state, engine):
    x = Tensor(8)
    engine.collective("all_reduce", x, None, "sum", 0, {})
    x.contiguous = False
    with pytest.raises(ArgumentError, match="strided"):
        engine.collective("all_reduce", x, None, "sum", 0, {})


def test_arguments_that_are_equal_but_of_another_type_are_checked_again(state, engine):
    check = prepare_all_gather_v

    def call(counts):
        x, y = Tensor(1), Tensor(3, 8192)
        engine.counted("all_gather_v", check, x, y, (counts, None), {})

    call([1, 2])
    call((1, 2))
    assert len(state.prepared) == 1
    with pytest.raises(ArgumentTypeError, match="pass 2 host integers"):
        call([1.0, 2.0])
    with pytest.raises(ArgumentError, match="add up to 4"):
        call([1, 3])
    call(np.array([1, 2]))
    assert len(state.prepared) == 2, "an array is compared with nothing"


class Stream:
    """As torch's."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


def test_the_stream_of_the_last_call_is_kept_alive_and_no_other(state, engine):
    first, second = Stream(7), Stream(8)
    gone = weakref.ref(first)
    engine.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": first})
    del first
    assert gone() is not None
    engine.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": second})
    assert gone() is None


def test_a_call_that_is_refused_does_not_let_go_of_the_stream_before(state, engine):
    first = Stream(7)
    gone = weakref.ref(first)
    engine.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": first})
    del first
    state.refuses = True
    for handle in (8, 9):
        with pytest.raises(LaunchRefused):
            engine.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": Stream(handle)})
    assert gone() is not None


def test_a_stream_is_kept_under_the_handle_that_it_has_now(state, engine):
    """By its handle a call that is refused finds the stream of the one before."""
    first = Stream(7)
    gone = weakref.ref(first)
    engine.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": first})
    first.cuda_stream = 8
    engine.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": first})
    del first
    state.refuses = True
    with pytest.raises(LaunchRefused):
        engine.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": Stream(9)})
    assert gone() is not None


def test_a_group_that_is_left_by_an_error_does_not_let_go_of_the_stream_before(state, engine):
    first = Stream(7)
    gone = weakref.ref(first)
    engine.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": first})
    del first
    with pytest.raises(KeyError), group():
        for handle in (8, 9):
            engine.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": Stream(handle)})
        raise KeyError
    assert gone() is not None


def test_a_group_keeps_all_its_streams_until_the_next_call(state, engine):
    """Sends and receives come last, wherever they stand in its body."""
    first, second = Stream(7), Stream(8)
    kept = weakref.ref(first), weakref.ref(second)
    state.executor = SimpleNamespace(task=lambda _calls: iter(()))
    state.yield_to_worker = lambda: None
    state.fabric.check = lambda: None
    with group():
        engine.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": first})
        engine.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": second})
    del first, second
    gc.collect()
    state.cuda.stream_order.stream = 7
    assert None not in [ref() for ref in kept]
    with group():
        engine.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": Stream(9)})
        assert [ref() is None for ref in kept] == [False, True]


def test_a_call_on_a_stream_of_the_group_before_lets_go_of_the_others(state, engine):
    first, second = Stream(7), Stream(8)
    gone = weakref.ref(first)
    state.executor = SimpleNamespace(task=lambda _calls: iter(()))
    state.yield_to_worker = lambda: None
    state.fabric.check = lambda: None
    engine.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": second})
    with group():
        engine.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": first})
        engine.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": second})
    del first
    gc.collect()
    assert gone() is not None
    engine.collective("all_reduce", Tensor(8), None, "sum", 0, {"stream": second})
    gc.collect()
    assert gone() is None


def test_waiting_orders_the_current_stream_of_the_arrays_library(state, engine, monkeypatch):
    ordered: list[int] = []
    state.cuda.events = SimpleNamespace(
        record=lambda stream: stream, order=lambda _event, stream: ordered.append(stream), unused=[]
    )
    state.cuda.failure = lambda: None
    state.cuda.device = state.device
    options = {"stream": Stream(7), "async_op": True}
    work = engine.collective("all_reduce", Tensor(8), None, "sum", 0, options)
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
