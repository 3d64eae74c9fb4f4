"""How messages that pend in the compiled part end where they fail: as pending_messages.py."""

import itertools
import os
import signal
import threading
import time

import numpy as np

from tests.processes.programs.compiled import Counted, near_recursion_limit
from tests.processes.programs.pending_messages import LATE, ended, looked, posted, warm
from tests.processes.programs.setting import SHORT, die, perform
from tests.processes.programs.verdict import error_of


def killed() -> dict:
    """Rank 2 dies; the others have a receive from it, or never wait for it."""
    seen = []
    comms = [Counted(True).comm for _ in range(5)]
    for comm in comms:
        warm(comm)
    y = np.zeros(10, "f4")
    if comms[0].rank == 2:
        time.sleep(0.2)
        die()

    def look(way, comm) -> None:
        other, late = 1 - comm.rank, time.monotonic() + LATE
        if way == "never":
            while time.monotonic() < late:
                for work in posted(comm, [(other, y)], [(other, np.zeros(10, "f4"))]):
                    work.wait()
        work = comm.recv(y, 2, async_op=True)
        comm.send(y, other, async_op=True)
        if way == "wait":
            work.wait()
        if way == "message":
            comm.recv(y, other)
            comm.recv(y, other)  # which has not been sent
        if way == "all_reduce":
            comm.all_reduce(y)
        while time.monotonic() < late:
            comm.check()

    for comm, way in zip(comms, ("wait", "message", "all_reduce", "check", "never"), strict=True):
        began = time.monotonic()
        said = error_of(look, way, comm)
        seen.append([said, time.monotonic() - began < LATE - 1, comm._state.is_busy()])
    return {"seen": seen}


def deep() -> dict:
    """Messages of a program near Python's recursion limit: none is lost without a word."""
    seen = []

    for free in range(6, 36, 2):
        comm = Counted(True).comm
        warm(comm)
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.005)
            for number in (11, 12):
                error_of(comm.send, np.full(10, number, "f4"), 0)
            comm.close()
            continue
        first, second = np.zeros(10, "f4"), np.zeros(10, "f4")

        def call(comm=comm, first=first) -> str:
            return error_of(lambda: comm.recv(first, 1, async_op=True).wait())

        said = near_recursion_limit(call, free)
        said += ", " + error_of(comm.recv, second, 1).split(":")[0]
        seen.append(f"{said}, {first[0]:g}, {second[0]:g}")
        comm.close()
    return {"seen": seen}


def never_comes() -> dict:
    """A receive whose message is not sent ends at its deadline, whether it is waited for or not."""
    seen = {}
    for way in ("wait", "done", "all_reduce"):
        errors = []
        for compiled in (True, False):
            counted = Counted(compiled)
            comm = counted.comm
            x, _ = warm(comm)
            for number in range(8):
                out = np.empty(10, "f4")
                work = comm.recv(out, 1 - comm.rank, async_op=True, timeout=SHORT)
                comm.send(x, 1 - comm.rank)
                if number < 7 or comm.rank:
                    work.wait()
            if comm.rank == 1:
                time.sleep(3 * SHORT)
                comm.close()
                continue
            began = time.monotonic()
            work.wait()
            looked(comm, x)
            before = counted.pending
            work = comm.recv(np.empty(10, "f4"), 1, async_op=True, timeout=SHORT)
            said = ""
            if way == "all_reduce":
                said = error_of(comm.all_reduce, x).replace("reported by rank 0: ", "")
            if way == "done":
                ended(work)
            error = error_of(work.wait)
            took = time.monotonic() - began
            errors.append([error, said, SHORT <= took < LATE, type(work.exception()).__name__])
            errors[-1].append(counted.pending > before or not compiled)
            errors[-1].append(error_of(comm.send, x, 1).split(":")[0])
            comm.close()
        seen[way] = errors
    return {"seen": seen}


def ends(sender, odd, how, compiled) -> list:
    """What a rank says of messages of other counts, and of its next call."""
    counted = Counted(compiled)
    comm, (x, _) = counted.comm, warm(counted.comm)
    warm(comm, 9)
    comm.barrier()
    looked(comm, x)
    call, other = comm.send if comm.rank == sender else comm.recv, 1 - comm.rank
    pending = counted.pending
    if how == "behind" and comm.rank == sender:  # the second one pends until the first has gone
        call(x, other)
    elif how == "behind":
        comm.barrier()
        call(x, other)
    elif comm.rank == 1:
        time.sleep(0.005)
    work = call(np.zeros(9 if comm.rank == odd else 10, "f4"), other, async_op=True)
    if how == "behind" and comm.rank == sender:
        comm.barrier()
    if how == "looks":
        ended(work)
    pended = how != "behind" or comm.rank != sender or counted.pending > pending or not compiled
    said = [error_of(work.wait), error_of(comm.all_reduce, x).split(":")[0], pended]
    comm.close()
    return said


