"""Small messages by the compiled part: ``python small_messages.py SCENARIO WORD``.

As in small_calls.py ranks that have the compiled part meet ranks that do without.
"""

import itertools
import os
import signal
import threading
import time

import numpy as np

import ringcoll
from tests.processes.programs.compiled import (
    Counted,
    fresh,
    is_compiled,
    mixed,
    near_recursion_limit,
)
from tests.processes.programs.setting import SHORT, die, perform
from tests.processes.programs.verdict import error_of

KINDS = "float32", "float64", "int32", "uint8", "complex64", "float16", "bool"
NAMES = "sendrecv", "send", "all_to_all_v", "gather_v", "scatter_v"


def perform_one(comm, name, counts, send, recv, **how):
    """Make a call, and give what it has written; ``counts`` are by sender and receiver."""
    n, rank = comm.nranks, comm.rank
    right, left, root = (rank + 1) % n, (rank - 1) % n, counts[0][0] % n
    work = None
    if name == "sendrecv":
        work = comm.sendrecv(send, right, recv, left, **how)
    elif name == "send":  # from even ranks to odd ones
        if rank % 2 == 0 and rank + 1 < n:
            work = comm.send(send, rank + 1, **how)
        elif rank % 2:
            work = comm.recv(recv, rank - 1, **how)
    elif name == "all_to_all_v":
        work = comm.all_to_all_v(send, counts[rank], recv, [row[rank] for row in counts], **how)
    elif name == "gather_v":
        work = comm.gather_v(send, recv if rank == root else None, counts[0], root=root, **how)
    else:
        work = comm.scatter_v(send if rank == root else None, recv, counts[0], root=root, **how)
    said: tuple = ()
    if work is not None:
        work.wait()
        said = work.source, work.count, work.done(), work.exception()
    return recv.tobytes(), said


def sizes(name, counts, rank):
    """Elements of what a rank sends and receives."""
    if name == "all_to_all_v":
        return sum(counts[rank]), sum(row[rank] for row in counts)
    if name == "gather_v":
        return counts[0][rank], sum(counts[0])
    if name == "scatter_v":
        return sum(counts[0]), counts[0][rank]
    return counts[0][0], counts[0][0]


def alike() -> dict:
    """Messages of all kinds, some of them late: what comes is what ranks without the part get."""
    some, none = mixed(), Counted(False)
    rank, n = some.comm.rank, some.comm.nranks
    shared, own = np.random.default_rng(7), np.random.default_rng((8, rank))
    wrong = []
    for number in range(130):
        name = NAMES[shared.integers(len(NAMES))]
        kind = KINDS[shared.integers(len(KINDS))]
        least = int(shared.integers(2)) if name.endswith("_v") else 1
        counts = shared.integers(least, (4, 90, 500)[shared.integers(3)], (n, n)).tolist()
        how = ({}, {}, {"timeout": 30}, {"tag": "mine"}, {"async_op": True})[shared.integers(5)]
        offset = int((0, 0, 4, 16, 3)[shared.integers(5)])
        sends, receives = sizes(name, counts, rank)
        for repeat in range(7):
            if own.random() < 0.03:
                time.sleep(own.random() * 3e-3)
            given = own.integers(0, 2 if kind == "bool" else 90, sends).astype(kind)
            results = []
            for comm in (some.comm, none.comm):
                aligned = offset if given.dtype.itemsize > 1 and offset % 4 else offset // 16 * 16
                send = fresh(given, aligned)
                recv = fresh(np.full(receives, 1, kind), aligned)
                results.append(perform_one(comm, name, counts, send, recv, **how))
            if results[0] != results[1]:
                wrong.append(f"{number}.{repeat}: {name} {kind} {counts=}")
    return {"wrong": wrong[:9], "made": some.made, "compiled": is_compiled()}


def warm(comm, count=10, times=6):
    """Arrays of a ring of messages that the compiled part knows."""
    x, y = np.full(count, comm.rank, "f4"), np.empty(count, "f4")
    for _ in range(times):
        ring(comm, x, y)
    return x, y


def ring(comm, x, y, **how):
    comm.sendrecv(x, (comm.rank + 1) % comm.nranks, y, (comm.rank - 1) % comm.nranks, **how)


