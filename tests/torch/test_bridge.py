"""The bridge from torch's C++ to a group, compiled once for these tests; DDP's calls over it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from ringcoll.torch import bridge

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
    pytest.mark.timeout(300),  # of the first, which waits for the compiler
]

START = """
import gc, os, sys, weakref
rank, store, os.environ["RINGCOLL_CACHE_DIR"] = int(sys.argv[1]), sys.argv[2], sys.argv[3]
import torch
import torch.distributed as dist
from ringcoll.torch import bridge

dist.init_process_group("ringcoll", init_method=f"file://{store}", rank=rank, world_size=2)
group, calls, cpu = dist.group.WORLD, [], torch.device("cpu")

def take(start):
    bridge.take(group, start, cpu, None)

def reduced(tensor):
    calls.append(tensor.numel())
    group._engine(tensor, "all_reduce").in_place("all_reduce", tensor, "sum", 0)
    return True

def train(steps=10, device=cpu):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    model.to(device)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    numbers = torch.Generator().manual_seed(rank)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(4, 8, generator=numbers).to(device)).square().mean().backward()
        optimizer.step()
    return [weight.tolist() for weight in model.parameters()]
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


def test_buckets_of_ddp_take_it_and_train_the_same_weights(two, tmp_path):
    code = """
plain = train()
take(reduced)
assert train() == plain
assert calls == [161] * 10, calls
bridge.leave(group)
assert train() == plain and len(calls) == 10
print(group.is_bridged, plain)
dist.destroy_process_group()
"""
    first, second = two(code)
    assert first == second
    assert first.startswith("True ")


@pytest.mark.parametrize(
    "gpus",
    [
        pytest.param(1, id="one GPU", marks=pytest.mark.gpu),
        pytest.param(2, id="two GPUs", marks=pytest.mark.multi_gpu),
    ],
)
def test_buckets_on_gpus_take_it_once_their_call_is_kept(two, gpus):
    code = f"""
device = torch.device("cuda", rank % {gpus})
torch.cuda.set_device(device)
python, made = type(group).allreduce, []

def allreduce(*args, **options):
    made.append(1)
    return python(*args, **options)

type(group).allreduce = allreduce
bridged = train(20, device)
assert group.is_bridged and 1 <= len(made) <= 5, len(made)
made.clear()
bridge.leave(group)
assert train(20, device) == bridged and len(made) == 20, len(made)
print(bridged)
dist.destroy_process_group()
"""
    first, second = two(code)
    assert first == second


def test_a_call_that_is_not_started_is_made_in_python(two):
    code = """
def start(tensor):
    calls.append(1)
    return len(calls) % 2 == 0 and reduced(tensor)

plain = train()
take(start)
assert train() == plain and sum(one == 1 for one in calls) == 10
dist.destroy_process_group()
"""
    two(code)


def test_what_it_does_not_take(two):
    code = """
take(reduced)
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
dist.destroy_process_group()
"""
    two(code)


def test_an_error_of_the_start_ends_the_backward_pass(two):
    code = """
def start(tensor):
    raise ValueError("no such bucket")

take(start)
try:
    train(1)
except ValueError as error:
    print(error)
bridge.leave(group)
dist.destroy_process_group()
"""
    assert two(code) == ["no such bucket\n"] * 2


def test_no_group_lives_longer_for_it(two):
    code = """
def start(tensor, group=group):
    return False

take(start)
kept, ended = weakref.ref(start), weakref.ref(group)
dist.destroy_process_group()
del group, start
gc.collect()
assert kept() is None and ended() is None
"""
    two(code)


def test_a_program_that_does_not_destroy_its_group_ends(two):
    two("take(reduced)\ntrain(2)\n")


def test_groups_work_without_it(two, tmp_path):
    code = "assert bridge.compiled() is None and not group.is_bridged\nprint(train())\n"
    first, second = two(code, tmp_path / "empty")
    assert first == second


def test_a_broken_file_and_a_folder_of_others_are_left_alone(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("RINGCOLL_CACHE_DIR", str(tmp_path))
    path = bridge._path()
    assert path is not None
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"no library")
    try:
        bridge.compiled.cache_clear()
        assert bridge.compiled() is None
        path.parent.chmod(0o777)
        bridge.compiled.cache_clear()
        assert bridge.compiled() is None
    finally:
        bridge.compiled.cache_clear()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all(text.startswith("torch's calls go without the bridge: ") for text in said)
    assert "others may write to it" in said[1]


def test_what_compiling_lacks_is_said(tmp_path):
    done = compile_in(tmp_path, PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert "the bridge of torch" in done.stderr
    assert done.stderr.endswith(
        "It needs g++ and ninja (pip install ninja), and groups work without it\n"
    )
    assert list(tmp_path.rglob("*.so")) == []
