"""When kernels are loaded, and which kernel carries a call that cannot wait for that."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from ringcoll.errors import DeadlineError, MachineError
from ringcoll.executors.cuda import loading, stream_order
from ringcoll.executors.cuda.copy_gates import gate_text
from ringcoll.executors.cuda.generic import generic_text
from ringcoll.executors.cuda.loader import Loader as RealLoader
from ringcoll.executors.cuda.loading import GenericLaunch, KernelLoading
from ringcoll.executors.cuda.params import Body, GenericForm
from ringcoll.executors.cuda.stream_order import StreamOrder
from ringcoll.fabric.thread import OURS
from tests.gpu.streams import Call
from tests.gpu.streams import runtime as runtime

BODY = Body("own", ((1, 2, 3),), (0,), 0, 0, generic=GenericForm(0, 0, (4,)))
HUGE = Body("huge", ((0,) * 5000,), (0,), 0, 0, generic=GenericForm(0, 0, (4,)))


class Loader:
    """Kernels by name; what is compiled is told by the test."""

    generic = True

    def __init__(self) -> None:
        self.compiling: dict[str, Future[bytes]] = {}
        self.loaded: list[tuple[str, int]] = []
        self.calls: dict[str, str] = {}
        self.compiler = True

    def has(self, text, ordinal):
        return (text, ordinal) in self.loaded

    def stored(self, _text, _capability):
        return True

    def available(self, _text, _capability):
        return self.compiler

    def compile(self, text, capability, call=""):
        self.done(text, self.compile_ahead(text, capability, call))

    def compile_ahead(self, text, _capability, call=""):
        self.calls.setdefault(text, call)
        found = self.compiling.setdefault(text, Future())
        if text.startswith("#"):  # generic kernels
            self.done(text, found)
        return found

    def compile_next(self, text, capability, call=""):
        return self.compile_ahead(text, capability, call)

    def done(self, text, found=None):
        found = found or self.compiling[text]
        if not found.done():
            found.set_result(b"")

    def rest(self):
        self.resting = True

    def function(self, text, ordinal, _capability):
        assert self.compiling[text].done()
        if not self.has(text, ordinal):
            self.loaded.append((text, ordinal))
        return self.loaded.index((text, ordinal))


class Launch:
    """Remembers its kernel."""

    def __init__(self, body, function):
        self.body, self.function, self.launched = body, function, 0

    def launch(self, _stream, *_addresses):
        self.launched += 1


class Fabric:
    rank, nranks, timeout, threads, nodes = 0, 2, 0.05, False, ()

    def check(self):
        pass


@pytest.fixture
def made(runtime, monkeypatch):
    """Communicators of one device, each with its stream order."""
    monkeypatch.setattr(loading, "_open", type(loading._open)())
    monkeypatch.setattr(loading, "_pending", type(loading._pending)())
    monkeypatch.setattr(stream_order, "_all", type(stream_order._all)())
    monkeypatch.setattr(runtime, "setDevice", lambda _ordinal: None)
    loader: Any = Loader()
    kept: list[KernelLoading] = []

    monkeypatch.setattr(loading, "cores", lambda: 8)

    def make(ordinal=0, alone=True, nranks=2, **how):
        fabric: Any = Fabric()
        vars(fabric).update(how, nranks=nranks)
        order = StreamOrder(ordinal, "rank 0")
        device: Any = SimpleNamespace(ordinal=ordinal, major=9, minor=0)
        found = KernelLoading(loader, device, fabric, order, alone=alone)
        found.open()
        kept.append(found)
        return found, order

    yield SimpleNamespace(make=make, loader=loader, runtime=runtime)
    for each in kept:
        each.order.forget()  # and its events, while their runtime is there


def texts(loader):
    return [text if len(text) < 10 else "generic" for text, _ in loader.loaded]


def test_generic_kernels_are_loaded_once_for_a_number_of_ranks(made):
    made.make()
    assert texts(made.loader) == ["generic"] * 5
    made.make()
    assert len(made.loader.loaded) == 5
    made.make(ordinal=1)
    assert len(made.loader.loaded) == 10
    made.make(ordinal=2, alone=False)  # a launch of several ranks: no generic kernel carries it
    assert len(made.loader.loaded) == 10


def test_a_call_alone_runs_by_its_own_kernel(made):
    kernels, order = made.make()
    order.switch_to(7)
    made.runtime.busy = {7}  # its own communicator's calls have one order on all ranks
    found = kernels.launch(BODY, Launch, 9.0, "all_reduce on rank 0")
    assert found.body is BODY and texts(made.loader)[5:] == ["own"]


def cold(made, **how):
    """A communicator whose first calls wait for no kernel that is not compiled yet."""
    kernels, order = made.make(**how)
    made.loader.stored = lambda text, _capability: text.startswith("#")
    kernels.kernel_wait = 1e-3
    return kernels, order


def test_a_generic_kernel_carries_a_first_call_whose_own_takes_too_long(made):
    kernels, order = cold(made)
    found = kernels.launch(BODY, Launch, 9.0, "all_reduce on rank 0")
    assert isinstance(found, GenericLaunch) and texts(made.loader)[5:] == []
    order.switch_to(7)
    found.launch(7)
    generic: Any = found._launch
    assert (generic.launched, generic.body.words[0][:3]) == (1, (1, 2, 3))
    made.runtime.busy = {7}
    found.launch(7)
    assert generic.launched == 2
    made.loader.done("own")
    found.launch(7)  # it waits for a moment: the calls before may wait for another rank's host
    found.launch(7)  # and not again for a while
    assert generic.launched == 4
    found._next = 0.0
    threading.Timer(0.05, made.runtime.busy.clear).start()
    found.launch(7)  # the device may be busy at every launch
    own: Any = found._launch
    assert (generic.launched, own.body, own.launched) == (4, BODY, 1)
    assert kernels.launch(BODY, Launch, 9.0, "all_reduce on rank 0").body is BODY


def test_a_kernel_that_is_compiled_in_time_carries_its_first_call(made):
    kernels, _ = cold(made)
    kernels.kernel_wait = 20
    timer = threading.Timer(0.05, made.loader.done, ["own"])
    made.loader.compile_ahead("own", (9, 0))
    timer.start()
    assert kernels.launch(BODY, Launch, 9.0, "all_reduce on rank 0").body is BODY
    timer.join()


@pytest.mark.parametrize("first", ["own", "generic"])
def test_where_neither_kernel_is_compiled_the_first_that_is_carries_the_call(made, first):
    kernels, _ = cold(made)
    assert BODY.generic is not None and BODY.generic.lanes == 0
    slow: Future[bytes] = Future()
    text = generic_text(0, 2)
    made.loader.compiling[text] = slow
    made.loader.done = lambda text, found=None: found or made.loader.compiling[text]
    made.loader.compile_ahead("own", (9, 0))
    ends = made.loader.compiling["own"] if first == "own" else slow
    timer = threading.Timer(0.05, ends.set_result, [b""])
    timer.start()
    found = kernels.launch(BODY, Launch, 9.0, "all_reduce on rank 0")
    timer.join()
    assert isinstance(found, GenericLaunch) == (first == "generic")


@pytest.mark.parametrize("how", ["threads", "for ever", "no generic kernel", "damaged"])
def test_a_first_call_waits_for_its_own_kernel(made, how):
    kernels, _ = cold(made, **({"threads": True} if how == "threads" else {}))
    body = BODY
    if how == "for ever":
        kernels.kernel_wait = float("inf")
    elif how == "no generic kernel":
        body = HUGE
    elif how == "damaged":
        broken: Future[bytes] = Future()
        broken.set_exception(MachineError("it does not compile"))
        made.loader.compiling[generic_text(0, 2)] = broken
    assert kernels.launch(body, Launch, 9.0, "all_reduce on rank 0").body is body


def test_a_capture_records_the_own_kernel_of_a_first_call(made):
    kernels, _ = cold(made)
    found = kernels.launch(BODY, Launch, 9.0, "all_reduce on rank 0")
    generic: Any = found._launch
    made.runtime.capture(7)
    threading.Timer(0.05, made.loader.done, ["own"]).start()
    found.launch(7)
    own: Any = found._launch
    assert (generic.launched, own.body, own.launched) == (0, BODY, 1)


def test_where_a_kernel_is_compiled_so_are_those_of_likely_calls(made):
    kernels, _ = made.make()
    found, likely = made.loader.compiling, lambda: ["larger", "largest"]
    kernels.launch(BODY, Launch, 9.0, "all_reduce on rank 0", others=likely)
    assert "larger" not in found, "the own kernel was stored"
    made.loader.stored = lambda text, _capability: text.startswith("#")
    kernels.launch(BODY, Launch, 9.0, "all_reduce on rank 0", others=likely)
    assert "larger" not in found, "the own kernel is loaded"
    body = Body("next", ((1, 2, 3),), (0,), 0, 0)
    kernels.launch(body, Launch, 9.0, "reduce on rank 0", "reduce count=3", likely)
    # One thread compiles in this order.
    assert [text for text in found if text[0] != "#"] == ["own", "next", "larger", "largest"]
    assert not found["largest"].done() and found["next"].done(), "nothing waits for the others"
    assert made.loader.calls["largest"] == "another size than reduce count=3"


@pytest.mark.parametrize(
    ("ranks", "likely"),
    [
        ({"nranks": 2}, True),
        ({"nranks": 3}, False),
        ({"nranks": 8, "threads": True}, True),
        ({"nranks": 5, "nodes": (0, 0, 1, 1, 1)}, True),
        ({"nranks": 5, "nodes": (0, 0, 0, 1, 1)}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("compiler", [True, False])
def test_likely_calls_need_four_cores_for_each_process_and_a_compiler(
    made, ranks, likely, compiler
):
    kernels, _ = made.make(**ranks)
    made.loader.stored = lambda text, _capability: text.startswith("#")
    made.loader.compiler = compiler
    kernels.launch(BODY, Launch, 9.0, "all_reduce on rank 0", others=lambda: ["larger"])
    assert ("larger" in made.loader.compiling) == (likely and compiler)


def test_beside_another_call_the_generic_kernel_runs_until_that_has_ended(made):
    (first, order), (_, other) = made.make(), made.make()
    other.switch_to(8)
    made.runtime.busy = {8}
    found = first.launch(BODY, Launch, 9.0, "all_reduce on rank 0")
    assert isinstance(found, GenericLaunch)
    found.launch(7)
    generic: Any = found._launch
    assert (generic.launched, generic.body.programs) == (1, (0,))
    assert generic.body.words[0][:3] == (1, 2, 3) and generic.body.words[0][-1] == 4
    made.runtime.busy = set()
    found.launch(7)  # idle, but its own kernel is not compiled yet
    assert (generic.launched, texts(made.loader)[5:]) == (2, [])
    made.loader.done("own")
    made.runtime.busy = {8}
    found.launch(7)
    assert generic.launched == 3
    made.runtime.busy = set()
    made.runtime.capture(7)
    found.launch(7)  # a capture keeps what it records
    assert generic.launched == 4
    made.runtime.captured.clear()
    order.switch_to(9)
    made.runtime.busy = {9}  # of its own communicator: one thread may launch for all ranks
    found.launch(7)
    assert generic.launched == 5
    made.runtime.busy = set()
    found.launch(7)
    own: Any = found._launch
    assert (generic.launched, own.body, own.launched) == (5, BODY, 1)
    assert texts(made.loader)[5:] == ["own"]
    made.runtime.busy = {8}
    assert not isinstance(first.launch(BODY, Launch, 9.0, "all_reduce on rank 0"), GenericLaunch)


def test_all_kernels_that_wait_are_loaded_when_nothing_runs(made):
    (first, _), (second, _), (_, other) = made.make(), made.make(), made.make()
    other.switch_to(8)
    made.runtime.busy = {8}
    one = first.launch(BODY, Launch, 9.0, "all_reduce on rank 0")
    two = second.launch(
        Body("two", *(BODY.words, BODY.programs, 0, 0), generic=BODY.generic), Launch, 9.0, "reduce"
    )
    for text in ("own", "two"):
        made.loader.done(text)
    made.runtime.busy = set()
    one.launch(7)
    assert sorted(texts(made.loader)[5:]) == ["own", "two"]
    made.runtime.busy = {7, 8}
    two.launch(9)
    assert two._launch.body.text == "two"


def test_without_a_compiler_the_generic_kernel_stays(made, caplog):
    first, _ = made.make()
    made.loader.compiler = False
    loading._warn_without_compiler.cache_clear()
    for _ in range(2):
        found = first.launch(BODY, Launch, 9.0, "all_reduce on rank 0", "all_reduce of 4")
        for _ in range(3):
            found.launch(7)
        assert isinstance(found, GenericLaunch)
        generic: Any = found._launch
        assert generic.launched == 3
    assert made.loader.calls["own"] == "all_reduce of 4"
    assert texts(made.loader)[5:] == []
    assert caplog.text.count("NVRTC is missing here") == 1
    made.loader.compiler = True
    assert first.launch(BODY, Launch, 9.0, "all_reduce on rank 0").body is BODY


def damage(made, monkeypatch, text):
    """Let the package have a damaged kernel, on a machine without NVRTC."""
    compile_ahead = made.loader.compile_ahead

    def failing(asked, capability, call=""):
        if asked != text:
            return compile_ahead(asked, capability, call)
        found: Future[bytes] = Future()
        found.set_exception(MachineError("there is no NVRTC"))
        made.loader.compiler = False
        return found

    def compiled(asked, capability, call=""):
        failing(asked, capability, call).result()

    monkeypatch.setattr(made.loader, "compile_ahead", failing)
    monkeypatch.setattr(made.loader, "compile", compiled)


def test_a_damaged_kernel_without_a_compiler_leaves_the_call_to_the_generic(made, monkeypatch):
    kernels, _ = made.make()
    damage(made, monkeypatch, "own")
    assert made.loader.available("own", (9, 0))
    found = kernels.launch(BODY, Launch, 9.0, "all_reduce on rank 0")
    assert isinstance(found, GenericLaunch)
    found.launch(7)
    assert "own" not in texts(made.loader)


def test_an_error_of_the_compiler_is_raised(made, monkeypatch):
    kernels, _ = made.make()
    damage(made, monkeypatch, "own")
    monkeypatch.setattr(made.loader, "available", lambda *_: True)
    with pytest.raises(MachineError, match="NVRTC"):
        kernels.launch(BODY, Launch, 9.0, "all_reduce on rank 0")


def test_a_lone_communicator_is_made_without_a_damaged_generic_kernel(made, monkeypatch):
    damage(made, monkeypatch, gate_text(2))
    made.make()
    assert texts(made.loader) == ["generic"] * 4


def test_a_compilation_names_the_call_that_needs_it(made):
    (first, _), (_, other) = made.make(), made.make()
    assert set(made.loader.calls.values()) == {"init of a communicator of 2 ranks"}
    other.switch_to(8)
    made.runtime.busy = {8}
    first.launch(BODY, Launch, 9.0, "all_reduce on rank 0", "all_reduce of 4 float32")
    made.runtime.busy = set()
    assert first.launch(HUGE, Launch, 9.0, "reduce on rank 0", "reduce of 9").body is HUGE
    first.function("pairs", 9.0, "send and recv on rank 0")
    calls = made.loader.calls
    assert calls["own"] == "all_reduce of 4 float32" and calls["huge"] == "reduce of 9"
    assert calls["pairs"] == "send and recv on rank 0"
    together, _ = made.make(ordinal=2, alone=False)
    shared = Body("shared", BODY.words, BODY.programs, 0, 0)
    assert together.launch(shared, Launch, 9.0, "reduce on rank 0", "reduce of 2").body is shared
    assert calls["shared"] == "reduce of 2"


def test_calls_of_another_device_do_not_count(made):
    (first, _), (_, other) = made.make(), made.make(ordinal=1)
    other.switch_to(8)
    made.runtime.busy = {8}
    assert first.launch(BODY, Launch, 9.0, "all_reduce on rank 0").body is BODY


def test_what_no_generic_kernel_carries_waits_with_a_deadline(made):
    (first, _), (_, other) = made.make(), made.make()
    other.switch_to(8)
    made.runtime.busy = {8}
    with pytest.raises(
        DeadlineError, match=r"reduce on rank 0: waited 0.05 s to load .* no generic"
    ):
        first.launch(HUGE, Launch, 0.05, "reduce on rank 0")
    with pytest.raises(DeadlineError, match="send and recv on rank 0"):
        first.function("pairs", 0.05, "send and recv on rank 0")
    made.runtime.busy = set()
    assert first.launch(HUGE, Launch, 0.05, "reduce on rank 0").body is HUGE


def test_a_captured_call_counts_while_its_stream_is_busy(made):
    (first, _), (_, other) = made.make(), made.make()
    made.runtime.capture(8)
    other.switch_to(8)
    other.release(Call(8, owned=True))
    assert isinstance(first.launch(BODY, Launch, 9.0, "all_reduce on rank 0"), GenericLaunch)
    made.runtime.captured.clear()
    assert first.launch(BODY, Launch, 9.0, "all_reduce on rank 0").body is BODY


def test_a_thread_makes_a_call_while_a_kernel_is_compiled(made, monkeypatch):
    (first, _), (_, other) = made.make(), made.make()
    compile_ = made.loader.compile

    def compiled(text, capability, call):
        compile_(text, capability, call)
        other.switch_to(8)
        made.runtime.busy = {8}

    monkeypatch.setattr(made.loader, "compile", compiled)
    found = first.launch(BODY, Launch, 9.0, "all_reduce on rank 0")
    assert isinstance(found, GenericLaunch) and texts(made.loader)[5:] == []


def test_without_generic_kernels_no_second_communicator_is_made(made, monkeypatch):
    monkeypatch.setattr(made.loader, "stored", lambda *_: False)  # a cold cache
    first, order = made.make()
    assert made.loader.loaded == []
    order.switch_to(8)
    made.runtime.busy = {8}
    with pytest.raises(DeadlineError, match=r"init of a communicator .* make it before"):
        made.make()
    made.runtime.busy = set()
    made.make()
    assert texts(made.loader) == ["generic"] * 5
    first.close()
    failed: Future[bytes] = Future()
    failed.set_exception(MachineError("NVRTC"))
    monkeypatch.setattr(made.loader, "compile_ahead", lambda *_: failed)
    with pytest.raises(MachineError, match="NVRTC"):
        made.make(ordinal=0, nranks=3)


def test_compilers_threads_are_the_librarys_and_rest_behind_the_last_communicator(made):
    began, done = threading.Event(), threading.Event()

    def get(*_):
        began.set()
        return done.wait(20) and threading.current_thread().name

    cache: Any = SimpleNamespace(get=get)
    loader = RealLoader(cache)
    first = [loader.compile_ahead(str(number), (9, 0)) for number in range(50)]
    assert began.wait(20)
    loader.rest()
    done.set()
    assert str(first[0].result()).startswith(OURS) and first[-1].cancelled()
    again = loader.compile_ahead("49", (9, 0))
    assert again.result() and again is loader.compile_ahead("49", (9, 0))
    loader.rest()
    (one, _), (two, _) = made.make(), made.make()
    one.close()
    assert not hasattr(made.loader, "resting")
    two.close()
    assert made.loader.resting
