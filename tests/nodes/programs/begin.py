"""Beginning on several nodes: ``python begin.py SCENARIO,... WORD``."""

import gc
import os
import signal
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import ringcoll
from ringcoll.communicator import rank
from tests.processes.programs.setting import own_rank, perform
from tests.processes.programs.verdict import error_of, say


def part(comm, color, key=0) -> ringcoll.Communicator:
    found = comm.split(color, key=key)
    if found is None:
        raise RuntimeError("a colour, and no communicator")
    return found


def total(comm, count=1000) -> float:
    array = np.full(count, comm.rank + 1.0)
    comm.all_reduce(array)
    return float(array[-1])


def places() -> dict:
    """Who is where; and so for a communicator of MPI's own, and for a split."""
    from mpi4py import MPI

    seen = []
    with ringcoll.init(timeout=20) as comm:
        seen.append([comm.node, comm.nnodes, comm.local_rank, total(comm)])
        with part(comm, 0, -comm.rank) as turned:
            seen.append([turned.node, turned.nnodes, turned.local_rank, total(turned)])
        with part(comm, comm.node) as inside:
            seen.append([inside.node, inside.nnodes, inside.local_rank, total(inside)])
    half = MPI.COMM_WORLD.Split(own_rank() // 2, own_rank())
    with ringcoll.init(half, timeout=20) as some:
        seen.append([some.node, some.nnodes, some.local_rank, total(some)])
    return {"seen": seen}


def level() -> dict:
    """MPI initialised for one thread only; then for one at a time."""
    import mpi4py

    mpi4py.rc.thread_level = sys.argv[2]
    error = error_of(ringcoll.init, timeout=20)
    if error != "no error":
        return {"error": error}
    with ringcoll.init(timeout=20) as comm:
        arrays = [np.full(100_000, comm.rank + 1.0) for _ in range(4)]
        works = [comm.all_reduce(array, async_op=True) for array in arrays]
        for work in works:
            work.wait() if work is not None else None
        return {"error": error, "sums": [float(array[0]) for array in arrays]}


def absent() -> dict:
    """Rank 2 comes too late."""
    from mpi4py import MPI

    if own_rank() == 2:
        time.sleep(4)
        return {"error": "slept"}
    # On a busy machine rank 0 says later than half a second after its deadline who is late.
    error = error_of(ringcoll.init, timeout=2)
    MPI.Is_initialized()
    time.sleep(2.5)
    return {"error": error}


def dies() -> dict:
    """Rank 2 is killed while the ranks make their fabric; who is told of it ends as it likes."""
    from ringcoll.fabric import nodes, opening

    def die(*_args: object, **_how: object) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit

    of_one: Any = opening
    of_several: Any = nodes
    if own_rank() == 2:
        of_several.connect = of_one.process_fabric = die
    error = error_of(ringcoll.init, timeout=20)  # a busy machine starts some late
    say(own_rank(), error=error)
    sys.exit(3 + own_rank())


def leaves() -> dict:
    """Rank 2 ends before a call of MPI that all ranks make, which has no deadline of its own."""
    from ringcoll.bootstrap import mpi_world

    of_mpi: Any = mpi_world

    def leave(*_args: object, **_how: object) -> NoReturn:
        if sys.argv[2] == "exit":
            sys.exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit

    if own_rank() == 2:
        setattr(of_mpi, {"exit": "load_mpi", "kill": "_communicator"}[sys.argv[2]], leave)
    started = time.monotonic()
    error = error_of(ringcoll.init, timeout=20)
    say(own_rank(), error=error, early=time.monotonic() - started < 20)
    sys.exit(3 + own_rank())


def full() -> dict:
    """One node has no room; then it has."""
    from ringcoll.errors import OutOfMemory
    from ringcoll.fabric import mapping

    of_fabric: Any = mapping
    create = of_fabric.create

    def refuse(*args: object) -> NoReturn:
        raise OutOfMemory("no room")

    with ringcoll.init(timeout=20) as before:
        if os.environ["RINGCOLL_NODE"] == "b":
            of_fabric.create = refuse
        begun = time.monotonic()
        error = error_of(ringcoll.init, timeout=20)
        took = time.monotonic() - begun
        of_fabric.create = create
        sums = [total(before)]
        with ringcoll.init(timeout=20) as comm:
            return {"error": error, "early": took < 20, "sums": [*sums, total(comm)]}


def finalized() -> dict:
    """The program ends MPI under a communicator; later calls are refused in words."""
    from mpi4py import MPI

    comm = ringcoll.init(timeout=20)
    before = total(comm)
    MPI.Finalize()
    errors = [error_of(total, comm), error_of(comm.barrier), error_of(comm.empty, 10)]
    comm.close()
    return {"sum": before, "errors": errors, "again": error_of(ringcoll.init, timeout=20)}


def many() -> dict:
    """Communicators come and go and leave nothing open; each has its own messages."""
    rank.SCRATCH_BYTES = 1 << 20  # what is zeroed 20 times
    with ringcoll.init(timeout=20) as comm:
        total(comm)
        held = []
        counts = []
        for number in range(6):
            child = part(comm, number % 2 if comm.rank else 0, comm.rank)
            other = part(comm, 0)
            held.append([total(other), total(comm)])
            child.close()
            other.close()
            with ringcoll.init(timeout=20) as new:
                held[-1].append(total(new))
            counts.append(len(list(Path("/proc/self/fd").iterdir())))
    worlds = []
    for _ in range(3):
        with ringcoll.init(timeout=20):
            pass
        gc.collect()
        worlds.append(len(list(Path("/proc/self/fd").iterdir())))
    return {"sums": held, "grown": max(counts[-1] - counts[2], worlds[-1] - worlds[0])}


def threads() -> dict:
    """Two threads make communicators at the same time, each from one of its own."""
    from ringcoll.fabric import mpi

    carrier: Any = mpi.Carrier
    made = carrier.messages

    def late(*args):
        time.sleep(0.05)  # so that the other thread is there too
        return made(*args)

    carrier.messages = late

    def use(comm, key: int) -> list[float]:
        sums = []
        for _ in range(2):
            with part(comm, 0, comm.rank) as child:
                array = np.full(3000, float(key * (comm.rank + 1)))
                child.all_reduce(array)
                sums.append(float(array[0]))
        return sums

    with ringcoll.init(timeout=20) as one, part(one, 0) as two, ThreadPoolExecutor(2) as pool:
        works = [pool.submit(use, comm, key) for comm, key in ((one, 1), (two, 10))]
        sums = [work.result() for work in works]
    carrier.messages = made
    return {"sums": sums}


def overlapping() -> dict:
    """Each rank makes a communicator with each of its two peers, in two threads at once."""
    from mpi4py import MPI

    from ringcoll.bootstrap import mpi_world

    world, me = MPI.COMM_WORLD, own_rank()
    ids = np.zeros((3, 300), np.uint8)
    if me == 0:
        for row in ids:
            text = ringcoll.unique_id().encode()
            row[: len(text)] = bytearray(text)
    world.Bcast(ids)
    make = mpi_world._communicator

    def late(*args):
        time.sleep(0.2)  # so that the other thread is there too
        return make(*args)

    mpi_world._communicator = late

    def use(pair: int) -> float:
        members = pair, (pair + 1) % 3
        text, rank = bytes(ids[pair]).rstrip(b"\0").decode(), members.index(me)
        with ringcoll.init(id=text, rank=rank, nranks=2, timeout=20) as comm:
            array = np.full(3000, float(me + 1))
            comm.all_reduce(array)
            return float(array[0])

    with ThreadPoolExecutor(2) as pool:
        return {"sums": [*pool.map(use, (me, (me - 1) % 3))]}


def forgotten() -> dict:
    """Rank 1 drops a communicator without closing it: its receives end, and peers are told."""
    with ringcoll.init(timeout=20) as comm:
        child = part(comm, 0)
        total(child)
        error = "none"
        if comm.rank == 1:
            messages = child._state.fabric.messages
            awaited = dict(messages._awaited) if messages is not None else {}
            before, gone = len(awaited), weakref.ref(child)
            del child
            gc.collect()
            after = len(messages._awaited) if messages is not None else -1
            error = f"{before} {after} {gone() is None}"
        else:
            error = error_of(child.barrier)
            child.close()
        return {"error": error, "sum": total(comm)}


def explained() -> dict:
    with ringcoll.init(timeout=20) as comm:
        return {"said": comm.explain("all_reduce", 64 << 20)}


if __name__ == "__main__":
    perform(globals())
