"""What CUDA tensors get, with streams that only note what they are told.

The tensors lie on the CPU and the communicator is one of CPU ranks; everything between torch and
the launch is the real thing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringcoll.errors import ArgumentError, ArgumentTypeError, RankLostError
from ringcoll.executors.contract import LaunchRequest
from ringcoll.torch import device as module
from ringcoll.torch import hooks
from ringcoll.torch.device import Device
from ringcoll.torch.group import ProcessGroupRingcoll
from ringcoll.torch.tracing import profiler


class Stream:
    """Of a GPU that there is not."""

    def __init__(self, name, number=3):
        self.name, self.stream_id = name, number


class AsyncStream:
    """Stands for the group's own stream."""

    def __init__(self, noted):
        self._noted, self.stream, self.handle = noted, Stream("side"), "side"
        self.id = 3, 0, 1

    def is_here(self):
        return True

    def device_guard(self):
        return contextlib.nullcontext()

    def wait_stream(self, stream):
        self._noted.append(f"side waits for {stream}")

    def record_event(self):
        self._noted.append("event on side")
        return "event of side"

    def block(self, event, stream):
        self._noted.append(f"{stream} waits for {event}")

    def query(self, event):
        return event == "event of side"


class State:
    """A rank's state whose calls take a stream."""

    def __init__(self, state, noted):
        self._state, self._noted = state, noted
        self.cuda = mock.Mock()
        self.cuda.failure = lambda: None

    def __getattr__(self, name):
        return getattr(self._state, name)

    def run(self, ready, stream=None, addresses=None):
        if isinstance(ready, LaunchRequest):
            lasts = "" if ready.owned else ", which may go"
            ready, stream, addresses = ready.prepared, f"{ready.stream}{lasts}", ready.addresses
        self._noted.append(f"{ready.call.collective} on {stream}")
        self._state.run(ready, None, addresses)


class Fake:
    """A group whose tensors are as if on a GPU."""

    def __init__(self):
        self.noted: list[str] = []
        self.kept: list[str] = []
        self.group = dist.new_group()
        assert isinstance(self.group, ProcessGroupRingcoll)
        self.async_stream = AsyncStream(self.noted)
        self.now = [Stream("main", 0)]

    @contextlib.contextmanager
    def on(self, stream):
        self.now.append(stream)
        yield
        self.now.pop()

    @contextlib.contextmanager
    def device(self):
        cuda = {
            "stream": self.on,
            "device": lambda where: contextlib.nullcontext(),
            "current_stream": lambda where: self.now[-1],
        }
        patches: list = [mock.patch.object(torch.cuda, name, fake) for name, fake in cuda.items()]
        raw = mock.patch.object(
            torch._C,
            "_cuda_getCurrentRawStream",
            lambda ordinal: self.now[-1].name,
            create=True,
        )
        keep = mock.patch.object(
            torch.Tensor, "record_stream", lambda _, stream: self.kept.append(stream.name)
        )
        side = mock.patch.object(module, "AsyncStream", lambda where: self.async_stream)
        with contextlib.ExitStack() as held:
            for patch in (*patches, raw, keep, side):
                held.enter_context(patch)
            comm = self.group._open("fake", "cpu", range(self.group._nranks), "fake")
            device = Device(comm, 0, self.group._failed)
            device.ordinal = -1  # what a CPU tensor says of its device
            state = State(comm._state, self.noted)
            device._state = device._calls._calls._state = state
            self.group._engine = lambda tensor, name: device
            yield device
            device.close()
        dist.destroy_process_group(self.group)


def blocking_calls_go_to_the_current_stream(rank, n):
    fake = Fake()
    with fake.device():
        x = torch.full((3,), float(rank))
        dist.all_reduce(x, group=fake.group)
        with fake.on(Stream("other")):
            dist.all_reduce(x[::2], group=fake.group)
    assert x.tolist() == [6 * n, 6, 6 * n]
    assert fake.noted == ["all_reduce on main", "all_reduce on other"]


def a_stream_that_torch_does_not_own_may_be_gone_later(rank, n):
    """torch's number of such a stream is its handle; its own streams are never destroyed."""
    fake = Fake()
    with fake.device():
        x = torch.ones(2)
        for _ in range(2):
            with fake.on(Stream("foreign", "foreign")):
                dist.all_reduce(x, group=fake.group)
                dist.broadcast(x, 0, group=fake.group)
            with fake.on(Stream("own")):
                dist.all_reduce(x, group=fake.group)
    once = ["all_reduce on foreign, which may go", "broadcast on foreign, which may go"]
    assert fake.noted == 2 * [*once, "all_reduce on own"]