def disagree() -> dict:
    """The ends of a message that pends say how they differ, as without the compiled part."""
    seen = {}
    for sender, odd, how in itertools.product((0, 1), (0, 1), ("waits", "looks", "behind")):
        found = [ends(sender, odd, how, compiled) for compiled in (True, False)]
        seen[f"{sender} {odd} {how}"] = found
    return {"seen": seen}


def closed() -> dict:
    """Closing ends what has been sent, and fails what has not come."""
    seen = []
    for compiled in (True, False):
        for order in (0, 1):
            counted = Counted(compiled)
            comm = counted.comm
            warm(comm)
            comm.barrier()
            if comm.rank == order:
                works = [comm.send(np.full(10, k, "f4"), 1 - order, async_op=True) for k in "012"]
                works.append(comm.recv(np.zeros(10, "f4"), 1 - order, async_op=True))
                comm.close()
                names = [type(work.exception()).__name__ for work in works]
                seen.append([names, all(work.done() for work in works)])
            else:
                time.sleep(0.01)
                out = np.zeros((2, 10), "f4")
                for row in out:
                    comm.recv(row, order)
                seen.append(out[:, 0].tolist())
                comm.close()
    return {"seen": seen}


def broken() -> dict:
    """Another call fails just behind the post of a message: that ends with it."""
    seen = []
    for compiled in (True, False):
        comm = Counted(compiled).comm
        x, _ = warm(comm)
        for _ in range(5):
            comm.all_reduce(x)
        looked(comm, x)
        work = comm.recv(np.zeros(10, "f4"), 1 - comm.rank, async_op=True)
        begun = comm._state.has_begun(), comm._state.is_busy()
        said = error_of(comm.all_reduce, x[: 9 + comm.rank]).split(":")[0]
        ends = work.done(), type(work.exception()).__name__, comm._state.is_busy()
        seen.append([*begun, said, *ends, error_of(comm.all_reduce, x).split(":")[0]])
        comm.close()
    return {"seen": seen}


def aborted() -> dict:
    """Another rank, or another thread, gives up while messages pend."""
    seen = []
    for way in ("rank", "thread", "close"):
        for compiled in (True, False):
            comm = Counted(compiled).comm
            warm(comm)
            comm.barrier()
            if comm.rank == 1:
                time.sleep(0.01)
                if way == "rank":
                    comm.abort("enough")
                else:
                    time.sleep(0.3)
                comm.close()
                continue
            work = comm.recv(np.zeros(10, "f4"), 1, async_op=True)
            stop = {"rank": comm.check, "thread": comm.abort, "close": comm.close}[way]
            thread = threading.Timer(0.01, lambda stop=stop: error_of(stop))
            thread.start()
            seen.append(error_of(work.wait).split(":")[0])
            thread.join()
            comm.close()
    return {"seen": seen}


def told(call, *given) -> str:
    """The name of a call's error, which may be that of an interrupt before."""
    try:
        return error_of(call, *given).split(":")[0]
    except KeyboardInterrupt:
        return "InterruptedError"


def interrupted() -> dict:
    """A signal's exception comes anywhere in the posts and waits of messages."""
    seen = []

    def raising(*_) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, raising)
    delays = np.random.default_rng(5)
    for turn in range(24):
        comm = Counted(True).comm
        x, _ = warm(comm)
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.01 if turn % 2 else 1e-4)
            for number in (11, 12):
                x[:] = number
                error_of(comm.send, x, 0)
            error_of(comm.recv, x, 0)
            comm.close()
            continue
        first, second = np.zeros(10, "f4"), np.zeros(10, "f4")
        works: list = []
        said = "no error"
        try:
            signal.setitimer(signal.ITIMER_REAL, delays.uniform(1e-5, 1e-3))
            works.append(comm.recv(first, 1, async_op=True))
            error_of(works[0].wait)
            time.sleep(0.01)
        except KeyboardInterrupt:
            said = "interrupted"
        if works:
            said += ", " + told(works[0].wait)
        if "Error" not in said:
            said += ", " + told(comm.recv, second, 1)
        seen.append(f"{said}, {first[0]:g}, {second[0]:g}")
        error_of(comm.send, x, 1)
        comm.close()
    return {"seen": seen}


def forked() -> dict:
    """A fork's child has nothing of what pends, and its parent ends it."""
    comm = Counted(True).comm
    x, _ = warm(comm)
    other, y = 1 - comm.rank, np.zeros(10, "f4")
    comm.barrier()
    work = comm.recv(y, other, async_op=True)
    child = os.fork()
    if child == 0:
        said = error_of(comm.send, x, other)
        os._exit("process" not in said)
    fine = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    x[:] = comm.rank + 3
    comm.send(x, other)
    work.wait()
    return {"seen": [fine, bool(y[0] == other + 3)]}


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        *(killed, deep, never_comes, disagree, closed, broken, aborted, interrupted, forked),
    )
}

if __name__ == "__main__":
    perform(SCENARIOS)
