"""The bridge from torch's C++ to a group, compiled once for these tests; DDP's calls over it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from ringcoll.torch import bridge

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(
        shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler"
    ),
    pytest.mark.timeout(300),  # of the first, which waits for the compiler
]

GPUS = pytest.mark.parametrize(
    "gpus",
    [
        pytest.param(1, id="one GPU", marks=pytest.mark.gpu),
        pytest.param(2, id="two GPUs", marks=pytest.mark.multi_gpu),
    ],
)

START = """
import ctypes, gc, os, sys, weakref
from datetime import timedelta
rank, store, os.environ["RINGCOLL_CACHE_DIR"] = int(sys.argv[1]), sys.argv[2], sys.argv[3]
import torch
import torch.distributed as dist
from ringcoll.torch import bridge

dist.init_process_group("ringcoll", init_method=f"file://{store}", rank=rank, world_size=2)
group, calls, cpu = dist.group.WORLD, [], torch.device("cpu")

def reduced(address, count, kind, ordinal):
    assert ordinal == -1
    calls.append(count)
    memory = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
    tensor = torch.frombuffer(memory, dtype=kind)
    group._engine(tensor, "all_reduce").in_place("all_reduce", tensor, "sum", 0)
    return ()

def train(steps=10, device=cpu, wide=16):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, wide), torch.nn.ReLU(), torch.nn.Linear(wide, 1))
    model.to(device)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.6 / wide)
    numbers = torch.Generator().manual_seed(rank)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(4, 8, generator=numbers).to(device)).square().mean().backward()
        optimizer.step()
    return [weight.flatten()[:64].tolist() for weight in model.parameters()]
"""


def compile_in(folder, **environment):
    return subprocess.run(
        [sys.executable, "-m", "ringcoll.torch.bridge"],
        cwd=ROOT,
        env={**os.environ, "RINGCOLL_CACHE_DIR": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A cache folder with the bridge."""
    folder = tmp_path_factory.mktemp("cache")
    done = compile_in(folder)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(folder)
    return folder


@pytest.fixture
def two(programs, folder, tmp_path):
    """Runs a program as two ranks whose groups have the bridge; returns what each printed."""

    def run(code, cache=folder):
        ends = programs.run(START + code, 2, tmp_path / "store", cache)
        assert [(status, error) for status, _, error in ends] == [(0, "")] * 2
        return [out for _, out, _ in ends]

    return run


def test_buckets_of_ddp_take_it_and_train_the_same_weights(two):
    code = """
plain = train()
group.start_sum = reduced
assert train() == plain
assert calls == [161] * 10, calls
del group.start_sum
assert train() == plain and len(calls) == 10
print(plain)
dist.destroy_process_group()
"""
    first, second = two(code)
    assert first == second


@GPUS
def test_buckets_on_gpus_take_it(two, gpus):
    code = f"""
device = torch.device("cuda", rank % {gpus})
torch.cuda.set_device(device)
python, made = type(group).allreduce, []

def allreduce(*args, **options):
    made.append(1)
    return python(*args, **options)

type(group).allreduce = allreduce
for wide in (16, 1 << 18):  # by LL128, and by Simple from where the bucket lies
    bridged = train(20, device, wide)
    assert len(made) <= 4, len(made)  # the first of a group, and of each bucket's size
    made.clear()
    group.start_sum, bridged_calls = lambda *bucket: None, group._device.bridged
    group._device.bridged = None
    assert train(20, device, wide) == bridged
    # A bucket a step; two of the wide model, but for the first step.
    assert len(made) == (20 if wide == 16 else 39), len(made)
    made.clear()
    del group.start_sum
    group._device.bridged = bridged_calls
    print(bridged)
dist.destroy_process_group()
"""
    first, second = two(code)
    assert first == second


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


def test_a_call_that_is_not_started_is_made_in_python(two):
    code = """
def start(*bucket):
    calls.append(1)
    return reduced(*bucket) if len(calls) % 2 == 0 else None

plain = train()
group.start_sum = start
assert train() == plain and calls.count(1) == 10, calls
dist.destroy_process_group()
"""
    two(code)