def asynchronous_calls_go_to_a_stream_of_their_own(rank, n):
    fake = Fake()
    with fake.device():
        y = torch.full((3,), float(rank))
        done = dist.all_reduce(y, group=fake.group, async_op=True)
        assert fake.noted == ["side waits for main", "all_reduce on side", "event on side"]
        done.wait()
        assert y.tolist() == [n * (n - 1) / 2] * 3
        fake.noted.clear()
        x = torch.full((3,), float(rank))
        parts = [torch.zeros(3) for _ in range(n)]
        work = dist.all_gather(parts, x, group=fake.group, async_op=True)
        assert fake.noted == ["side waits for main", "all_gather on side", "event on side"]
        fake.noted.clear()
        assert work.wait()
        assert work.is_completed()
        assert work.exception() is None
    assert fake.noted == ["main waits for event of side"]
    assert [part[0].item() for part in parts] == [0, 1, 2, 3]


def tensors_are_kept_for_the_side_stream_unless_the_caller_has_waited(rank, n):
    """torch's allocator may give memory away once it is freed, behind the caller's stream alone."""
    fake = Fake()
    with fake.device():
        x = torch.ones(3)
        work = dist.all_reduce(x, group=fake.group, async_op=True)
        assert work.wait() and work.wait()
        del work
        assert fake.kept == []
        dist.all_reduce(x, group=fake.group, async_op=True)
        assert fake.kept == ["side"]
        work = dist.all_reduce(x, group=fake.group, async_op=True)
        with fake.on(Stream("other")):
            work.wait()
        del work
        assert fake.kept == ["side", "side"]
        interrupt = mock.patch.object(
            fake.async_stream, "record_event", side_effect=KeyboardInterrupt
        )
        with interrupt, pytest.raises(KeyboardInterrupt):  # behind the launch
            dist.all_reduce(x, group=fake.group, async_op=True)
        assert fake.kept == ["side", "side", "side"]


def _told(tensor):
    """What the bridge tells of a tensor."""
    return tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor.get_device()


def the_bridge_starts_sums_on_the_side_stream(rank, n):
    fake = Fake()
    with fake.device() as device:
        group, x = fake.group, torch.full((3,), float(rank))
        assert group.start_sum(*_told(x)) is None  # no GPU is open
        group._device = device
        assert group.start_sum(*_told(x)) is None and fake.noted == []  # nothing is kept yet
        dist.all_reduce(x, group=group, async_op=True)
        for times in range(1, 3):
            fake.noted.clear()
            assert group.start_sum(*_told(x)) == fake.async_stream.id
            assert fake.noted == ["side waits for main", "all_reduce on side"]
            assert x.tolist() == [n**times * n * (n - 1) / 2] * 3
        group.check_started()
        device._state.cuda.failure = lambda: RankLostError("rank 7 has left")
        with pytest.raises(dist.DistBackendError, match="rank 7 has left"):
            group.check_started()
        group._device = None


def the_bridge_leaves_other_sums_to_the_method(rank, n):
    """Before anything is ordered: what was posted must not wait for the caller's stream."""
    fake = Fake()
    with fake.device() as device:
        group, x = fake.group, torch.full((3,), float(rank))
        group._device = device
        dist.all_reduce(x, group=group, async_op=True).wait()
        fake.noted.clear()
        cases: tuple = (
            (device.batch, "posts", ["one"]),
            (group, "_failure", RankLostError("rank 7 has left")),
            (group, "_pairs", {}),
            (profiler, "_is_profiler_enabled", True),
            (fake.async_stream, "is_here", lambda: False),
        )
        for where, name, value in cases:
            with mock.patch.object(where, name, value):
                assert group.start_sum(*_told(x)) is None, name
        for other in (x.as_subclass(Elsewhere), x[:2], x.to(torch.int32)):
            assert group.start_sum(*_told(other)) is None
        assert (fake.noted, fake.kept) == ([], [])
        interrupt = mock.patch.object(device._state, "run", side_effect=KeyboardInterrupt)
        with interrupt, pytest.raises(KeyboardInterrupt):
            group.start_sum(*_told(x))
        group.keep_started(x)
        assert fake.kept == ["side"]
        lost = mock.patch.object(device._state, "run", side_effect=RankLostError("7 has left"))
        with lost, pytest.raises(dist.DistBackendError, match="7 has left"):
            group.start_sum(*_told(x))
        assert group._failure is not None and group.start_sum(*_told(x)) is None
        group._device = None


