"""Asynchronous messages by the compiled part: ``python pending_messages.py SCENARIO WORD``.

As in small_messages.py ranks that have the compiled part meet ranks that do without.
"""

import threading
import time

import numpy as np

import ringcoll
from tests.processes.programs.compiled import Counted, is_compiled, mixed, small_of
from tests.processes.programs.setting import perform

COUNTS = 1, 10, 40
LATE = 9.0  # seconds for what is to come without a wait


def posted(comm, receives, sends):
    """The works of messages, receives first: by peer and array."""
    works = [comm.recv(array, peer, async_op=True) for peer, array in receives]
    return works + [comm.send(array, peer, async_op=True) for peer, array in sends]


def looked(comm, x) -> None:
    """Let a look at who has died, which the next call may make in Python, be behind this rank."""
    for _ in range(2):
        comm.send(x, comm.rank)
        comm.recv(x, comm.rank)


def warm(comm, count=10, times=8):
    """Let the compiled part know messages to and from all ranks, asynchronous ones and others."""
    others = [peer for peer in range(comm.nranks) if peer != comm.rank]
    x, outs = np.zeros(count, "f4"), [np.zeros(count, "f4") for _ in others]
    for _ in range(times):
        looked(comm, x)
        for work in posted(comm, zip(others, outs, strict=True), [(peer, x) for peer in others]):
            work.wait()
        for peer, out in zip(others, outs, strict=True):
            comm.sendrecv(x, peer, out, peer)
            comm.sendrecv(x, peer, out, peer, async_op=True).wait()
            first, second = (comm.send, comm.recv) if comm.rank < peer else (comm.recv, comm.send)
            first(x, peer)
            second(out, peer)
    return x, outs


def ended(work) -> bool:
    """Whether a work that nobody waits for ends."""
    late = time.monotonic() + LATE
    while not work.done() and time.monotonic() < late:
        time.sleep(2e-4)
    return work.done()


def end(work, own, wrong) -> None:
    """Wait for a work in one of several ways."""
    way = own.integers(4)
    if way == 0 and not ended(work):
        wrong.append("it has not ended")
    work.wait(*(LATE,) * int(way == 1))


def play(comm, shared, own, wrong: list) -> None:
    """Random messages of all ranks, several of a pair among them, waited for in any order."""
    n, rank = comm.nranks, comm.rank
    works: list = []
    received: list = []
    order: dict = {}
    several = shared.random() < 0.5  # of a pair
    for number in range(int(shared.integers(1, 9))):
        source, dest = shared.choice(n, 2, replace=False).tolist()
        count, blocking = COUNTS[shared.integers(len(COUNTS))], shared.random() < 0.2
        first = (source, dest) not in order
        if not (first or several):
            continue
        order[source, dest] = True
        value = np.float32(100 * number + source)
        if own.random() < 0.02:
            time.sleep(own.random() * 3e-3)
        if rank == dest:
            out = np.full(count, -1, "f4")
            works.append(comm.recv(out, source, async_op=True))
            received.append((out, value, works[-1], source))
        elif rank == source:
            x = np.full(count, value, "f4")
            if blocking and first:
                comm.send(x, dest)  # which needs no receive, since the last round has ended
            else:
                works.append(comm.send(x, dest, async_op=True))
    for at in own.permutation(len(works)):
        end(works[at], own, wrong)
    for out, value, work, source in received:
        if (out != value).any() or (work.source, work.count) != (source, out.size):
            wrong.append(f"{out[0]} for {value}, {work.source} for {source}")
    if shared.random() < 0.3:
        x = np.ones(4, "f4")
        comm.all_reduce(x)
        if x[0] != n:
            wrong.append("all_reduce")


def alike() -> dict:
    """Messages of ranks that have the compiled part, of ranks that have not, and of both."""
    wrong: list = []
    seed = np.random.default_rng(21)
    counts = []
    for comm in (mixed(), Counted(True)):
        shared, own = np.random.default_rng(7), np.random.default_rng(seed.integers(99))
        for count in COUNTS:
            warm(comm.comm, count)
        for _ in range(150):
            play(comm.comm, shared, own, wrong)
        counts.append([comm.pending, comm.finished])
    return {"wrong": wrong[:9], "counts": counts, "compiled": is_compiled()}


def any_order() -> dict:
    """Pending messages of several peers are ended by waits in any order."""
    counted, seen = Counted(True), []
    comm = counted.comm
    x, outs = warm(comm)
    others = [peer for peer in range(comm.nranks) if peer != comm.rank]
    own = np.random.default_rng(comm.rank)
    for turn in range(60):
        x[:] = comm.rank + 10 * turn
        for out in outs:
            out[:] = -1
        works = posted(comm, zip(others, outs, strict=True), [(peer, x) for peer in others])
        for at in own.permutation(len(works)):
            works[at].wait()
        seen.append([out[0] for out in outs] == [peer + 10 * turn for peer in others])
        seen.append(all(work.done() for work in works))
        comm.barrier()  # x is read where a send has ended
    return {"seen": list(map(bool, seen)), "finished": counted.finished}