def late() -> dict:
    """Messages that are waited for long are handed over; the next ones are compiled again."""
    counted, seen = mixed(), []
    comm = counted.comm
    x, y = warm(comm)
    counts = [4] * comm.nranks
    sent, got = np.empty(4 * comm.nranks, "f4"), np.empty(4 * comm.nranks, "f4")
    for _ in range(6):
        comm.all_to_all_v(sent, counts, got, counts)
    for turn in range(12):
        for _ in range(2):  # one of which looks, in Python, at who has died
            ring(comm, x, y)
        if turn % comm.nranks == comm.rank:
            time.sleep(0.01)
        x[:], sent[:] = comm.rank + turn, comm.rank - turn
        ring(comm, x, y)
        comm.all_to_all_v(sent, counts, got, counts)
        left = (comm.rank - 1) % comm.nranks + turn
        every = np.repeat(np.arange(comm.nranks, dtype="f4") - turn, 4)
        seen.append(bool((y == left).all() and (got == every).all()))
    handed_over, made = counted.handed_over, counted.made
    for _ in range(300):
        ring(comm, x, y)
    return {
        "seen": seen,
        "handed over": handed_over,
        "more": counted.made - made,
        "compiled": is_compiled(),
    }


def ends(comm, other, odd, sender, late, **how) -> list[str]:
    """Ranks 0 and 2 name different messages, ``odd`` another than before; what this rank says.

    ``late`` has the other's hello before it enters.
    """
    x = np.ones(10, "f4")
    if comm.rank == 1:
        return []
    peer, call = 2 - comm.rank, comm.send if comm.rank == sender else comm.recv
    for _ in range(7):
        for part in (slice(10), slice(9)):
            call(x[part], peer, **how)
    if comm.rank == late:
        time.sleep(0.005)
    given = (other, call, x, peer) if comm.rank == odd else (call, x, peer)
    first = error_of(*given, **({} if comm.rank == odd else how))
    return [first, error_of(call, x, peer, **how).split(":")[0]]


OTHERS = {
    "count": lambda call, array, peer: call(array[:9], peer),
    "dtype": lambda call, array, peer: call(array.view("i4"), peer),
    "tag": lambda call, array, peer: call(array, peer, tag="b"),
}


def disagree() -> dict:
    """A pair's ends say what the other has named, as without the compiled part."""
    seen = {}
    for what, other in OTHERS.items():
        for roles in itertools.product((0, 2), (0, 2), (0, 2)):
            how = {"tag": "a"} if what == "tag" else {}
            comms = mixed().comm, Counted(False).comm
            seen[f"{what} {roles}"] = [ends(comm, other, *roles, **how) for comm in comms]
    return seen


def never_comes() -> dict:
    """A message that is not received, and one that is not sent."""
    seen = {}
    for name in ("send", "recv"):
        comm = mixed().comm
        x = np.ones(10, "f4")
        for _ in range(6):
            comm.send(x, 1) if comm.rank == 0 else comm.rank == 1 and comm.recv(x, 0)
        if name == "send" and comm.rank == 0:
            seen[name] = error_of(lambda c, x: [c.send(x, 1, timeout=SHORT) for _ in "12"], comm, x)
        elif name == "recv" and comm.rank == 1:
            seen[name] = error_of(comm.recv, x, 0, timeout=SHORT)
        else:
            time.sleep(3 * SHORT)
    return seen


def killed() -> dict:
    """Rank 2 dies, and the others never wait for it."""
    comm = Counted(True).comm
    x, y = np.ones(10, "f4"), np.empty(10, "f4")
    warm(comm)
    if comm.rank == 2:
        die()
    late = time.monotonic() + 9

    def until_late() -> None:
        while time.monotonic() < late:
            comm.sendrecv(x, 1 - comm.rank, y, 1 - comm.rank)

    return {"error": error_of(until_late)}


def interrupted() -> dict:
    """A signal's exception comes while the compiled part polls for a message that is late."""
    seen = []

    def raising(*_) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, raising)
    for turn in range(12):
        comm = Counted(True).comm
        x, y, other = np.zeros(20, "f4"), np.zeros(20, "f4"), 1 - comm.rank

        def call(comm=comm, x=x, y=y, other=other, vector=turn % 2) -> str:
            if vector:
                return error_of(comm.all_to_all_v, x, [10, 10], y, [10, 10])
            return error_of(comm.sendrecv, x, other, y, other)

        for _ in range(10):
            call()
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.02)
            for number in (11, 12):
                x[:] = number
                call()
            comm.close()
            continue
        call_first = "no error"
        try:
            signal.setitimer(signal.ITIMER_REAL, 5e-5)
            call()
            time.sleep(0.01)
        except KeyboardInterrupt:
            call_first = "interrupted"
        second = call().split(":")[0]
        seen.append(f"{call_first}, {second}, {y[-1]:g}")
        comm.close()  # the other may wait for a message that has not been entered
    return {"seen": seen}


