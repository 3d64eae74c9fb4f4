"""A stand-in for CUDA's runtime, and ranks that share it."""

from __future__ import annotations

import json
import os
import sys
import threading
import types
from pathlib import Path

import pytest

from ringcoll.bootstrap import run_ranks
from ringcoll.cuda import device, driver, quarantine
from ringcoll.executors.cuda.recounted_messages import RecountedMessages
from ringcoll.fabric import each, thread_fabrics
from ringcoll.transports import handles, peers

PROGRAM = Path(__file__).with_name("program.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def known(monkeypatch):
    """A rank whose launches are noted, and what the compiled part knows of its calls."""
    pytest.importorskip("cupy")
    from tests.gpu.known_calls import Known

    monkeypatch.setattr("ringcoll.executors.cuda.launches.address_of", lambda _name: 0)
    made: list[Known] = []
    monkeypatch.setattr("cupy.cuda.get_current_stream", lambda _ordinal: made[0].stream)
    made.append(Known())
    return made[0]


@pytest.fixture
def new(monkeypatch):
    """The counts of each launch of messages that was recounted."""
    found = list[tuple[int, ...]]()
    honest = RecountedMessages.launch

    def launch(self, new):
        found.append(new.counts)
        return honest(self, new)

    monkeypatch.setattr(RecountedMessages, "launch", launch)
    return found


@pytest.fixture
def blocks(monkeypatch):
    """The CUDA blocks of each launch of messages that was recounted."""
    found = list[int]()
    honest = RecountedMessages.launch

    def launch(self, new):
        made = honest(self, new)
        found.append(made[0].blocks)
        return made

    monkeypatch.setattr(RecountedMessages, "launch", launch)
    return found


@pytest.fixture
def stand_in(monkeypatch):
    """Make a runtime with the given properties and let CuPy have it."""
    pytest.importorskip("cupy")
    from tests.gpu.stand_in import Runtime
    from tests.gpu.stand_in_driver import Driver

    def make(*args, **kwargs):
        runtime = Runtime(*args, **kwargs)
        monkeypatch.setattr("cupy.cuda.runtime", runtime)
        runtime.driver = Driver(runtime)
        monkeypatch.setattr(driver, "_driver", lambda: runtime.driver)
        return runtime

    quarantine._dropped.clear()  # of other runtimes
    yield make
    quarantine._waiting.clear()


@pytest.fixture
def gpus(monkeypatch):
    """Three GPUs of host memory, whose kernels run on the CPU."""
    from tests.gpu.fake_gpus import fake

    made = fake(monkeypatch, 3, sms=24)
    yield made
    made.close()


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
    monkeypatch.setattr(handles, "os", named)
    monkeypatch.setattr(peers, "is_gone", ranks.dead.__contains__)
    return ranks


@pytest.fixture(params=["threads", "processes"])
def scenario(request, tmp_path):
    """Every rank's result of a scenario; rank r is on device r modulo their number."""

    def threads(name, nranks):
        from tests.gpu.program import SCENARIOS

        count = len(device.devices())
        work = SCENARIOS[name]
        return each(thread_fabrics(nranks, 60), lambda fabric: work(fabric, fabric.rank % count))

    def processes(name, nranks):
        path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
        argv = [sys.executable, str(PROGRAM), name, str(tmp_path)]
        assert run_ranks(argv, nranks, env={**os.environ, "PYTHONPATH": path}) == [0] * nranks
        return [json.loads((tmp_path / str(rank)).read_text()) for rank in range(nranks)]

    return threads if request.param == "threads" else processes
