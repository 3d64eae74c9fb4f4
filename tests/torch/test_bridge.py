"""The bridge from torch to a group: buckets of DDP, the file that is loaded, what is refused."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from ringcoll.torch import bridge
from tests.torch.bridged import GPUS, NEEDS_COMPILER, compile_in

pytestmark = NEEDS_COMPILER


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
