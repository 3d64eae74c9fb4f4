"""All_reduces that are like an earlier one, which the bridge enqueues."""

from __future__ import annotations

import re
from types import MemberDescriptorType

import pytest

pytest.importorskip("torch")

from ringcoll.executors.cuda.async_errors import AsyncErrors
from ringcoll.executors.cuda.cuda_call import CudaCall
from ringcoll.executors.cuda.loader import Launchable
from ringcoll.executors.cuda.params import Parameter
from ringcoll.executors.cuda.stream_order import StreamOrder
from ringcoll.fabric.poll import LivenessTimer
from ringcoll.torch import bridge
from ringcoll.torch.batch import Batch
from ringcoll.torch.device import Device
from ringcoll.torch.group import ProcessGroupRingcoll
from tests.torch.bridged import GPUS, NEEDS_COMPILER

pytestmark = NEEDS_COMPILER

KEPT = """
from tests.torch.fake_rank import MAIN, SIDE, Rank
from ringcoll.errors import RankLostError
from ringcoll.torch.tracing import profiler
import pytest
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

fake = Rank(group)
group._device, noted, x = fake.device, fake.noted, torch.zeros(8)
at, options = x.data_ptr(), dist.AllreduceOptions()

def made(asynchronous, tensor=x, op=dist.ReduceOp.SUM):
    options.asyncOp, options.reduceOp = asynchronous, op
    noted.clear()
    return group._start_in_bridge(group, [tensor], options)

def tried(tensor):
    made(False, tensor)
    if not noted:
        with patch.object(fake.order, "settled", fake.order.settled and SIDE):
            made(True, tensor)
    return noted

assert tried(x) == [], "nothing is kept yet"
call = fake.keep(x)
ordered = [("record", 9, MAIN), ("wait", SIDE, 9, 0)]
plain, aside = [(MAIN, at, at, 0, 0)], [*ordered, (SIDE, at, at, 0, 0)]
"""
END = "group._device = None\ndist.destroy_process_group()\n"


def test_an_all_reduce_like_an_earlier_one_is_enqueued_by_it(two):
    code = """
work = made(False)
assert noted == plain and fake.errors.last is call and fake.fabric.entered == 1
assert work.wait() and work.is_completed()
assert work.get_future().wait()[0] is x
y = torch.zeros(8)
there = y.data_ptr()
made(False, y)
assert noted == [(MAIN, there, there, 0, 0)], "the same call on another tensor"
fake.order.settled, fake.order.marking = SIDE, True
for all_reduce in (group.allreduce, lambda *given: dist.ProcessGroup.allreduce(group, *given)):
    options.asyncOp, fake.errors.last = True, None
    noted.clear()
    work = all_reduce([x], options)
    assert noted == [*aside, ("mark", SIDE)] and fake.errors.last is call, noted
    assert work.wait(timedelta(seconds=1)) and work.is_completed()
    assert work.get_future().wait()[0] is x
assert fake.fabric.entered == 4
fake.order.settled, fake.order.marking = MAIN, False
noted.clear()
dist.all_reduce(x)
assert noted == plain
for op, name in ((dist.ReduceOp.MAX, "max"), (dist.ReduceOp.AVG, "avg")):
    other = fake.keep(x, name)
    made(False, x, op)
    assert noted == plain and fake.errors.last is other, name
fake.device._calls.forget()
assert made(False) is not None, "the bridge has its own"
fake.order.settled = SIDE
work = made(True)
fake.device.close()
fake.report[0] = 1  # as if another had that memory
assert work.wait() and made(True) is None and noted == []
"""
    two(KEPT + code + END)