def a_kept_call_looks_at_every_tensor_anew(rank, n):
    """Of one size and type, at one address: strided, negated, conjugated, freed, sparse."""
    fake = Fake()
    with fake.device() as device:
        x = torch.full((4, 4), float(rank))
        for _ in range(2):
            dist.all_reduce(x, group=fake.group)
        assert x[0, 0].item() == 6 * n
        assert device.find_kept("all_reduce", x, "sum", 0) is not None
        for other in (x.t(), torch._neg_view(x), x.to_sparse()):
            assert device.find_kept("all_reduce", other, "sum", 0) is None
        y = torch._neg_view(torch.full((4, 4), float(rank)))
        dist.all_reduce(y, group=fake.group)
        assert y[0, 0].item() == -6
        with pytest.raises(ArgumentTypeError, match="sparse"):
            dist.all_reduce(x.to_sparse(), group=fake.group)
        z = torch.full((2,), 1j * rank)
        for _ in range(2):
            fake.group.allreduce(z).wait()
        assert device.find_kept("all_reduce", z, "sum", 0) is not None
        assert device.find_kept("all_reduce", z.conj(), "sum", 0) is None
        x.untyped_storage().resize_(8)
        with pytest.raises(ArgumentError, match="resized to 8"):
            dist.all_reduce(x, group=fake.group)


class Elsewhere(torch.Tensor):  # type: ignore[misc]
    """As if on another GPU than the rank's."""

    is_cuda, is_cpu = property(lambda _: True), property(lambda _: False)

    def get_device(self):
        return 5


def a_kept_call_refuses_a_tensor_of_another_gpu(rank, n):
    """Of the size and type of the kept one: its kernel cannot reach that memory."""
    fake = Fake()
    with fake.device() as device:
        fake.group._device = device
        del fake.group._engine
        x, options = torch.ones(4), dist.AllreduceOptions()
        for async_op in (False, True):
            options.asyncOp = async_op
            fake.group._in_place("all_reduce", [x], "sum", 0, options)
        assert device.find_kept("all_reduce", x, "sum", 0) is not None
        for async_op in (False, True):
            options.asyncOp = async_op
            with pytest.raises(ArgumentError, match="this rank of the group is on"):
                fake.group._in_place("all_reduce", [x.as_subclass(Elsewhere)], "sum", 0, options)
        fake.group._device = None


def errors_of_kept_calls_are_those_of_the_group(rank, n):
    """What peers reach of the memory is looked up with the call, as a first call does."""
    fake = Fake()
    with fake.device() as device:
        x = torch.ones(4)
        for _ in range(2):
            dist.all_reduce(x, group=fake.group)
        for checked in device._calls._calls._checked.values():
            checked.any_class = None
        lost = RankLostError("rank 7 has left")
        with (
            mock.patch.object(device._state._state, "memory_class", side_effect=lost),
            pytest.raises(dist.DistBackendError, match="rank 7 has left"),
        ):
            dist.all_reduce(x, group=fake.group)
        assert isinstance(fake.group._failure, RankLostError)


def blocking_calls_return_a_work_with_a_future(rank, n):
    """None in its place is a Work without an object to callers in C++, and crashes them."""
    fake = Fake()
    with fake.device():
        x, options = torch.ones(1), dist.AllreduceOptions()
        options.asyncOp = False
        works = [fake.group.allreduce([x], options) for _ in range(2)]  # the second one is kept
        for work in works:
            assert work.wait() and work.result()[0] is x
            assert work.get_future().wait()[0].data_ptr() == x.data_ptr()
        assert dist.ProcessGroup.allreduce(fake.group, [x], options).wait()
        assert dist.all_reduce(x, group=fake.group) is None
        assert fake.group.allreduce([x]).wait()
    assert x.item() == n**5


def every_collective_finds_its_stream(rank, n):
    fake = Fake()
    with fake.device():
        x = torch.full((n,), float(rank))
        for later in (False, True):
            how = {"group": fake.group, "async_op": later}
            works = [
                dist.broadcast(x, 1, **how),
                dist.reduce(x, 0, **how),
                dist.all_to_all_single(torch.zeros(n), x, **how),
                dist.reduce_scatter(torch.zeros(1), list(x.split(1)), **how),
            ]
            assert all((work is not None) == later for work in works)
            wanted = ["broadcast", "reduce", "all_to_all", "reduce_scatter"]
            calls = [line for line in fake.noted if " on " in line and "event" not in line]
            assert calls == [f"{name} on {'side' if later else 'main'}" for name in wanted]
            fake.noted.clear()