def behind(comm, how, out):
    """A second receive of rank 0's messages, behind one that is under way; None, or its work."""
    if how == "blocking":
        return comm.recv(out, 0)
    if how == "exchanged":
        return comm.sendrecv(np.zeros(10, "f4"), 0, out, 0)
    if how == "group":
        with ringcoll.group():
            comm.send(np.zeros(10, "f4"), 0)
            comm.recv(out, 0)
        return None
    if how == "any length":
        return comm.recv(out, 0, exact=False, async_op=True)
    if how == "any rank":
        return comm.recv(out, ringcoll.ANY, async_op=True)
    return comm.recv(out, 0, async_op=True)


def in_order() -> dict:
    """Messages of one pair arrive in their order, whatever is posted behind one that pends."""
    seen = {}
    for compiled in (True, False):
        comm = Counted(compiled).comm
        x, _ = warm(comm)
        for how in ("same", "blocking", "exchanged", "group", "any length", "any rank", "probe"):
            right = []
            for turn in range(12):
                if comm.rank == 0:
                    comm.barrier()
                    for number in range(3):
                        x[:] = 3 * turn + number
                        comm.send(x, 1)
                    if how in ("exchanged", "group"):
                        comm.recv(np.zeros(10, "f4"), 1)
                    continue
                first, second, third = (np.full(10, -1, "f4") for _ in range(3))
                works = [comm.recv(first, 0, async_op=True)]
                if how in ("same", "any length", "any rank"):
                    works.append(behind(comm, how, second))
                comm.barrier()
                if how == "probe":
                    found = comm.probe(0)  # the second: a receive has taken the first
                    assert found is not None
                    right.append(works[0].done())
                if how not in ("same", "any length", "any rank"):
                    behind(comm, how, second)
                comm.recv(third, 0)
                for work in works[:: -1 if turn % 2 else 1]:
                    work.wait()
                got = [first[0], second[0], third[0]]
                right.append(got == [3 * turn, 3 * turn + 1, 3 * turn + 2])
            seen[f"{how} {compiled}"] = list(map(bool, right))
        comm.barrier()
    return {"seen": seen}


def sends_in_order() -> dict:
    """Sends that pend are received in their order, and their arrays live until then."""
    seen = []
    for compiled in (True, False):
        counted = Counted(compiled)
        comm, _ = counted.comm, warm(counted.comm)
        for turn in range(20):
            if comm.rank == 0:
                works = [
                    comm.send(np.full(10, 10 * turn + number, "f4"), 1, async_op=True)
                    for number in range(4)
                ]
                comm.barrier()
                for work in works[:: -1 if turn % 2 else 1]:
                    work.wait()
                continue
            comm.barrier()
            out = np.empty((4, 10), "f4")
            for row in out:
                comm.recv(row, 0)
            seen.append(out[:, 0].tolist() == [10 * turn + number for number in range(4)])
        comm.barrier()
        if comm.rank == 0:
            seen.append((counted.pending > 10) == compiled)
    return {"seen": seen}


def halves() -> dict:
    """A message that is received at once, and sent later, by one call."""
    seen: list = []
    for compiled in (True, False):
        counted = Counted(compiled)
        comm, (x, _) = counted.comm, warm(counted.comm)
        other, y = 1 - comm.rank, np.zeros(10, "f4")
        for turn in range(8):
            x[:] = 10 * comm.rank + turn
            comm.barrier()
            if comm.rank == 0:
                looked(comm, x.copy())
                comm.send(x, other)  # behind which the next one pends
                comm.barrier()
                pending = counted.pending
                work = comm.sendrecv(x + 1, other, y, other, async_op=True)
                pended = counted.pending > pending or not compiled
                comm.barrier()
                if turn % 2:
                    ended(work)
                work.wait()
                seen.append([pended, work.source, work.count, float(y[0]) - turn])
                continue
            comm.send(x, other)
            comm.barrier()
            comm.barrier()
            time.sleep(0.003 * (turn % 2))
            got = []
            for _ in range(2):
                comm.recv(y, other)
                got.append(y[0] - turn)
            seen.append(bool(got == [0, 1]))
    return {"seen": seen}


