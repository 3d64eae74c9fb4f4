"""A rank that fails while it makes a subset leaves none of the others waiting, however slow."""

from __future__ import annotations

import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ringcoll.errors import MachineError, OutOfMemory
from ringcoll.fabric import mapping, process
from ringcoll.fabric.control import Control
from ringcoll.fabric.process import ProcessFabric, process_fabric

NRANKS = 3
LONG = 60.0  # seconds: a deadline that no passing test reaches
PAUSE = 0.1  # seconds by which a slow rank looks later than all others


class Meeting:
    """The bootstrap of ranks that are threads here, as their fabric takes them for processes."""

    def __init__(self, rank: int, barrier: threading.Barrier, sent: list[bytes]) -> None:
        self.rank, self.nranks = rank, NRANKS
        self._barrier, self._sent = barrier, sent

    def allgather(self, payload: bytes) -> list[bytes]:
        self._sent[self.rank] = payload
        self._barrier.wait(LONG)
        found = list(self._sent)
        self._barrier.wait(LONG)
        return found


def ranked() -> int:
    """The rank of this thread."""
    return int(threading.current_thread().name)


def each(work):
    """What the work gives on every rank's fabric, by rank."""
    barrier, sent = threading.Barrier(NRANKS), [b""] * NRANKS
    results: list = [None] * NRANKS

    def run(rank: int) -> None:
        threading.current_thread().name = str(rank)
        fabric = process_fabric(Meeting(rank, barrier, sent), timeout=LONG)
        try:
            results[rank] = work(fabric)
            barrier.wait(LONG)
        finally:
            fabric.close()

    with ThreadPoolExecutor(NRANKS) as pool:
        for future in [pool.submit(run, rank) for rank in range(NRANKS)]:
            future.result()
    return results


@pytest.fixture
def slow(monkeypatch):
    """The ranks that look for the others' posts only when these may have gone on."""
    those: set[int] = set()
    usual = ProcessFabric._await_members

    def waiting(self, *args, **kwargs):
        if self.rank in those:
            time.sleep(PAUSE)
        usual(self, *args, **kwargs)

    monkeypatch.setattr(ProcessFabric, "_await_members", waiting)
    return those


@pytest.fixture
def failing(monkeypatch):
    """Make a function raise on rank 1 once it is begun; undone by a call without an error."""
    raised: dict[str, BaseException] = {}

    def fail(owner, name, error):
        usual = getattr(owner, name)

        def instead(*args, **kwargs):
            if ranked() == 1 and name in raised:
                raise raised[name]
            return usual(*args, **kwargs)

        monkeypatch.setattr(owner, name, instead)
        return lambda on: raised.update({name: error}) if on else raised.pop(name, None)

    return fail


def attempt(fabric, what="split", members=range(NRANKS)):
    """The error of a subset, and how long the rank was in it."""
    began = time.monotonic()
    try:
        fabric.subset(members, what=what).close()
    except (MachineError, MemoryError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "no error", time.monotonic() - began


STEPS = {
    "identity": (process, "identity", OSError(errno.EMFILE, "no room")),
    "memory": (mapping, "create", OutOfMemory("no room")),
    "mapping": (mapping, "attach", MachineError("no room")),
    "fence": (process, "fence_of", MachineError("no room")),
    # What no step expects is reported by the next one.
    "surprise": (Control, "__init__", MemoryError("no room")),
}


@pytest.mark.parametrize("late", [{0}, {0, 2}, {1}], ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_all_ranks_raise_the_failure_of_one(step, late, slow, failing):
    switch = failing(*STEPS[step])

    def work(fabric):
        if fabric.rank == 1:
            slow.update(late)
            switch(True)
        fabric.allgather(b"", what="armed")
        said = attempt(fabric)
        if fabric.rank == 1:
            switch(False)
        return said

    results = each(work)
    kind = type(STEPS[step][2])
    own = f"{kind.__name__}: no room"
    if step == "identity":
        lack = "no file descriptor is left ([Errno 24] no room)"
        own = f"MachineError: split: {lack}: raise ulimit -n"
    assert results[1][0] == own
    told = "OutOfMemory" if issubclass(kind, MemoryError) else "MachineError"
    for rank in (0, 2):
        assert results[rank][0] == f"{told}: rank 1 failed: {own.partition(': ')[2]}"
    assert max(took for _, took in results) < LONG / 2


@pytest.mark.parametrize("late", [{0}, {2}], ids=str)
def test_who_goes_on_at_once_overwrites_nothing(late, slow, failing):
    """The next rendezvous begins as soon as a rank knows of the failure, among other ranks too."""
    switch = failing(*STEPS["memory"])
    others = [rank for rank in range(NRANKS) if rank not in late]

    def work(fabric):
        if fabric.rank == 1:
            slow.update(late)
            switch(True)
        fabric.allgather(b"", what="armed")
        said = [attempt(fabric)]
        if fabric.rank == 1:
            switch(False)
        if fabric.rank in others:
            said.append(attempt(fabric, "shrink", others))
        said.append(attempt(fabric))
        return said

    results = each(work)
    for rank, said in enumerate(results):
        assert "no room" in said[0][0]
        assert [error for error, _ in said[1:]] == ["no error"] * (len(said) - 1), rank
        assert max(took for _, took in said) < LONG / 2
