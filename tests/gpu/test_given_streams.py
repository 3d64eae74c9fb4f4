"""Streams that calls are given, of GPU ranks whose launches are only noted."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

pytest.importorskip("cupy")

from tests.gpu.fake_gpus import communicators
from tests.gpu.noted import noted
from tests.gpu.ranks import close
from tests.kernels.stand_in import needs_compiler


@pytest.fixture
def comm(monkeypatch):
    made = noted(2, monkeypatch)
    yield next(made)[0][0]
    next(made, None)


class Torch:
    """What is looked at of torch's streams; torch numbers its own."""

    stream_id = 3

    def __init__(self, handle: int, number: int = 3) -> None:
        self.cuda_stream, self.stream_id = handle, number


class Other:
    """Of a library whose stream may be another each time."""

    handles = iter(range(70, 80))

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, next(self.handles)


def test_streams_of_torch_are_remembered_and_no_others(comm, monkeypatch):
    monkeypatch.setattr(Torch, "__module__", "torch.cuda.streams")
    find = comm._engine._stream_of
    one, two, foreign, other = Torch(7), Torch(8), Torch(9, 9), Other()
    for stream in (one, two, one, one, two):
        assert find(stream, None, "send") == (stream.cuda_stream, stream)
    assert find(foreign, None, "send") == find(foreign, None, "send") == (9, None)
    assert [find(other, None, "send") for _ in range(3)] == [(70 + k, other) for k in range(3)]
    assert find(two, None, "send") == (8, two)


@needs_compiler
def test_an_engine_ends_without_the_garbage_collector(monkeypatch):
    made = communicators(range(2), monkeypatch)
    comms: list[Any] = next(made)
    engines = [weakref.ref(comm._engine) for comm in comms]
    gc.collect()
    gc.disable()
    try:
        close(comms)
        del comms
        next(made, None)
        del made
        assert [engine() for engine in engines] == [None, None]
    finally:
        gc.enable()