def between() -> dict:
    """Messages move, as in a signal's handler, while Python takes them over: none moves twice."""
    seen: list = []
    counted = Counted(True)
    comm, (x, _) = counted.comm, warm(counted.comm)
    other, y, progress = 1 - comm.rank, np.zeros(10, "f4"), comm._state.progress
    assert progress is not None
    resume = progress.pairs.resume
    for sends in (False, True):
        x[:] = 3
        comm.barrier()
        if comm.rank == 1:
            comm.barrier()
            comm.send(x, other)
            comm.barrier()
            for _ in range(2 * sends):
                comm.recv(y, other)
            continue
        looked(comm, x)
        if sends:
            comm.send(x, other)  # behind which the next one pends
            work = comm.sendrecv(x, other, y, other, async_op=True)
        else:
            work = comm.recv(y, other, async_op=True)
        progress._due = time.monotonic() + LATE  # the thread is to leave it
        pending = len(progress.entered)
        comm.barrier()
        comm.barrier()

        def handled(*given, work=work):
            left = resume(*given)
            if y[0] == 0:
                small_of(comm).finish(work, False)
                seen.append(float(y[0]))
                y[:] = -1
            return left

        y[:] = 0
        progress.pairs.resume = handled  # type: ignore[method-assign]
        progress.take_over()
        progress.pairs.resume = resume  # type: ignore[method-assign]
        work.wait()
        seen.append([pending, float(y[0]), work.source, progress.is_busy()])
        seen.append(len(progress.pairs.running))
    return {"seen": seen}


def without_wait() -> dict:
    """Messages that nobody waits for end, beside whatever else the rank does."""
    counted, seen = Counted(True), {}
    comm = counted.comm
    x, _ = warm(comm)
    y = np.zeros(10, "f4")
    for what in ("nothing", "sleep", "all_reduce", "message", "asynchronous", "synchronize"):
        right = []
        for turn in range(6):
            time.sleep(0.03 * (turn == 3))  # the thread sleeps, too
            if comm.rank == 0:
                y[:] = -1
                looked(comm, x)
                work = comm.recv(y, 1, async_op=True)
                if what == "sleep":
                    time.sleep(0.002)
                if what == "all_reduce":
                    comm.all_reduce(x)  # the send comes behind it
                if what == "asynchronous":
                    comm.all_reduce(x, async_op=True).wait()
                if what == "message":
                    comm.sendrecv(x, 0, x.copy(), 0)
                if what == "synchronize":
                    comm.synchronize()
                    right.append(work.done())
                right.append(ended(work) and y[0] == turn)
            else:
                if what == "all_reduce":
                    time.sleep(0.002)
                    comm.all_reduce(x)
                if what == "asynchronous":
                    comm.all_reduce(x, async_op=True).wait()
                time.sleep(0.002)
                comm.send(np.full(10, turn, "f4"), 0)
        seen[what] = list(map(bool, right))
    comm.barrier()
    return {"seen": seen, "pending": counted.pending}


def threads() -> dict:
    """Two threads of a rank post and wait, each with messages to one side."""
    counted, wrong = mixed(), []
    comm = counted.comm
    warm(comm)
    n, rank = comm.nranks, comm.rank

    def along(step) -> None:
        x, y = np.empty(10, "f4"), np.empty(10, "f4")
        for turn in range(200):
            x[:] = rank + turn
            works = [comm.recv(y, (rank - step) % n, async_op=True)]
            works.append(comm.send(x, (rank + step) % n, async_op=True))
            for work in works[::step]:
                work.wait()
            if (y != (rank - step) % n + turn).any():
                wrong.append((step, turn))

    own = [threading.Thread(target=along, args=(step,)) for step in (1, -1)]
    for thread in own:
        thread.start()
    for thread in own:
        thread.join()
    # One thread waits, in Python, for what has not come; another posts, and nobody waits for that.
    y, late, seen = np.empty(10, "f4"), np.empty(10, "f4"), []
    right, left = (rank + 1) % n, (rank - 1) % n
    waiting = threading.Thread(target=lambda: comm.recv(late, right))
    waiting.start()
    time.sleep(0.01)
    looked(comm, np.empty(10, "f4"))
    work = comm.recv(y, left, async_op=True)
    time.sleep(0.01)
    comm.send(np.full(10, 5, "f4"), right)
    seen.append(ended(work) and y[0] == 5)
    comm.send(np.full(10, 6, "f4"), left)
    waiting.join()
    seen.append(late[0] == 6)
    return {
        "wrong": wrong[:3],
        "seen": list(map(bool, seen)),
        "made": counted.made,
        "compiled": is_compiled(),
    }


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        *(alike, any_order, in_order, sends_in_order, halves, between, without_wait, threads),
    )
}

if __name__ == "__main__":
    is_compiled()
    perform(SCENARIOS)