def test_what_it_does_not_take(two):
    code = """
group.start_sum = reduced
from torch.distributed import _functional_collectives as functional

for op, wanted in (("sum", 3.0), ("max", 2.0), ("avg", 1.5)):
    found = functional.all_reduce(torch.full((4,), rank + 1.0), op, group)
    assert found.tolist() == [wanted] * 4, (op, found)
assert calls == [4], calls
many = functional.all_reduce_coalesced([torch.ones(2), torch.ones(3)], "sum", group)
assert [one.tolist() for one in many] == [[2.0] * 2, [2.0] * 3] and calls == [4]
x = torch.ones(5)
dist.all_reduce(x)
assert x.tolist() == [2.0] * 5 and calls == [4], calls
for other in (torch.ones(4, 4).t()[:3], torch._neg_view(torch.ones(3))):
    dist.ProcessGroup.allreduce(group, [other], dist.AllreduceOptions()).wait()
    assert set(other.flatten().tolist()) in ({2.0}, {-2.0}) and calls == [4], other
dist.ProcessGroup.allreduce(group, [torch.ones(0)], dist.AllreduceOptions()).wait()
short = torch.ones(4)
short.untyped_storage().resize_(8)
try:
    dist.ProcessGroup.allreduce(group, [short], dist.AllreduceOptions()).wait()
except ValueError as error:
    said = str(error)
assert "resized to 8" in said and calls == [4], (said, calls)
dist.destroy_process_group()
"""
    two(code)


def test_its_work_and_an_error_after_the_start(two):
    code = """
def check():
    raise ValueError("a kernel has failed")

group.start_sum = reduced
x = torch.full((4,), rank + 1.0)
work = dist.ProcessGroup.allreduce(group, [x], dist.AllreduceOptions())
assert calls == [4] and work.is_completed() and work.wait(timedelta(seconds=1))
assert work.get_future().wait()[0] is x and x.tolist() == [3.0] * 4
group.check_started = check
for wait in (work.wait, lambda: torch.ops._c10d_functional.wait_tensor(
    torch.ops._c10d_functional.all_reduce_(x, "sum", group.group_name))):
    try:
        wait()
    except ValueError as error:
        print(error)
del group.check_started
dist.destroy_process_group()
assert work.wait()  # of a group that has ended
"""
    assert two(code) == ["a kernel has failed\n" * 2] * 2


def test_an_error_of_the_start_ends_the_backward_pass(two):
    code = """
def start(*bucket):
    raise ValueError("no such bucket")

group.start_sum, group.keep_started = start, lambda tensor: print("kept", tensor.numel())
try:
    train(1)
except ValueError as error:
    print(error)
del group.start_sum
dist.destroy_process_group()
"""
    assert two(code) == ["kept 161\nno such bucket\n"] * 2


KEPT = """
from tests.torch.fake_rank import MAIN, SIDE, Rank
from ringcoll.errors import RankLostError
from ringcoll.torch.tracing import profiler
import pytest
from unittest.mock import patch

fake = Rank(group)
group._device, noted, x = fake.device, fake.noted, torch.zeros(8)
at, options = x.data_ptr(), dist.AllreduceOptions()

def made(asynchronous, tensor=x, op=dist.ReduceOp.SUM):
    options.asyncOp, options.reduceOp = asynchronous, op
    noted.clear()
    return group._bridged(group, [tensor], options)

def tried(tensor):
    made(False, tensor), made(True, tensor)
    return noted

assert tried(x) == [], "nothing is kept yet"
call = fake.keep(x)
ordered = [("record", 9, MAIN), ("wait", SIDE, 9, 0)]
plain, aside = [(MAIN, at, at, 0, 0)], [*ordered, (SIDE, at, at, 0, 0)]
"""
END = "group._device = None\ndist.destroy_process_group()\n"


def test_an_all_reduce_like_an_earlier_one_is_enqueued_without_python(two):
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
fake.device.close()
assert made(False) is None and noted == []
"""
    two(KEPT + code + END)


def test_what_the_fast_path_leaves_the_bridge_leaves_too(two):
    code = """
made(False)
slow = [
    (fake.order, "settled", None), (fake.timer, "due", 0.0),
    (fake.timer, "alarm", memoryview(b"\\1" * 8).cast("Q")),
    (fake.here.thread, "bound", False), (call, "kernel", None), (call, "number", 4),
]
for where, name, value in slow:
    with patch.object(where, name, value):
        assert not fake.path.launch(call, MAIN, (at, at, 0, 0)), name
        assert tried(x) == [], name
with patch.object(fake.here, "get", lambda: 1):
    assert not fake.path.launch(call, MAIN, (at, at, 0, 0))
    with patch.object(fake.device, "bridged", fake.device._bridged()):
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
    assert group._bridged(group, *given) is None and noted == [], given
assert fake.failed == [] and made(False) is not None and noted == plain
"""
    two(KEPT + code + END)


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
assert fake.state.lock.acquire(blocking=False)
with pytest.raises(dist.DistBackendError, match="out of step"):
    dist.all_reduce(x)
"""
    two(KEPT + code + END)


