"""A GPU rank whose calls of new counts the compiled part launches, by fakes."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from ringcoll.communicator.group import open_groups
from ringcoll.cuda.raw import from_pointer
from ringcoll.executors.cuda import launches as module
from ringcoll.executors.cuda.launches import Launches
from ringcoll.executors.cuda.params import Parameter
from tests.gpu.fake_gpus import Launch
from tests.gpu.noted_rank import NotedRank


class Compiled:
    """A rank whose calls the compiled part launches; launches are noted and not made."""

    def __init__(self, comm: Any, gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "address_of", lambda _name: 0)
        monkeypatch.setattr(Launch, "use_grid", lambda *given: self._use_grid(*given))
        monkeypatch.setattr(Launch, "enqueue", lambda *given: self._enqueue(*given))
        self.comm, self.engine, self.launched = comm, comm._engine, list[Any]()
        self.rank = NotedRank(comm.rank)
        self.rank.order.settled = gpus.current.ptr
        self.rank.path.records = comm._state.cuda.shared_state.record_numbers
        self.threads = 0
        self.last: Any = None
        self.addresses: tuple[int, ...] = ()
        monkeypatch.setattr(comm._state.cuda, "launch", self._note)
        self.known = Launches(
            self.rank.path, self.engine._owners, open_groups, self.engine._libraries
        )
        self.engine._known = self.known

    def _use_grid(self, launch: Launch, blocks: int, threads: int) -> None:
        launch.blocks, self.threads = blocks, threads

    def _enqueue(self, launch: Launch, _stream: int, _pointers: int, _extra: int) -> None:
        words = launch.parameter.words.tobytes()
        self.launched.append((launch.text, launch.blocks, self.threads, words))

    def _note(self, prepared: Any, _stream: int, addresses: tuple[int, ...]) -> None:
        self.last, self.addresses = prepared, addresses

    def by_python(self, call: Any, count: int) -> tuple[object, ...]:
        """What a call launches that Python prepares from the beginning."""
        calls = self.engine.calls
        kept, self.engine._known = calls._shapes.copy(), None
        calls.clear()
        call(count)
        self.engine._known = self.known
        calls.clear()
        calls._shapes.update(kept)
        launch, grid = self.last.launchable, self.last.choice.grid
        launch.parameter.fill(self.addresses)
        return launch.text, grid.blocks, grid.threads, launch.parameter.words.tobytes()


def x(count: int, at: int = 1 << 32, dtype: str = "float32") -> Any:
    return from_pointer(at, count, dtype, 0)


class Kernel:
    """Notes its launches, with the words of its parameter."""

    pointers = 1 << 40

    def __init__(self, words: array[int]) -> None:
        self.parameter, self.grid, self.noted = Parameter(words), (0, 0), list[Any]()

    def use_grid(self, blocks: int, threads: int) -> None:
        self.grid = blocks, threads

    def enqueue(self, _stream: int, _pointers: int, _extra: int) -> None:
        self.noted.append((self.grid, self.parameter.words[:]))
