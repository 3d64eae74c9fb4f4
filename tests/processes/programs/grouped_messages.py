"""Groups of small messages by the compiled part: ``python grouped_messages.py SCENARIO WORD``.

As in small_calls.py ranks that have the compiled part meet ranks that do without.
"""

import itertools
import threading
import time

import numpy as np

import ringcoll
from tests.processes.programs.compiled import Counted, fresh, is_compiled, mixed
from tests.processes.programs.setting import SHORT, die, perform
from tests.processes.programs.verdict import error_of

KINDS = "float32", "int16", "complex128", "bool"


def make(comm, messages, arrays, options) -> list:
    """Make a group of messages, each of a source and a destination; what its Works say."""
    works = []
    with ringcoll.group():
        for (source, destination), (sent, received), how in zip(
            messages, arrays, options, strict=True
        ):
            if source == comm.rank:
                works.append(comm.send(sent, destination, **how))
            if destination == comm.rank:
                works.append(comm.recv(received, source, **how))
    for work in works:
        if work is not None:
            work.wait()
    return [work is not None and work.done() for work in works]


def alike() -> dict:
    """Groups of all kinds, some of them late: what comes is what ranks without the part get."""
    some, none = mixed(), Counted(False)
    rank, n = some.comm.rank, some.comm.nranks
    shared, own = np.random.default_rng(17), np.random.default_rng((18, rank))
    wrong = []
    for number in range(70):
        messages = shared.integers(0, n, (shared.integers(1, 7), 2)).tolist()
        if shared.random() < 0.8:  # else two may be of one pair, which is for Python
            messages = list(dict.fromkeys(map(tuple, messages)))
        counts = shared.integers(1, (4, 90, 900)[shared.integers(3)], len(messages)).tolist()
        kinds = [KINDS[k] for k in shared.integers(len(KINDS), size=len(messages))]
        choice: tuple[dict, ...] = (
            {},
            {},
            {},
            {"timeout": 30},
            {"tag": "mine"},
            {"async_op": True},
        )
        options = [choice[shared.integers(6)]] * len(messages)
        if shared.random() < 0.2:
            options = [choice[k] for k in shared.integers(6, size=len(messages))]
        offset = int((0, 0, 16, 3)[shared.integers(4)])
        for repeat in range(7):
            if own.random() < 0.03:
                time.sleep(own.random() * 3e-3)
            given = [
                own.integers(0, 2 if kind == "bool" else 90, count).astype(kind)
                for count, kind in zip(counts, kinds, strict=True)
            ]
            results = []
            for comm in (some.comm, none.comm):
                arrays = [(fresh(x, offset), fresh(np.ones_like(x), offset)) for x in given]
                said = make(comm, messages, arrays, options)
                results.append(([received.tobytes() for _, received in arrays], said))
            if results[0] != results[1]:
                wrong.append(f"{number}.{repeat}: {messages} {counts} {kinds} {options}")
    taken = some.made + some.handed_over
    return {"wrong": wrong[:9], "taken": taken, "compiled": is_compiled()}


def warm(comm, count=10, times=7):
    """Arrays of a ring of messages that the compiled part knows."""
    x, y = np.full(count, comm.rank, "f4"), np.empty(count, "f4")
    for _ in range(times):
        ring(comm, x, y)
    return x, y


def ring(comm, x, y, **how):
    with ringcoll.group():
        comm.send(x, (comm.rank + 1) % comm.nranks, **how)
        comm.recv(y, (comm.rank - 1) % comm.nranks, **how)


def late() -> dict:
    """Messages that are waited for long are handed over; the next ones are compiled again."""
    counted, seen = mixed(), []
    comm = counted.comm
    x, y = warm(comm)
    left = (comm.rank - 1) % comm.nranks
    for turn in range(12):
        for _ in range(2):  # one of which looks, in Python, at who has died
            ring(comm, x, y)
        if turn % comm.nranks == comm.rank:
            time.sleep(0.01)
        x[:] = comm.rank + turn
        ring(comm, x, y)
        seen.append(bool((y == left + turn).all()))
    handed_over, made = counted.handed_over, counted.made
    for _ in range(300):
        ring(comm, x, y)
    return {
        "seen": seen,
        "handed over": handed_over,
        "more": counted.made - made,
        "compiled": is_compiled(),
    }


def disagree() -> dict:
    """Ranks 0 and 2 name other lengths in a group, as without the compiled part.

    Where the odd one is late, it has the other's hello before its own message is sent.
    """
    seen: dict[str, list] = {}
    for odd, late in itertools.product((0, 2), (False, True)):
        for comm in (mixed().comm, Counted(False).comm):
            x, y = np.ones(10, "f4"), np.empty(10, "f4")
            if comm.rank == 1:
                continue
            peer = 2 - comm.rank

            def swap(sends, receives, comm=comm, x=x, y=y, peer=peer) -> None:
                with ringcoll.group():  # who has what it sends has seen what it receives
                    comm.recv(y[:receives], peer)
                    comm.send(x[:sends], peer)

            for _ in range(7):
                for count in (10, 9):
                    swap(count, count)
            if late and comm.rank == odd:
                comm.probe(peer)
            first = error_of(swap, 9 if comm.rank == odd else 10, 10)
            then = error_of(swap, 10, 10).split(":")[0]
            seen.setdefault(f"{odd} {late}", []).append([first, then])
    return seen


