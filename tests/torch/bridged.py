"""Programs of two ranks whose groups have the bridge, and how it is compiled for them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

NEEDS_COMPILER = [
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


def compiled_once(folder):
    """The folder, with the bridge: the first of several workers compiles it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    with open(folder / "lock", "w") as lock:  # noqa: PTH123
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            done = compile_in(folder)
            assert done.returncode == 0, done.stderr
            assert Path(done.stdout.strip()).is_relative_to(folder)
            (folder / "done").touch()
    return folder
