"""How calls, communicators and processes end: ``python lives.py SCENARIO WORD`` on every rank."""

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import ringcoll
from ringcoll.communicator import rank
from tests.processes.programs.setting import (
    LARGE,
    SHORT,
    SMALL,
    again,
    begin,
    die,
    numbers,
    perform,
)
from tests.processes.programs.verdict import error_of, say


class Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record) -> None:
        self.said.append(record.getMessage())


def asynchronous() -> dict:
    """Errors in the thread of asynchronous calls, and close() while it works."""
    handler = Records()
    logging.getLogger("ringcoll").addHandler(handler)
    seen: dict = {}
    with begin() as comm:
        child = again(comm)
        count = SMALL + (comm.rank == 1)
        works = [child.all_reduce(numbers(c), async_op=True) for c in (SMALL, count, SMALL)]
        seen["waits"] = [error_of(work.wait, 10) for work in works]
        seen["exceptions"] = [type(work.exception()).__name__ for work in works]
        seen["synchronize"] = error_of(child.synchronize)
        child.close()

        # Nobody waits: the error comes by the end of the block.
        def unseen() -> None:
            with again(comm) as child:
                child.all_reduce(numbers(SMALL + (comm.rank == 1)), async_op=True)

        seen["end of block"] = error_of(unseen)

        # Nobody even looks: it is logged.
        handler.said.clear()
        child = again(comm)
        work = child.all_reduce(numbers(SMALL + (comm.rank == 1)), async_op=True)
        while not work.done():
            time.sleep(0.01)
        child.close()
        seen["logged"] = any("different calls" in record for record in handler.said)

        # close() at every moment of a call.
        ended = []
        for number in range(30):
            child = again(comm)
            work = child.all_reduce(numbers(), async_op=True)
            if number % 3:
                time.sleep(number * 2e-5)
            child.close()
            ended.append(work.done())
            error_of(comm.barrier)
        seen["ended"] = all(ended)
    return seen


def forked() -> dict:
    """A child of rank 0 may not use the communicator, even one that is busy; the rank goes on."""
    comm = begin()
    other = again(comm)
    said = ""
    if comm.rank == 0:
        got = np.zeros(SMALL, "float32")
        work = comm.recv(got, 1, async_op=True)
        time.sleep(0.05)  # its thread waits, and holds the communicator's lock
        read, write = os.pipe()
        if os.fork() == 0:
            x = numbers()
            errors = [
                error_of(comm.all_reduce, x),
                error_of(comm.all_reduce, x, async_op=True),
                error_of(comm.send, x, 1),
                error_of(comm.empty, 10),
                error_of(comm.split, 0),
                error_of(comm.check),
                error_of(comm.synchronize),
            ]
            comm.abort("from the child")
            comm.close()
            os.write(write, "|".join(errors).encode())
            sys.exit(0)  # through all exit functions
        os.close(write)
        os.wait()
        said = os.read(read, 1 << 16).decode()
        other.barrier()
        work.wait()
    else:
        other.barrier()
        comm.send(numbers(), 0)
    x = numbers()
    comm.all_reduce(x)
    comm.close()
    other.close()
    return {"said": said, "sum": float(x[0])}


def held() -> list[int]:
    """Descriptors, threads and shared maps of this process."""
    own = Path("/proc/self")
    maps = (own / "maps").read_text().count("memfd:ringcoll")
    return [len(list((own / part).iterdir())) for part in ("fd", "task")] + [maps]


def close_lets_go() -> dict:
    """Of all memory, whatever the communicator was used for, and though it is still referred to."""
    seen = {}
    for name, last in {
        "rooted": lambda c: c.broadcast(numbers(LARGE)),
        "pair": lambda c: c.sendrecv(numbers(), 1 - c.rank, numbers(LARGE), 1 - c.rank),
        "mismatch": lambda c: c.all_reduce(numbers(LARGE + c.rank)),
        "deadline": lambda c: c.recv(numbers(LARGE), 1 - c.rank, timeout=SHORT),
    }.items():
        comm = begin()
        arrays = [numbers(), numbers(LARGE), comm.empty(LARGE)]
        for array in arrays:
            comm.all_reduce(array)
            comm.reduce(array, async_op=True).wait()
        error = error_of(last, comm)
        del array, arrays
        comm.close()
        seen[name] = [error, held()[2]]
    return seen


def close_in_a_finalizer() -> dict:
    """Of an object in a circle, which only the collector finds."""

    class Owner:
        def __init__(self, comm: ringcoll.Communicator) -> None:
            self.comm, self.itself = comm, self

        def __del__(self) -> None:
            closings.append(error_of(self.comm.close))

    closings: list[str] = []
    with begin() as comm:
        before = held()[::2]
        for _ in range(3):
            part = again(comm)
            received = part.recv(numbers(), 1 - part.rank, async_op=True)
            part.send(numbers(), 1 - part.rank)
            received.wait()
            Owner(part)
            del part, received
            gc.collect()
            comm.barrier()
        left = [now - then for now, then in zip(held()[::2], before, strict=True)]
        threads = [thread.name for thread in threading.enumerate()[1:]]
        return {"closings": closings, "left": left, "threads": threads}