def never_comes() -> dict:
    """Rank 1 makes no group: the others' end at their deadline, or where it is known to be late."""
    comm = mixed().comm
    x, y = warm(comm)
    if comm.rank == 1:
        time.sleep(4 * SHORT)
        return {"error": ""}
    error = error_of(lambda: [ring(comm, x, y, timeout=SHORT) for _ in range(3)])
    return {"error": error}


def killed() -> dict:
    """Rank 2 dies, and rank 1 waits for it in a group."""
    comm = Counted(True).comm
    x, y = warm(comm)
    if comm.rank == 2:
        die()
    return {"error": error_of(lambda: [ring(comm, x, y) for _ in range(10**6)])}


def beside() -> dict:
    """Groups with more than messages, in groups, that are left, and beside other threads' calls."""
    counted = mixed()
    comm, (x, y) = counted.comm, warm(counted.comm)
    n, rank, seen = comm.nranks, comm.rank, []
    right, left = (rank + 1) % n, (rank - 1) % n
    for turn in range(20):
        x[:], total = rank + turn, np.full(3, rank, "f4")
        with ringcoll.group():
            comm.all_reduce(total)
            comm.send(x, right)
            comm.recv(y, left)
        seen.append((y[0], total[0]) == (left + turn, n * (n - 1) / 2))
        other, y[:] = np.empty(10, "f4"), -1
        with ringcoll.group():
            comm.recv(y, left)
            with ringcoll.group():
                comm.send(x, right)
                comm.send(x + 100, right)
            comm.recv(other, left)
            seen.append(y[0] == -1)  # it has only been noted
        seen.append((y[0], other[0]) == (left + turn, left + turn + 100))
        first = np.empty(10, "f4")
        pending = comm.recv(first, left, async_op=True)
        comm.send(x + 5, right)  # the receive above has come first
        ring(comm, x, y)
        pending.wait()
        seen.append((first[0], y[0]) == (left + turn + 5, left + turn))
        with ringcoll.group():
            work = comm.recv(y, left, async_op=True)
            comm.send(x + 7, right)
            seen.append(not work.done())
        work.wait()
        seen.append(y[0] == left + turn + 7)
        with ringcoll.group():
            comm.send(x + 8, rank)
            comm.recv(y, rank)
        seen.append(y[0] == rank + turn + 8)
        with ringcoll.group():
            comm.send(x[:4], right)
            comm.recv(y, ringcoll.ANY if n == 2 else left, exact=False)
        seen.append(y[:4].tolist() == [left + turn] * 4)
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with ringcoll.group():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    made = counted.made
    for turn in range(5):
        x[:] = rank + turn
        ring(comm, x, y)
        seen.append(y[0] == left + turn)
    seen.append(counted.made == made)  # a group of another thread may hold calls of this rank
    leave.set()
    thread.join()
    for _ in range(40):
        ring(comm, x, y)
    seen.append((counted.made > made) == is_compiled())
    comm.barrier()
    try:
        with ringcoll.group():
            comm.send(x, right)
            raise ZeroDivisionError
    except ZeroDivisionError:
        seen.append(True)
    return {"seen": list(map(bool, seen)), "error": error_of(ring, comm, x, y).split(":")[0]}


def odd() -> dict:
    """Arguments that look like those of a known group, but for one thing."""
    unlike = []
    for comm in (mixed().comm, Counted(False).comm):
        seen: list = []
        x, y = warm(comm, 8, 8)
        others = (
            (x, np.zeros((2, 4), "f4")),
            (x.reshape(4, 2), y),
            (x[:4], y[:4]),
            (x.data, y),
            (x, x),
            (np.ones(8, ">f4"), y),
        )
        for sent, got in others:
            seen.append(error_of(ring, comm, sent, got))
            seen.append(np.array(got).tolist())

        def both(sent, got, comm=comm) -> None:
            with ringcoll.group():
                comm.sendrecv(
                    sent, (comm.rank + 1) % comm.nranks, got, (comm.rank - 1) % comm.nranks
                )

        for sent, got in [(x[:4], y[:4])] * 7 + [(x[:4], x[2:6]), (x, x)]:
            seen.append(error_of(both, sent, got))
            seen.append(got.tolist())
        unlike.append(seen)
        for bad in (1.0, comm.nranks, "0", None):
            child = comm.split(0)
            x, y = warm(child)

            def wrong(child=child, x=x, bad=bad) -> None:
                with ringcoll.group():
                    child.send(x, bad)

            seen.append(error_of(wrong))
            seen.append(error_of(ring, child, x, y).split(":")[0])
    pairs = zip(*unlike, strict=True)
    found = [(at, repr(a), repr(b)) for at, (a, b) in enumerate(pairs) if repr(a) != repr(b)]
    return {"unlike": found[:3]}


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (alike, late, disagree, never_comes, killed, beside, odd)
}

if __name__ == "__main__":
    is_compiled()
    perform(SCENARIOS)