def deep() -> dict:
    """Messages of a program that is near Python's recursion limit: none is lost without a word."""
    seen = []

    for free in range(5, 25, 2):
        comm = Counted(True).comm
        x, y, other = np.zeros(10, "f4"), np.zeros(10, "f4"), 1 - comm.rank

        def call(comm=comm, x=x, y=y, other=other) -> str:
            return error_of(comm.sendrecv, x, other, y, other)

        for _ in range(10):
            call()
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.005)
            for number in (11, 12):
                x[:] = number
                call()
            comm.close()
            continue
        first = near_recursion_limit(call, free)
        second = call().split(":")[0]
        seen.append(f"{first}, {second}, {y[-1]:g}")
        comm.close()
    return {"seen": seen}


def replaced() -> dict:
    """The text of a known message is published again when others have taken its place."""
    comm = mixed().comm
    x, y = warm(comm)
    for _ in range(6):
        comm.all_reduce(y)
    for number in range(262):
        comm.barrier(tag=f"number {number}")
    for _ in range(3):  # one of which looks, in Python, at who has died
        comm.all_reduce(y)
    ring(comm, x, y)
    if comm.rank == 1:
        return {"error": error_of(comm.recv, x[:9], 0)}
    return {"error": error_of(ring, comm, x, y)}


def stopped() -> dict:
    """Another thread aborts or closes while this one sends and receives."""
    seen = []
    for turn in range(8):
        comm = mixed().comm
        ending = comm.close if turn % 2 else lambda comm=comm: comm.abort("enough")
        thread = threading.Timer(0.002, ending)

        def forever(comm=comm, thread=thread) -> None:
            x, y = warm(comm)  # another rank's thread may end that, too
            thread.start()
            for _ in range(10**6):
                ring(comm, x, y)

        try:
            seen.append(error_of(forever))
        except ValueError as error:  # as of a call that runs while its memory is released
            seen.append(f"ValueError: {error}")
        if thread.ident is not None:
            thread.join()
        comm.close()
    return {"seen": seen}


def beside() -> dict:
    """Messages under way, of any rank and of unknown lengths, groups, other threads, and forks."""
    counted = mixed()
    comm, (x, y) = counted.comm, warm(counted.comm)
    n, rank, seen = comm.nranks, comm.rank, []
    right, left = (rank + 1) % n, (rank - 1) % n
    for turn in range(20):
        first, second = np.empty(10, "f4"), np.empty(10, "f4")
        x[:] = rank + turn
        pending = comm.recv(first, left, async_op=True)
        comm.send(x, right)  # the receive above has come first
        x[:] += 100
        ring(comm, x, second)
        pending.wait()
        seen.append((first[0], second[0]) == (left + turn, left + turn + 100))
        pending = comm.send(x, right, async_op=True)
        received = comm.recv(second, left, async_op=True)
        received.wait()
        pending.wait()
        seen.append((received.source, received.count, second[0]) == (left, 10, x[0] - rank + left))
        comm.send(x[:4], right)
        comm.recv(y, ringcoll.ANY if n == 2 else left, exact=False)
        seen.append(y[:4].tolist() == [left + turn + 100] * 4)
        with ringcoll.group():
            comm.send(x, right)
            comm.recv(first, left)
        seen.append(first[0] == left + turn + 100)
        comm.send(x, right)
        found = comm.probe(left)
        assert found is not None
        seen.append((found.source, found.count) == (left, 10))
        comm.recv(first, left)
        work = comm.all_reduce(np.ones(3, "f4"), async_op=True)
        ring(comm, x, y)
        work.wait()
        seen.append(y[0] == left + turn + 100)
    counts = [2] * n
    sent, got = np.empty(2 * n, "f4"), np.empty(2 * n, "f4")
    for turn in range(9):
        sent[:], got[:] = rank + turn, -1
        with ringcoll.group():
            comm.all_to_all_v(sent, counts, got, counts)
            seen.append(got[0] == -1)  # it has only been noted
        seen.append(got.tolist() == [float(peer + turn) for peer in range(n) for _ in "12"])
        comm.all_to_all_v(sent, counts, got, counts)
    for turn in range(9):
        arrays = [np.empty(10, "f4") for _ in range(4)]
        source = ringcoll.ANY if n == 2 else left
        works = [comm.recv(array, source, exact=False, async_op=True) for array in arrays[:2]]
        works.append(comm.recv(arrays[2], left, async_op=True))
        for number in range(4):
            x[:] = 10 * turn + number
            comm.send(x, right)
        comm.recv(arrays[3], left)  # behind those that take any length
        for each in works:
            each.wait()
        seen.append([array[0] - 10 * turn for array in arrays] == [0, 1, 2, 3])
    made = counted.made
    for _ in range(50):
        ring(comm, x, y)
    seen.append((counted.made > made) == is_compiled())
    comm.trim()
    warm(comm, times=9)
    for number in range(270):
        comm.barrier(tag=f"number {number}")  # takes the place of the messages' texts
    x[:] = rank
    for _ in range(4):
        ring(comm, x, y)
    seen.append(y[0] == left)
    child = os.fork()
    if child == 0:
        os._exit(not all("process" in error_of(ring, comm, x, y) for _ in range(3)))
    seen.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0)
    comm.barrier()
    comm.close()
    return {"seen": list(map(bool, seen)), "error": error_of(ring, comm, x, y).split(":")[0]}


