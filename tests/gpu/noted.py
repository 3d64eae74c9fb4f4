"""Ranks whose launches are noted and not made, and what they prepare; by fakes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

import ringcoll
from ringcoll.executors.cuda import loading, preparing
from ringcoll.executors.cuda.workspace import Workspace
from tests.gpu import fake_gpus
from tests.gpu.fake_gpus import fake
from tests.gpu.ranks import close

NUMBER = 7
"""Of the record of every call here, which its parameter holds."""


def noted(nranks: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Any], Any]]:
    """Ranks whose launches are only noted, on devices of H200's size joined by NVLink."""
    gpus = fake(monkeypatch, nranks, sms=132)
    monkeypatch.setattr(gpus, "function", lambda text, *_: gpus_text(gpus, text))
    monkeypatch.setattr(preparing, "Workspace", Workspace)
    monkeypatch.setattr(loading, "cores", lambda: 4)
    monkeypatch.setattr("ringcoll.executors.cuda.device_group.joined_by_nvlink", lambda *_: True)
    made: list[Any] = ringcoll.init_all([*range(nranks)], device="cuda", timeout=20)
    monkeypatch.setattr(fake_gpus.Launch, "launch", fill)
    for comm in made:
        monkeypatch.setattr(comm._state.cuda.shared_state, "numbers", itertools.repeat(NUMBER))
        monkeypatch.setattr(comm._state.cuda, "run", lambda *_: None)
    yield made, gpus
    close(made, failed=True)
    gpus.close()


def gpus_text(gpus: Any, text: str) -> int:
    if text not in gpus.texts:
        gpus.texts.append(text)
    return gpus.texts.index(text)


def fill(launch: fake_gpus.Launch, _stream: int, addresses: tuple[int, ...] = ()) -> None:
    """Write the addresses, and launch nothing."""
    launch.parameter.fill(addresses)


class Watched:
    """What a rank has prepared, and how often like a call of another count.

    ``once``: without a launch of its own.
    """

    def __init__(self, comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.last: Any = None
        self.once = self.likes = self.prepared = 0
        cuda = comm._state.cuda
        recount, like, prepare = cuda.recount, cuda.prepare_like, cuda.prepare
        timed = comm._state.timed

        def noting_once(before, *counts):
            found = recount(before, *counts)
            self.last, self.once = found or self.last, self.once + (found is not None)
            return found

        def noting_like(before, call):
            found = like(before, call)
            self.last, self.likes = found or self.last, self.likes + (found is not None)
            return found

        def noting(*how):
            self.last, self.prepared = prepare(*how), self.prepared + 1
            return self.last

        def noting_timed(before, seconds):
            self.last = timed(before, seconds)
            return self.last

        monkeypatch.setattr(comm._state, "timed", noting_timed)
        monkeypatch.setattr(cuda, "recount", noting_once)
        monkeypatch.setattr(cuda, "prepare_like", noting_like)
        monkeypatch.setattr(cuda, "prepare", noting)


def facts(prepared: Any, gpus: Any) -> tuple[object, ...]:
    """All that a launch consists of, and what hosts and peers compare."""
    choice, call = prepared.choice, prepared.call
    launch = getattr(prepared, "recounter", None) or prepared
    words = []
    for first in (1, 5):  # a word that holds an address differs
        prepared.launchable.launch(0, (first << 20, 2 * first << 20, 3 << 48, 4 << 48))
        words.append(launch.launchable.parameter.words.tobytes())
    return (
        launch.launchable.text,
        launch.launchable.blocks,
        launch.launchable.ranks,
        choice.grid,
        *words,
        prepared.signature_text,
        prepared.signature,
        prepared.timeout,
        choice,
        choice.why,
        (call.collective, call.count, call.nbytes, call.dtype, call.op, call.root, call.in_place),
        (call.counts, call.displs, call.signature(), call.tag),
        (prepared.number, prepared.slot, prepared.large, prepared.total),
    )
