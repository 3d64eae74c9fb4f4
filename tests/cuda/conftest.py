"""A stand-in for CUDA's runtime, and ranks that share it."""

from __future__ import annotations

import threading
import types

import pytest

from ringcoll.fabric import each, thread_fabrics
from ringcoll.transports.cuda import peers, reach, retired


@pytest.fixture
def stand_in(monkeypatch):
    """Make a runtime with the given properties and let CuPy have it."""
    pytest.importorskip("cupy")
    from tests.cuda.stand_in import Runtime

    def make(*args, **kwargs):
        runtime = Runtime(*args, **kwargs)
        monkeypatch.setattr("cupy.cuda.runtime", runtime)
        return runtime

    yield make
    retired._waiting.clear()


@pytest.fixture
def together():
    """Every rank's result of a function of its fabric, and the error if all raise it alike."""

    def run(nranks, function):
        return each(thread_fabrics(nranks, 20), function)

    return run


class Apart:
    """Runs ranks each of which takes itself for a process of its own, 1000 + its rank."""

    def __init__(self):
        self.dead: set[int] = set()
        self.local = threading.local()

    def __call__(self, nranks, function):
        def call(fabric):
            fabric.threads = False
            self.local.pid = 1000 + fabric.rank
            return function(fabric)

        return each(thread_fabrics(nranks, 20), call)


@pytest.fixture
def apart(monkeypatch):
    """The same, where every rank takes itself for a process of its own."""
    ranks = Apart()
    named = types.SimpleNamespace(getpid=lambda: getattr(ranks.local, "pid", 1))
    monkeypatch.setattr(reach, "os", named)
    monkeypatch.setattr(peers, "_gone", ranks.dead.__contains__)
    return ranks