def in_turns() -> dict:
    """Two threads of a rank: one sends and receives along the ring, one against it."""
    counted, wrong = mixed(), []
    comm = counted.comm
    n, rank = comm.nranks, comm.rank

    def along(step) -> None:
        x, y = np.empty(10, "f4"), np.empty(10, "f4")
        for turn in range(300):
            x[:] = rank + turn
            comm.sendrecv(x, (rank + step) % n, y, (rank - step) % n)
            if (y != (rank - step) % n + turn).any():
                wrong.append((step, turn))

    threads = [threading.Thread(target=along, args=(step,)) for step in (1, -1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"wrong": wrong[:3], "made": counted.made, "compiled": is_compiled()}


def outcome(call, *given, **how):
    """What a call has returned, or the name of its error."""
    try:
        return str(call(*given, **how))
    except Exception as error:
        return type(error).__name__


def odd() -> dict:
    """Arguments that look like those of a known call, but for one thing."""
    unlike = []
    for comm in (mixed().comm, Counted(False).comm):
        seen, n, rank = [], comm.nranks, comm.rank
        x, y = warm(comm, 8, 8)
        right, left = (rank + 1) % n, (rank - 1) % n
        others = (
            (x, np.zeros((2, 4), "f4")),
            (x.reshape(4, 2), y),
            (x[:4], y[:4]),
            (np.ones(16, "f4")[::2], y),
            (x, np.zeros(16, "f4")[::2]),
            (x.data, y),
            ([1.0] * 8, y),
            (np.ones(33, "u1")[1:].view("f4"), y),
            (np.ones(8, ">f4"), y),
            (x, x),
            (x[:4], x[2:6]),
        )
        for sent, got in others:
            seen.append(outcome(comm.sendrecv, sent, right, got, left))
            seen.append(np.array(got).tolist())
        frozen = np.empty(8, "f4")
        frozen.flags.writeable = False
        seen.append(outcome(comm.sendrecv, x, right, frozen, left))
        for bad in (True, 1.0, n, -1, "0", None):
            seen.append(outcome(comm.sendrecv, x, bad, y, left))
            seen.append(outcome(comm.sendrecv, x, right, y, bad))
        for _ in range(5):
            seen.append(outcome(comm.sendrecv, x, np.int64(right), y, np.int64(left)))
            seen.append(outcome(comm.sendrecv, x, rank, y, rank))
            seen.append(y.tolist())
            empty = np.empty(0, "f4")
            seen.append(outcome(comm.sendrecv, empty, right, empty, left))
        seen.append(outcome(comm.sendrecv, x, right, y, left, tga="x"))
        seen.append(outcome(comm.sendrecv, x, right, y, left, timeout=-1))
        ring(comm, x, y)
        seen.append(y.tolist())
        unlike.append(seen)
    pairs = zip(*unlike, strict=True)
    found = [(at, repr(a), repr(b)) for at, (a, b) in enumerate(pairs) if repr(a) != repr(b)]
    return {"unlike": found[:3]}


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        *(alike, late, disagree, never_comes, killed, interrupted, deep, replaced, stopped),
        *(beside, in_turns, odd),
    )
}

if __name__ == "__main__":
    is_compiled()
    perform(SCENARIOS)