def test_a_wait_raises_what_a_kernel_has_reported(two):
    code = """
blocking = made(False)
fake.order.settled = SIDE
work = made(True)
assert work.wait()
fake.state.cuda.failure = lambda: RankLostError("rank 7 has left")
assert work.wait(), "nobody asks before there is a report"
fake.errors._found = "it"
with pytest.raises(dist.DistBackendError, match="rank 7 has left"):
    work.wait()
fake.errors._found, fake.report[0] = None, 1
with pytest.raises(dist.DistBackendError, match="rank 7 has left"):
    work.wait()
assert blocking.wait(), "a blocking call's does nothing"
"""
    two(KEPT + code + END)


def test_the_parts_have_one_order():
    header = bridge._SOURCE.with_name("bridge_calls.hpp").read_text(encoding="utf-8")
    (parts,) = re.findall(r"enum Part \{(.*?)\};", header, re.DOTALL)
    names = [name.strip() for name in parts.split(",")]
    assert names == [*(field.upper() for field in bridge.Bridged._fields), "PARTS"]


def test_no_group_lives_longer_for_it(two):
    code = """
group.start_sum = reduced
work = dist.ProcessGroup.allreduce(group, [torch.ones(2)], dist.AllreduceOptions())
ended = weakref.ref(group)
dist.destroy_process_group()
del group, reduced
gc.collect()
assert ended() is None and work.wait()
"""
    two(code)


def test_a_wait_while_the_group_ends_and_a_second_start(two):
    code = """
class Waiting:
    def __del__(self):
        calls.append(work.wait())

dist.ProcessGroup.__init__(group, rank, 2)
bridge.start(group, rank, 2)
group.start_sum = reduced
work = dist.ProcessGroup.allreduce(group, [torch.ones(2)], dist.AllreduceOptions())
group.last = Waiting()
dist.destroy_process_group()
del group, reduced
gc.collect()
assert calls == [2, True], calls
"""
    two(code)


def test_a_program_that_does_not_destroy_its_group_ends(two):
    two("group.start_sum = reduced\ntrain(2)\n")


def test_groups_work_without_it(two, tmp_path):
    code = "assert bridge.compiled() is None\ngroup.start_sum = reduced\nprint(train(), calls)\n"
    first, second = two(code, tmp_path / "empty")
    assert first == second
    assert first.endswith(" []\n")


@pytest.fixture
def place(monkeypatch, tmp_path):
    """Where a bridge would lie, with a file that is none."""
    monkeypatch.setenv("RINGCOLL_CACHE_DIR", str(tmp_path / "cache"))
    path = bridge._path()
    assert path is not None
    path.parent.mkdir(mode=0o700, parents=True)
    path.write_bytes(b"no library")
    yield path
    bridge.compiled.cache_clear()


def refusal(caplog):
    bridge.compiled.cache_clear()
    assert bridge.compiled() is None
    (record,) = caplog.records
    caplog.clear()
    return record.getMessage()


def test_what_others_may_have_written_is_not_loaded(place, caplog):
    assert "torch's calls go without the bridge " in refusal(caplog)
    place.chmod(0o666)
    assert str(place) in (said := refusal(caplog)) and "others may write to it" in said
    place.unlink()
    place.symlink_to(place.with_name("elsewhere"))
    bridge.compiled.cache_clear()
    assert bridge.compiled() is None
    place.with_name("elsewhere").write_bytes(b"")
    assert "symbolic links" in refusal(caplog)
    place.parent.chmod(0o777)
    assert "others may write to it" in refusal(caplog)


@pytest.mark.parametrize("text", ["", "."])
def test_nothing_is_loaded_from_the_working_directory(place, monkeypatch, tmp_path, caplog, text):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("RINGCOLL_CACHE_DIR", text)
    monkeypatch.chdir(place.parent.parent)
    bridge.compiled.cache_clear()
    assert bridge.compiled() is None
    assert caplog.records == []


def test_what_compiling_lacks_is_said(tmp_path):
    done = compile_in(tmp_path, CXX=str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"ringcoll.torch.bridge: the bridge of torch {torch.__version__}" in done.stderr
    assert done.stderr.endswith(
        "It needs a C++ compiler, Python's headers, setuptools and ninja; groups work without it\n"
    )
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_folder_that_cannot_hold_it_is_named(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch").chmod(0o777)
    done = compile_in(tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"cannot be written to {tmp_path}" in done.stderr
    assert "others may write to it" in done.stderr
    assert "absolute path" in compile_in(".").stderr
