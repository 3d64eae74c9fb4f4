"""Ranks of an id that are threads of one process, and threads that begin over anything else."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import ringcoll
from ringcoll.bootstrap import overlap
from ringcoll.bootstrap.contract import Failure
from ringcoll.errors import AbortedError, MismatchError, RankLostError, UsageError
from tests.fabric.test_store_bootstrap import Kept
from tests.launching import launch


def in_threads(functions):
    """What functions returned or raised, each on a thread of its own."""
    found = {}

    def run(number, function):
        try:
            found[number] = function()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=one) for one in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(functions))]


def rank_of(given, rank, nranks, work, **how):
    def run():
        how_ = {"device": "cpu", "timeout": 20, **how}
        with ringcoll.init(id=given, rank=rank, nranks=nranks, **how_) as comm:
            return work(comm)

    return run


def calls(comm):
    """A call of each kind: large, in symmetric memory, of children, asynchronous, a message."""
    large = np.full(100_000, comm.rank + 1.0)
    comm.all_reduce(large)
    shared = comm.empty(10, "float32")
    shared[:] = comm.rank
    comm.all_reduce(shared)
    with comm.split(comm.rank % 2) as child:
        part = np.ones(4)
        child.all_reduce(part, async_op=True).wait()
    word = np.array([comm.rank])
    right, left = ((comm.rank + step) % comm.nranks for step in (1, -1))
    comm.sendrecv(word, right, received := np.zeros_like(word), left)
    return [float(word[-1]) for word in (large, shared, part, received)]


def wanted(nranks):
    total = nranks * (nranks + 1) / 2
    evens = (nranks + 1) // 2
    return [
        [total, total - nranks, evens if rank % 2 == 0 else nranks - evens, (rank - 1) % nranks]
        for rank in range(nranks)
    ]


@pytest.mark.parametrize("nranks", [2, 5])
def test_every_rank_is_a_thread(nranks):
    given = ringcoll.unique_id("127.0.0.1")
    for _ in range(2):  # one id serves a world after the other
        ranks = [rank_of(given, rank, nranks, calls) for rank in range(nranks)]
        assert in_threads(ranks) == wanted(nranks)


def test_two_ids_at_the_same_time():
    ids = [ringcoll.unique_id("127.0.0.1") for _ in range(2)]
    ranks = [rank_of(given, rank, 3, calls) for given in ids for rank in range(3)]
    assert in_threads(ranks) == wanted(3) * 2


def test_a_thread_that_ends_without_closing_is_lost_at_once():
    given, comms = ringcoll.unique_id("127.0.0.1"), {}

    def begin(rank):
        comms[rank] = ringcoll.init(id=given, rank=rank, nranks=2, device="cpu", timeout=60)
        comms[rank].barrier()

    def stay():
        begin(0)
        began = time.monotonic()
        with pytest.raises(RankLostError, match="rank 1"):
            comms[0].all_reduce(np.ones(3))
        return time.monotonic() - began < 30

    assert in_threads([stay, lambda: begin(1)]) == [True, None]
    for comm in comms.values():
        comm.close()


def test_a_rank_that_two_threads_take_is_named():
    given = ringcoll.unique_id("127.0.0.1")
    ranks = [rank_of(given, 0, 2, calls, timeout=60) for _ in range(2)]
    for error in in_threads(ranks):
        assert isinstance(error, MismatchError)
        assert str(error).count("(thread ") == 2


MIXED = """
import json, sys, threading
import ringcoll
from tests.fabric.test_id_threads import calls, in_threads, rank_of
given, first = sys.argv[1], int(sys.argv[2])
print(json.dumps(in_threads([rank_of(given, first + more, 4, calls) for more in range(2)])))
"""


def started(*argv):
    return subprocess.Popen([*argv], stdout=subprocess.PIPE, text=True)


def test_two_processes_of_two_threads_each():
    given = ringcoll.unique_id("127.0.0.1")
    argv = [sys.executable, "-c", MIXED, given]
    processes = [started(*argv, first) for first in ("0", "2")]
    found = [process.communicate(timeout=100)[0] for process in processes]
    assert [result for text in found for result in json.loads(text)] == wanted(4)


OVER_MPI = """
import json, os, pathlib, sys, threading, time
import ringcoll
from ringcoll.bootstrap import joining, mpi, overlap, sockets
from tests.fabric.test_id_threads import calls, in_threads, rank_of
if sys.argv[1] == "comms":
    from mpi4py import MPI
    worlds = [MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Dup()]
elif sys.argv[1] == "mixed":
    from mpi4py import MPI
    given = MPI.COMM_WORLD.bcast(ringcoll.unique_id("127.0.0.1") if not MPI.COMM_WORLD.rank else 0)
