"""What a communicator on GPUs takes when it is made, and gives back when that fails."""

from __future__ import annotations

import pytest

import ringcoll
from ringcoll.communicator.cuda import state
from ringcoll.cuda import quarantine
from ringcoll.cuda.memory import host_mapped
from ringcoll.errors import Error, MachineError
from ringcoll.executors.cuda.copy_launch import StreamPool
from ringcoll.executors.cuda.workspace import Workspace
from tests.gpu.stand_in import read, write

pytest.importorskip("cupy")

from tests.gpu.fake_gpus import fake


@pytest.mark.parametrize(
    ("part", "failing"),
    [("CudaExecutor", (0, 1)), ("CudaExecutor", (1,)), ("CudaPairs", (0, 1))],
    ids=["executors", "one executor", "sends and receives"],
)
def test_what_fails_leaves_no_arena(part, failing, monkeypatch):
    gpus = fake(monkeypatch, 2, sms=8)
    made = getattr(state, part)

    def refuse(first, *args, **kwargs):
        if getattr(first, "rank", -1) in failing:
            raise MachineError("no such kernel")
        return made(first, *args, **kwargs)

    monkeypatch.setattr(state, part, refuse)
    with pytest.raises(Error, match="no such kernel"):
        ringcoll.init_all([0, 1], device="cuda", timeout=20)
    quarantine.sweep()
    workspaces = [size for _, size, _ in gpus.memory.values() if size >= Workspace(2).nbytes]
    gpus.close()
    assert not workspaces


def test_a_copy_to_pinned_memory_is_warmed_too(stand_in):
    runtime = stand_in(1)
    source, target = runtime.malloc(256), host_mapped(256, ordinal=0)
    write(source, bytes(range(256)))
    StreamPool(0).warm(source, [target.device])
    assert read(target.device, 256) == bytes(range(256))
    target.free()
