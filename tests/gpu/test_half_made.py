"""An executor whose making fails leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest

from ringcoll.cuda.device import Device
from ringcoll.errors import MachineError
from ringcoll.executors.cuda import preparing
from ringcoll.executors.cuda.copy_launch import StreamPool
from ringcoll.executors.cuda.executor import CudaExecutor
from ringcoll.executors.cuda.mappings import Mappings
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.executors.shared_state import SharedState
from ringcoll.symmetric.device import CudaSymmetricMemory
from ringcoll.transports.peers import allocate_shared


def refuse(*_words, **_names):
    raise MachineError("refused on purpose")


@pytest.mark.parametrize(
    ("kind", "step"),
    [(Mappings, "__init__"), (StreamPool, "warm"), (preparing, "group_by_device")],
    ids=["table", "streams", "group"],
)
def test_what_was_made_is_closed(stand_in, together, monkeypatch, kind, step):
    runtime = stand_in(1)
    boards = []
    close = SharedState.close

    def noted(shared_state):
        boards.append(shared_state)
        close(shared_state)

    monkeypatch.setattr(SharedState, "close", noted)
    monkeypatch.setattr(kind, step, refuse)

    def work(fabric):
        device = Device(0, "stand-in", "0000:00:00.0", 9, 0, 4)
        texts: Any = None  # no kernel is loaded
        symmetric = CudaSymmetricMemory(fabric, 0)
        memory = allocate_shared(fabric, 0, Workspace(1).nbytes, what="a test")
        before = set(runtime.memory), set(runtime.host)
        with pytest.raises(MachineError, match="on purpose"):
            CudaExecutor(fabric, device, symmetric, texts, memory)
        assert (set(runtime.memory), set(runtime.host)) == before
        assert len(boards) == 1
        memory.close()

    together(1, work)


def test_hellos_without_a_stream_let_go_of_their_copy(stand_in, together, monkeypatch):
    runtime = stand_in(1)

    def work(fabric):
        device = Device(0, "stand-in", "0000:00:00.0", 9, 0, 4)
        texts: Any = None  # no kernel is loaded
        memory = allocate_shared(fabric, 0, Workspace(1).nbytes, what="a test")
        monkeypatch.setattr(runtime, "streamCreateWithFlags", refuse)
        before = set(runtime.memory), set(runtime.host)
        with pytest.raises(MachineError, match="on purpose"):
            CudaExecutor(fabric, device, CudaSymmetricMemory(fabric, 0), texts, memory)
        assert (set(runtime.memory), set(runtime.host)) == before
        memory.close()

    together(1, work)