else:
    worlds = [None] * 2
late = sys.argv[1] == "late" and os.environ["PMI_RANK"] == "1"
came, ended, entered = threading.Barrier(2), threading.Event(), threading.local()
def enter(world):
    try:
        overlap.enter(world)
    finally:
        if not (late or sys.argv[1] == "mixed" or hasattr(entered, "once")):
            entered.once = True
            came.wait()  # else a thread may begin when the other's has ended
joining.enter = mpi.enter = sockets.enter = enter
def total(number, world):
    def run():
        if late and number:
            ended.wait()
        try:
            with ringcoll.init(world, device="cpu", timeout=60) as comm:
                return calls(comm)
        finally:
            ended.set()
    return run
rank, folder = int(os.environ["PMI_RANK"]), pathlib.Path(sys.argv[2])
(folder / str(rank)).touch()  # a rank that begins after another's refusal would wait for it
while len([*folder.iterdir()]) < 2:
    time.sleep(0.01)
began = time.monotonic()
if sys.argv[1] == "mixed":
    found = in_threads([rank_of(given, 2 * rank + more, 4, calls) for more in range(2)])
else:
    found = in_threads([total(*one) for one in enumerate(worlds)])
    if any(isinstance(one, Exception) for one in found):  # one's own, or of the first that failed
        found = ["two threads of this process" in str(one) for one in found]
print(str(rank) + " " + json.dumps([found, time.monotonic() - began < 30]) + "\\n", end="")
"""
REFUSED = [[True] * 2, True]


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "seen"),
    [
        ("launcher", [REFUSED] * 2),
        ("late", [REFUSED] * 2),
        ("comms", [REFUSED] * 2),
        ("mixed", [[wanted(4)[:2], True], [wanted(4)[2:], True]]),
    ],
)
def test_threads_under_mpiexec(how, seen, tmp_path):
    """Ranks of a process need an id, whatever MPI's communicators they have.

    Late: rank 1's second thread begins when its first has failed, because rank 0's had begun at
    the same time.
    """
    process = started(*launch(2), sys.executable, "-c", OVER_MPI, how, tmp_path)
    out = process.communicate(timeout=100)[0]
    assert process.returncode == 0
    lines = sorted(line.split(maxsplit=1) for line in out.splitlines())
    assert [json.loads(text) for _, text in lines] == seen


def test_threads_over_one_store_are_refused_and_nobody_waits(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    store = Kept()
    found = in_threads([lambda: ringcoll.init(store, device="cpu", timeout=60)] * 2)
    names = {str(error).split("'")[1] for error in found}
    assert all(isinstance(error, UsageError) for error in found)
    assert len(names) == 2  # each names the other
    assert b"two threads of this process" in store.values["ringcoll/1/failure"]
    assert not overlap._beginning


def test_a_thread_that_comes_when_all_ranks_have_met_waits_for_the_first():
    store = Kept()
    overlap.enter(store)
    overlap.commit()

    def begin():
        overlap.enter(store)
        overlap.leave()

    second = threading.Thread(target=begin)
    second.start()
    second.join(0.05)
    assert second.is_alive()
    overlap.check()
    overlap.leave()
    second.join()
    assert not overlap._beginning


def test_a_peers_refusal_is_every_threads_once():
    store, failure = Kept(), Failure("AbortedError", "of rank 1", overlap=True)

    def first():
        overlap.enter(store)
        raised = Failure.decode(failure.encode()).error()
        overlap.leave()
        raise raised

    def twice():
        with pytest.raises(AbortedError, match="of rank 1"):
            overlap.enter(store)
        overlap.enter(store)
        overlap.leave()

    for function, found in ((first, failure.error()), (twice, None), (twice, None)):
        assert repr(in_threads([function])) == repr([found])
    assert not overlap._beginning


def test_the_world_of_a_thread_that_has_ended_is_free():
    store = Kept()
    in_threads([lambda: overlap.enter(store)])
    overlap.enter(store)
    overlap.check()
    overlap.leave()
    assert not overlap._beginning


def test_a_thread_does_not_wait_for_ever_for_one_that_has_met_the_others(monkeypatch):
    monkeypatch.setattr(overlap, "_KEPT", 0.05)
    store, held = Kept(), threading.Event()

    def first():
        overlap.enter(store)
        overlap.commit()
        held.wait(20)
        overlap.leave()

    thread = threading.Thread(target=first)
    thread.start()
    while not any(one.committed for one in [*overlap._beginning.values()]):
        time.sleep(0.001)
    with pytest.raises(UsageError, match="two threads of this process"):
        overlap.enter(store)
    held.set()
    thread.join()
    overlap.enter(store)
    overlap.leave()