def test_what_the_fast_path_leaves_the_bridge_leaves_too(two):
    code = """
made(False)
slow = [
    (fake.order, "settled", None), (fake.timer, "due", 0.0),
    (fake.timer, "alarm", memoryview(b"\\1" * 8).cast("Q")),
    (call, "kernel", None), (call, "number", 4),
]
for where, name, value in slow:
    with patch.object(where, name, value):
        assert not fake.path.launch(call, MAIN, (at, at, 0, 0)), name
        assert tried(x) == [], name
with patch.object(fake.here.thread, "bound", False):  # a thread that has been bound stays so
    assert not fake.path.launch(call, MAIN, (at, at, 0, 0))
    with patch.object(fake.device, "bridged", fake.device._parts_of_bridge()):
        assert tried(x) == []
with patch.object(fake.here, "get", lambda: 1):
    assert not fake.path.launch(call, MAIN, (at, at, 0, 0))
    with patch.object(fake.device, "bridged", fake.device._parts_of_bridge()):
        assert tried(x) == [], "another device is current"
fake.report[0] = 1
assert not fake.path.launch(call, MAIN, (at, at, 0, 0)) and tried(x) == []
fake.report[0] = 0
others = [
    (group, "_failure", RankLostError("rank 7 has left")), (group, "_pairs", {}),
    (fake.device.batch, "posts", ["one"]), (profiler, "_is_profiler_enabled", True),
]
for where, name, value in others:
    with patch.object(where, name, value):
        assert tried(x) == [], name
with patch.object(fake, "stream", 11):
    assert made(False) is None and noted == [], "a stream that may be gone"
wide = torch.zeros(4, 4)
fake.keep(wide)
for other in (x[:4], x.double(), x[::2], torch._neg_view(x), x.new_empty(0), wide.t()):
    assert tried(other) == [], other
assert made(False, wide) is not None
wide.untyped_storage().resize_(8)
assert tried(wide) == []
premul = torch.distributed._make_nccl_premul_sum(2.0)
assert made(False, x, dist.ReduceOp.MIN) is None and made(False, x, premul) is None
whole = torch.zeros(9)
assert whole.data_ptr() % 8 == 0
assert tried(whole[1:]) == [], "it begins at half a word"
for given in (((x,), options), ([x, x], options), ([1], options), ([x], None), (x, options)):
    assert group._start_in_bridge(group, *given) is None and noted == [], given
assert fake.failed == [] and made(False) is not None and noted == plain
simple, asked = torch.zeros(6), []
fake.keep(simple, any_class=False)
keep = fake.device.keep_call
with patch.object(fake.device, "keep_call", lambda *given: (asked.append(1), keep(*given))[1]):
    assert tried(simple) == [] and tried(simple) == [] and asked == [1], "it looks at the memory"
call.number = 4
assert made(False) is None, "its record is another's"
other = fake.keep(x)
assert made(False) is not None and fake.errors.last is other, "prepared anew"
"""
    two(KEPT + code + END)


def test_attributes_of_another_class_and_of_a_changed_one(two):
    code = """
class Slotted:
    __slots__ = ("posts",)

first, second = Slotted(), Slotted()
first.posts, second.posts = [], []
for batch in (fake.device.batch, first, second, fake.device.batch, first):
    with patch.object(fake.device, "bridged", fake.device.bridged._replace(batch=batch)):
        assert made(False) is not None and noted == plain
        batch.posts = ["one"]
        assert made(False) is None and noted == []
        batch.posts = []
with patch.object(fake.device, "bridged", fake.device.bridged._replace(batch=first)):
    with patch.object(Slotted, "posts", ["one"]):
        assert made(False) is None, "the class has another"
    before = sys.getrefcount(first.posts)
    assert made(False) is not None and sys.getrefcount(first.posts) == before
    del first.posts
    with pytest.raises(AttributeError, match="posts"):
        made(False)
    assert noted == []

class Foreign:
    posts = Slotted.posts

class Hooked(Slotted):
    __slots__ = ()

    def __getattribute__(self, name):
        return ["one"] if name == "posts" else super().__getattribute__(name)

foreign, hooked = Foreign(), Hooked()
hooked.posts = []
with patch.object(fake.device, "bridged", fake.device.bridged._replace(batch=hooked)):
    assert made(False) is None, "its class has the last word"
with patch.object(fake.device, "bridged", fake.device.bridged._replace(batch=foreign)):
    with pytest.raises(TypeError, match="posts"):
        made(False)
bare = dist.AllreduceOptions.__new__(dist.AllreduceOptions)
assert group._start_in_bridge(group, [x], bare) is None, "it holds nothing"
"""
    two(KEPT + code + END)


def test_python_launches_where_the_compiled_part_is_not_wanted(two):
    code = """
fake.state.settings.compiled = False
fake.device.bridged = fake.device._parts_of_bridge()
assert fake.device.bridged.launch == fake.path.launch
assert made(False) is not None and noted == plain
fake.order.settled = SIDE
assert made(True) is not None and noted == aside
assert fake.fabric.entered == 2 and fake.errors.last is call
"""
    two(KEPT + code + END)


def test_a_blocking_call_keeps_no_tensor(two):
    code = """
y = torch.zeros(8)
work, held = made(False, y), weakref.ref(y)
assert noted and work.get_future().wait()[0] is y
del y, work
assert held() is None
"""
    two(KEPT + code + END)


def test_what_c_reads_lies_in_slots():
    read = {
        AsyncErrors: ("_found", "last"),
        Batch: ("posts",),
        Device: ("bridged",),
        CudaCall: ("kernel", "number", "slot"),
        Launchable: ("blocks", "enqueue", "function", "locals", "parameter", "pointers", "threads"),
        LivenessTimer: ("alarm", "due"),
        Parameter: ("filled",),
        ProcessGroupRingcoll: ("_device", "_failure", "_pairs"),
        StreamOrder: ("marking", "settled"),
    }
    for kind, names in read.items():
        for name in names:
            assert isinstance(getattr(kind, name), MemberDescriptorType), (kind, name)