def all_to_all_v_gets_the_tensors_themselves(rank, n):
    """On the stream that is current then; copies of strided ones."""
    fake = Fake()
    with fake.device() as device:
        made: list = []

        def noted(send, sent, recv, received, **how):
            made.append((send, sent, recv, received, how, fake.now[-1].name))

        with mock.patch.object(device.comm, "all_to_all_v", noted):
            x, y, splits = torch.ones(n, 2), torch.zeros(n, 2), [1] * n
            for later in (False, True):
                how = {"group": fake.group, "async_op": later}
                dist.all_to_all_single(y, x, splits, splits, **how)
                send, sent, recv, received, options, stream = made.pop()
                assert send is x and recv is y
                assert (sent, received, options) == ([2] * n, [2] * n, {})
                assert stream == ("side" if later else "main")
            strided = torch.ones(2, n).T
            dist.all_to_all_single(y, strided, splits, splits, group=fake.group)
            assert made.pop()[0].is_contiguous()


def a_call_runs_on_its_own_device(rank, n):
    """Whichever is the thread's."""
    fake, here = Fake(), list[bool]()

    @contextlib.contextmanager
    def guard():
        here.append(True)
        yield
        here.append(False)

    with fake.device() as device:
        with (
            mock.patch.object(fake.async_stream, "device_guard", guard),
            mock.patch.object(device.comm, "all_to_all_v", lambda *_: here.append(here == [True])),
        ):
            splits = [1] * n
            dist.all_to_all_single(torch.zeros(n), torch.ones(n), splits, splits, group=fake.group)
        assert here == [True, True, False]


def messages_wait_for_somebody_who_waits(rank, n):
    fake = Fake()
    with fake.device() as device:
        sent = list[tuple[object, ...]]()

        def send(array, peer, stream):
            sent.append(("send", peer, stream.name, array.size))

        def both(sending, to, receiving, source, stream):
            sent.append((to, sending.numel(), source, receiving.numel(), stream.name))

        with (
            mock.patch.object(device.comm, "send", send),
            mock.patch.object(device.comm, "sendrecv", both),
        ):
            first = device.batch.post("recv", torch.zeros(3), 1)
            second = device.batch.post("send", torch.zeros(4), 2)
            assert sent == []
            second.wait()
            assert sent == [(2, 4, 1, 3, "side")]
            first.wait()
            assert len(sent) == 1
            device.batch.post("send", torch.zeros(5), 3)
            x = torch.ones(1)
            dist.all_reduce(x, group=fake.group)
            assert sent[1:] == [("send", 3, "side", 5)], "a call launches what was posted before"


def a_hook_launches_what_was_posted(rank, n):
    """Its call would come before a message that somebody may wait for first."""
    fake = Fake()
    with fake.device() as device:
        bucket = mock.Mock(buffer=lambda: torch.ones(3))
        with mock.patch.object(device.batch, "flush") as flush:
            comm, _ = hooks._checked(fake.group, bucket, "hooks.all_reduce")
        assert comm is device.comm
        flush.assert_called_once_with()


def two_threads_may_wait_for_parts_of_one_batch(rank, n):
    fake = Fake()
    with fake.device() as device:
        begun, failed = threading.Event(), []

        def slow(array, peer, stream):
            begun.set()
            time.sleep(0.05)

        def wait(work):
            try:
                work.wait()
            except BaseException as error:
                failed.append(error)

        with (
            mock.patch.object(device.comm, "send", slow),
            mock.patch.object(module, "from_pointer", lambda *_: mock.Mock()),
        ):
            works = [device.batch.post("send", torch.zeros(3), peer) for peer in (1, 2)]
            first = threading.Thread(target=wait, args=(works[0],))
            first.start()
            assert begun.wait(20)
            wait(works[1])
            first.join()
        assert failed == []


def what_a_kernel_found_is_raised_by_wait(rank, n):
    from ringcoll.errors import DeadlineError

    fake = Fake()
    with fake.device() as device:
        work = dist.all_reduce(torch.ones(1), group=fake.group, async_op=True)
        device._state.cuda.failure = lambda: DeadlineError("all_reduce: waited 1 s for rank 2")
        with pytest.raises(RuntimeError, match=r" Timed out .*rank 2"):
            work.wait()
        assert not work.is_success()
        with pytest.raises(RuntimeError, match=" closed "):
            fake.group._usable()
