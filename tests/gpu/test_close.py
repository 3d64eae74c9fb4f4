"""The end of a communicator on GPUs, by fakes: it hears of peers that died while it waits."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest

from ringcoll.communicator.cuda import state
from ringcoll.communicator.cuda.state import CudaState
from ringcoll.config import Config
from ringcoll.errors import AbortedError, MachineError, RankLostError
from ringcoll.executors.cuda.async_errors import Watchdog


@pytest.fixture(autouse=True)
def no_driver(monkeypatch):
    monkeypatch.setattr(state, "outside_capture", contextlib.nullcontext)


class Waiting:
    """An executor with a kernel that waits until it is asked to give up."""

    stream_order = SimpleNamespace(refuse_capture=lambda _what: None, forget=int)

    def __init__(self, failure=None) -> None:
        self.asked, self.found = threading.Event(), failure
        self.events: list[str] = []

    def synchronize(self) -> None:
        self.events.append("synchronized" if self.asked.wait(20) else "waited in vain")
        self.found = AbortedError("given up")

    def give_up(self, _error=None) -> None:
        self.asked.set()

    def failure(self):
        return self.found

    def compare_last(self) -> None:
        if self.found is not None:
            raise self.found

    def close(self) -> None:
        self.events.append("closed")


class Lonely:
    """A fabric whose other rank dies."""

    rank = 0

    def __init__(self) -> None:
        self.told: list[str] = []

    def check(self) -> None:
        raise RankLostError("rank 1 died: its process has ended")

    def abort(self, reason, error=None) -> None:
        self.told.append(reason)

    def leave(self) -> None:
        """Nobody is left to be told."""

    close = leave


def closing(cuda) -> CudaState:
    state = object.__new__(CudaState)
    values = {"fabric": Lonely(), "cuda": cuda, "executor": cuda, "broken": None}
    values |= {"pairs": SimpleNamespace(running=[]), "symmetric": SimpleNamespace(close=int)}
    values |= {"closed": False, "inherited": False, "settled": False, "config": Config()}
    vars(state).update(values)
    cuda.running = cuda.recorder = None
    state._watch = Watchdog(state.fabric, cuda)
    return state


def test_close_hears_of_a_peer_that_died_while_it_waits():
    cuda = Waiting()
    state = closing(cuda)
    with pytest.raises(RankLostError, match="rank 1 died"):
        state.close()
    assert cuda.events == ["synchronized", "closed"]
    assert state.closed
    state.close()
    assert cuda.events == ["synchronized", "closed"]


def test_a_device_that_fails_with_a_peer_names_the_peer():
    cuda = Waiting()

    def fail() -> None:
        raise MachineError("illegal address")

    cuda.synchronize = fail  # type: ignore[method-assign]
    state = closing(cuda)
    with pytest.raises(RankLostError, match="rank 1 died") as told:
        state.synchronize()
    assert isinstance(told.value.__cause__, MachineError)
    assert state.broken is told.value
    state._watch.stop()


def test_close_after_an_error_that_was_told_says_nothing():
    cuda = Waiting()
    state = closing(cuda)
    state.broken = RankLostError("rank 1 died")
    state.close()
    assert cuda.events == ["synchronized", "closed"]
