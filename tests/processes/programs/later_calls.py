"""Asynchronous collectives by the compiled part; small_calls.py runs them."""

import time

import numpy as np

from tests.processes.programs.compiled import is_compiled, mixed, warm
from tests.processes.programs.setting import SHORT
from tests.processes.programs.verdict import error_of


def later() -> dict:
    """Asynchronous calls: several under way, beside messages and blocking calls, not waited for."""
    counted, seen, shown = mixed(), [], ""
    comm, n = counted.comm, counted.comm.nranks
    right, left = (comm.rank + 1) % n, (comm.rank - 1) % n
    x, y = np.empty(10, "f4"), np.empty(10, "f4")
    arrays = [np.empty(10, "f4") for _ in range(3)]
    for turn in range(60):
        if turn % n == comm.rank:
            time.sleep(0.001)
        x[:], y[:] = 1, comm.rank
        work = comm.all_reduce(x, async_op=True)
        if turn % 2:
            comm.sendrecv(y.copy(), right, y, left)
            seen.append(float(y[0]) == left)
        if turn % 3 == 0:
            y[:] = 2
            comm.all_reduce(y)  # behind the call that is under way
            seen.append((float(x[0]), float(y[0]), work.done()) == (n, 2 * n, True))
        work.wait()
        seen.append((float(x[0]), work.done(), work.exception()) == (n, True, None))
        for array in arrays:
            array[:] = 3
        works = [comm.all_reduce(array, async_op=True) for array in arrays]
        for work in works[:: -1 if turn % 2 else 1]:
            work.wait(timeout=9 if turn % 5 == 0 else None)
        seen.append([float(array[0]) for array in arrays] == [3 * n] * 3)
    x[:] = 1
    comm.all_reduce(x, async_op=True)  # the worker moves it
    late = time.monotonic() + 9
    while x[0] != n and time.monotonic() < late:
        time.sleep(0.001)
    seen.append(float(x[0]) == n)
    comm.barrier()
    for _ in range(2):  # one of which looks, in Python, at who has died
        comm.all_reduce(y)
    x[:], before = 1, counted.made
    if comm.rank == 1:
        time.sleep(0.01)
        error_of(comm.all_reduce, x)  # one that was left to Python has not been entered
    else:
        shown = repr(comm.all_reduce(x, async_op=True))
    comm.close()  # what peers have seen is let end
    return {
        "seen": seen,
        "last": {
            "entered": counted.made > before or not is_compiled(),
            "ended": float(x[0]) == n,
        },
        "shown": shown,
        "made": counted.made,
        "handed over": counted.handed_over,
        "compiled": is_compiled(),
    }


def later_errors() -> dict:
    """Asynchronous calls that end badly, when they are waited for."""
    seen = {}
    comm = mixed().comm
    x = warm(comm)
    for _ in range(6):
        comm.all_reduce(x, async_op=True).wait()
    count = 11 if comm.rank == 1 else 10
    seen["count"] = error_of(lambda: comm.all_reduce(np.ones(count, "f4"), async_op=True).wait())
    comm = mixed().comm
    x = warm(comm)
    for _ in range(6):
        comm.all_reduce(x, async_op=True).wait()
    if comm.rank == 1:
        time.sleep(4 * SHORT)
    seen["late"] = error_of(lambda: comm.all_reduce(x, async_op=True, timeout=SHORT).wait())
    comm = mixed().comm
    x = warm(comm)
    for _ in range(6):
        comm.all_reduce(x, async_op=True).wait()
    if comm.rank == 1:
        comm.abort("enough")
    seen["aborted"] = error_of(lambda: comm.all_reduce(x, async_op=True).wait())
    return seen