def handled() -> dict:
    """Signals in waits for asynchronous calls, which rank 1 makes when it hears of the signal."""

    def hears() -> None:
        comm.send(numbers(), 1) if comm.rank == 0 else comm.recv(numbers(), 0)

    def wait_signalled(handler: Callable[[], None], work: ringcoll.Work) -> str:
        signal.signal(signal.SIGALRM, lambda *_: handler())
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            return error_of(work.wait)
        except TimeoutError as error:
            return str(error)

    def stop() -> None:
        raise TimeoutError("of the handler")

    def close() -> None:
        hears()
        child.close()

    comm = begin()
    first, second = np.ones(3), np.ones(3)
    seen: dict = {}
    child = again(comm)
    if comm.rank == 0:  # another thread's call holds the communicator
        thread = threading.Thread(target=child.all_reduce, args=(first,))
        thread.start()
        while child._state.executor.running is None:
            time.sleep(0.001)
        work = child.all_reduce(second, op="max", async_op=True)
        seen["stopped"] = wait_signalled(stop, work)
        hears()
        thread.join()
        seen["then"] = error_of(work.wait)
    else:
        hears()
        child.all_reduce(first)
        child.all_reduce(second, op="max")
    seen["sum"], seen["max"] = float(first[0]), float(second[0])
    if comm.rank == 0:  # a handler that closes
        works = [child.all_reduce(first, async_op=True) for _ in range(2)]
        seen["closed"] = wait_signalled(close, works[0])
        seen["refused"] = error_of(works[1].wait)
        comm.barrier()
    else:
        hears()
        child.all_reduce(first)
        comm.barrier()  # an abort that came earlier could meet the other rank's end of that call
        child.abort()
    seen["last"] = float(first[0])
    work = again(comm).all_reduce(second, async_op=True)  # its communicator is dropped
    seen["dropped"] = error_of(work.wait)
    seen["of the dropped"] = float(second[0])
    return seen


def leaks() -> dict:
    """What a process holds that makes and closes many communicators."""

    counts = []
    rank.SCRATCH_BYTES = 1 << 20  # what is zeroed for each
    with begin() as comm:
        kept = comm.empty(20_000)
        for number in range(60):
            child = comm.split(0, key=-comm.rank if number % 2 else comm.rank)
            child.all_reduce(kept)
            own = child.empty(10_000)
            child.all_reduce(own)
            child.barrier(async_op=True).wait()
            if number % 4:
                child.close()
            comm.barrier()
            del child, own  # one in four is only dropped
            if number % 6 == 5:
                gc.collect()  # how soon Python does so by itself depends on all that it allocates
                counts.append(held())
    return {"counts": counts}


def views_outlive() -> dict:
    """Arrays, views of them and kept calls outlive communicators, parents and children."""
    comm = begin()
    array = comm.empty(LARGE)
    view, column = array[10:20], array.reshape(-1, 2)[:, 1]
    plain = numbers(LARGE)
    for x in (array, plain, view):
        comm.all_reduce(x)  # kept, with rows bound to the peers' memory
    child = again(comm)
    own = child.empty(LARGE)
    child.all_reduce(own)
    comm.close()
    array[:] = child.rank
    child.all_reduce(array)  # the parent's memory
    right = np.array_equal(array, np.full_like(array, sum(range(child.nranks))))
    late = child.empty(LARGE)
    child.all_reduce(late)
    closed = error_of(comm.all_reduce, array)
    child.close()
    for x in (array, view, column, own, late):
        x[:] = 3
    return {"right": right, "closed": closed, "sum": float(view.sum() + column[0])}


def ends() -> dict:
    """How a process of an MPI world ends after a death: ``HOW`` is the third argument."""
    how = os.environ["HOW"]
    if how in ("block", "status"):
        os.environ.pop("MPI_LOCALNRANKS", None)  # as on several hosts: MPI_Finalize is to come
    comm = begin()
    comm.barrier()
    if comm.rank == 1:
        die()
    if how == "uncaught":
        comm.all_reduce(numbers())
    error = error_of(comm.all_reduce, numbers())
    if how == "shrunk":
        # Outside a ``with`` block, and the parent is never closed.
        rest = comm.shrink()
        x = numbers()
        rest.all_reduce(x)
        error += f", then {x[0]:g}"
        rest.close()
    elif how == "block":
        with comm:
            rest = comm.shrink()
            rest.barrier()
            rest.close()
    elif how == "closed":
        comm.close()
    elif how == "status":
        comm.close()
        say(comm.rank, error=error)
        sys.exit(7)
    return {"error": error}


if __name__ == "__main__":
    perform(globals())