def test_an_error_of_such_a_launch_is_the_groups(two):
    code = """
def raising(error):
    def enqueue(*given):
        raise error
    return patch.object(type(call.kernel), "enqueue", enqueue)

with raising(KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
    made(False)
assert len(fake.failed) == 1 and fake.kept == [] and group._failure is None
fake.order.settled = SIDE
with raising(KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
    made(True)
assert len(fake.kept) == 1 and fake.kept[0] is x, "it may run"
assert noted == ordered and fake.fabric.entered == 0
fake.order.settled = MAIN
with raising(RankLostError("7 has left")), pytest.raises(dist.DistBackendError, match="7 has left"):
    made(False)
assert isinstance(group._failure, RankLostError) and made(False) is None
with ThreadPoolExecutor(1) as other:
    assert other.submit(fake.state.lock.acquire, blocking=False).result(), "it was released"
with pytest.raises(dist.DistBackendError, match="out of step"):
    dist.all_reduce(x)
"""
    two(KEPT + code + END)


def test_an_error_behind_the_launch_is_the_groups_and_keeps_the_tensor(two):
    code = """
fake.order.settled = SIDE
# A stream of a kind of device that this torch does not have: no event can mark the end there.
fake.device.bridged = fake.device.bridged._replace(stream_id=(0, 0, 12))
errors = os.dup(2)
with open(sys.argv[2] + str(rank), "w+") as said:
    os.dup2(said.fileno(), 2)
    try:
        with pytest.raises(dist.DistBackendError, match="not linked with support for xpu"):
            made(True)
    finally:
        os.dup2(errors, 2)
    said.seek(0)
    assert "memory of an all_reduce that nobody has waited for" in said.read()
assert noted == aside and isinstance(group._failure, RuntimeError)
"""
    two(KEPT + code + END)


def test_a_wait_raises_what_a_kernel_has_reported(two):
    code = """
def succeeded():
    errors = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch warns that the method is old
    found = work.is_success()
    os.dup2(errors, 2)
    return found

blocking = made(False)
fake.order.settled = SIDE
work = made(True)
assert work.wait()
fake.state.cuda.failure = lambda: RankLostError("rank 7 has left")
assert work.wait(), "nobody asks before there is a report"
assert succeeded()
fake.errors._found = "it"
assert not succeeded()
with pytest.raises(dist.DistBackendError, match="rank 7 has left"):
    work.wait()
fake.errors._found, fake.report[0] = None, 1
with pytest.raises(dist.DistBackendError, match="rank 7 has left"):
    work.wait()
assert blocking.wait(), "a blocking call's does nothing"
"""
    two(KEPT + code + END)


@GPUS
def test_calls_of_python_on_gpus_take_it(two, gpus):
    code = f"""
import itertools
from ringcoll.torch.device import Device

device = torch.device("cuda", rank % {gpus})
torch.cuda.set_device(device)
made = []
for name in ("in_place", "in_place_async"):
    def counted(self, *given, plain=getattr(Device, name)):
        made.append(given[0])
        return plain(self, *given)
    setattr(Device, name, counted)

def numbers(count, turn, of):
    return (torch.arange(count, device=device) + turn) % 5 + of

ops = {{"SUM": torch.add, "MAX": torch.maximum, "MIN": torch.minimum}}
shapes = [*itertools.product((1, 100, 40003), (torch.float32, torch.bfloat16, torch.int32), ops)]
side, calls = torch.cuda.Stream(), 0
for turn, asynchronous in enumerate((False, True, False, True, False)):
    made.clear()
    for count, kind, op in shapes * 2:
        calls += 1
        wanted = ops[op](numbers(count, calls, 0), numbers(count, calls, 1)).to(kind)
        x = numbers(count + 1, calls, rank).to(kind)[:count]
        with torch.cuda.stream(side if turn == 4 else torch.cuda.current_stream()):
            side.wait_stream(torch.cuda.default_stream())
            work = dist.all_reduce(x, getattr(dist.ReduceOp, op), async_op=asynchronous)
            busy = torch.randn(256, 256, device=device) @ torch.randn(256, 256, device=device)
            if asynchronous:
                assert work.wait() and (calls % 9 or work.get_future().wait()[0] is x)
            assert torch.equal(x, wanted), (turn, count, kind, op)
    # The first of a shape, and what is to be looked at now and then.
    assert turn == 0 or len(made) < len(shapes), (turn, len(made))
dist.destroy_process_group()
"""
    two(code)


def test_the_parts_have_one_order():
    header = bridge._SOURCE.with_name("bridge_calls.hpp").read_text(encoding="utf-8")
    (parts,) = re.findall(r"enum Part \{(.*?)\};", header, re.DOTALL)
    names = [name.strip() for name in parts.split(",")]
    assert names == [*(field.upper() for field in bridge.Bridged._fields), "PARTS"]
