"""Small calls by the compiled part: ``python small_calls.py SCENARIO WORD``.

A scenario returns what its rank has seen. In most of them ranks that have the compiled part and
ranks that do without meet in one communicator.
"""

import os
import sys
import threading
import time

import ml_dtypes  # noqa: F401  # numpy knows bfloat16 by it
import numpy as np

import ringcoll
from tests.processes.programs.compiled import Counted, fresh, is_compiled, mixed, small_of, warm
from tests.processes.programs.later_calls import later, later_errors
from tests.processes.programs.odd_calls import CALLS
from tests.processes.programs.setting import SHORT, die, perform
from tests.processes.programs.verdict import error_of

KINDS = "float32", "float64", "int32", "uint8", "int64", "complex64", "float16", "bfloat16", "bool"
OPS = "sum", "max", "min", "prod", "avg"
REDUCING = "all_reduce", "reduce", "reduce_scatter"
ROOTED = "broadcast", "reduce", "gather", "scatter"
NAMES = (*REDUCING, "broadcast", "gather", "scatter", "all_gather", "all_to_all", "barrier")


def values(random, rank, kind, count):
    """Any numbers, with what comparisons and sums treat in their own ways."""
    if kind == "bool":
        return random.integers(2, size=count) > 0
    if kind.startswith(("int", "uint")):
        return random.integers(0, 90, count).astype(kind)
    found = random.standard_normal(count)
    found[random.integers(9, size=count) == 0] = 0.0
    found[random.integers(9, size=count) == 0] *= -1
    if rank == 0:
        found[random.integers(20, size=count) == 0] = np.nan
        found[random.integers(20, size=count) == 0] = np.inf
    return found.astype(kind)


def perform_one(comm, name, op, root, send, recv, **how):
    """Make a call, and give what it has written."""
    method = getattr(comm, name)
    if name in REDUCING:
        how["op"] = op
    if name in ROOTED:
        how["root"] = root
    if name == "barrier":
        work = method(**how)
    elif name == "broadcast" or recv is None:
        work = method(send, **how)
    else:
        work = method(send, recv, **how)
    if work is not None:
        work.wait()
    if name == "barrier":
        return b""
    return send.tobytes() + (b"" if name == "broadcast" or recv is None else recv.tobytes())


def alike() -> dict:
    """Calls of all kinds, some of them late: the bits are those of ranks without the part."""
    some, none = mixed(), Counted(False)
    rank, n = some.comm.rank, some.comm.nranks
    shared, own = np.random.default_rng(5), np.random.default_rng((6, rank))
    wrong = []
    for number in range(260):
        name = NAMES[shared.integers(len(NAMES))]
        kind, op = KINDS[shared.integers(len(KINDS))], OPS[shared.integers(len(OPS))]
        kind = "float32" if shared.integers(3) == 0 else kind
        if op == "avg" and kind == "bool":
            op = "sum"
        if kind.startswith("complex") and op in ("max", "min"):
            op = "prod"
        count, root = int(shared.integers(1, (9, 200, 1500)[shared.integers(3)])), 0
        root = int(shared.integers(n)) if name in ROOTED else 0
        in_place = name in ("all_reduce", "reduce", "all_to_all") and shared.integers(2) == 0
        options: tuple = {}, {}, {"deterministic": True}, {"timeout": 30}, {"async_op": True}
        how = options[shared.integers(5)]
        offset = int((0, 0, 4, 16, 3)[shared.integers(5)])
        spread = n if name in ("reduce_scatter", "scatter", "all_to_all") else 1
        gathered = n if name in ("gather", "all_gather", "all_to_all") else 1
        growth = int((0, 0, 1, 7)[shared.integers(4)])
        for repeat in range(6):
            count += growth
            if own.random() < 0.03:
                time.sleep(own.random() * 3e-3)
            given = values(own, rank, kind, count * spread)
            results = []
            for comm in (some.comm, none.comm):
                aligned = offset if given.dtype.itemsize > 1 and offset % 4 else offset // 16 * 16
                send = fresh(given, aligned)
                recv = None if in_place else fresh(np.full(count * gathered, 1, kind), offset)
                with np.errstate(all="ignore"):
                    results.append(perform_one(comm, name, op, root, send, recv, **how))
            if results[0] != results[1]:
                wrong.append(f"{number}.{repeat}: {name} {kind} {op} {count=} {root=} {in_place=}")
    return {"wrong": wrong[:9], "made": some.made, "compiled": small_of(some.comm) is not None}


def odd() -> dict:
    """What the compiled part is to leave alone ends as it does on ranks without it."""
    some, none, unlike = mixed(), Counted(False), {}
    for call in CALLS:
        one, other = call(some.comm), call(none.comm)
        if repr(one) != repr(other):
            pairs = zip(one, other, strict=True)
            unlike[call.__name__] = [
                (at, repr(a), repr(b)) for at, (a, b) in enumerate(pairs) if repr(a) != repr(b)
            ][:3]
    return {"unlike": unlike, "made": some.made, "compiled": is_compiled()}


def threads() -> dict:
    """Threads that make calls of one shape at once, with arrays of their own."""
    wrong = []
    sys.setswitchinterval(1e-6)
    outer = ringcoll.init(timeout=30, compiled=True)
    for turn in range(40):
        comm = outer.split(0)

        def work(comm=comm, turn=turn):
            for _ in range(6):
                x, y = np.ones(64, "f4"), np.zeros(64, "f4")
                comm.all_reduce(x, y)
                if (y != comm.nranks).any() or (x != 1).any():
                    wrong.append(turn)

        each = [threading.Thread(target=work) for _ in range(3)]
        for thread in each:
            thread.start()
        for thread in each:
            thread.join()
        comm.close()
    return {"wrong": wrong[:5]}


def ahead() -> dict:
    """Rank 2 sends its part and goes on to a call of the control plane; rank 1 is late."""
    comm, x = mixed().comm, np.ones(10, "float32")
    for _ in range(6):
        comm.reduce(x)
    comm.barrier()

    def both():
        for turn in range(4):
            if turn == 3:  # the others have entered the call before
                time.sleep(0.3 if comm.rank == 1 else 0.005)
            comm.reduce(x)
        comm.split(0).close()

    return {"error": error_of(both)}


def replaced() -> dict:
    """So many other calls that the texts of known ones are gone: they are published again."""
    comm = mixed().comm
    x, y = warm(comm), warm(comm, 600)
    for number in range(262):
        comm.barrier(tag=f"number {number}")
    for _ in range(3):  # the first of them looks, in Python, at who has died
        comm.all_reduce(y)
    comm.all_reduce(x)
    how = {"op": "max"} if comm.rank == 1 else {}
    return {"error": error_of(comm.all_reduce, x, **how)}


def traced() -> dict:
    """Rows of calls that were known before."""
    comm, rows = mixed().comm, []
    x = warm(comm)
    comm._state.start_trace()
    for _ in range(8):
        comm.all_reduce(x)
        rows.append(len(comm._state.traced()))
    return {"rows": rows}


def late() -> dict:
    """Ranks that wait long are handed over, and the next call runs compiled again."""
    counted = mixed()
    comm, x = counted.comm, warm(counted.comm)
    seen = []
    for turn in range(6):
        if turn % comm.nranks == comm.rank:
            time.sleep(0.05)
        x[:] = comm.rank + 1
        comm.all_reduce(x)
        seen.append(float(x[0]))
    made = counted.made
    for _ in range(300):  # every 20 ms one of them looks, in Python, at who has died
        comm.all_reduce(x)
    return {"seen": seen, "more": counted.made - made, "compiled": is_compiled()}


def unseen() -> dict:
    """Counts that never come again, which are few powers of two and one plan."""
    counted, wrong = mixed(), 0
    comm, n = counted.comm, counted.comm.nranks
    for count in range(300, 500):
        x, y = np.full(count, comm.rank + 1, "int64"), np.full(count * n, -1, "int64")
        comm.all_gather(x, y)
        wrong += int((y.reshape(n, count) != np.arange(1, n + 1)[:, None]).sum())
        comm.all_reduce(x)
        wrong += int((x != n * (n + 1) // 2).sum())
        comm.broadcast(y[:count], root=1)
        wrong += int((y[:count] != 1).sum())
        y[comm.rank * count :][:count] = comm.rank + 7
        comm.all_gather(None, y)
        wrong += int((y.reshape(n, count) != np.arange(n)[:, None] + 7).sum())
    return {"wrong": wrong, "made": counted.made, "compiled": is_compiled()}


def disagree() -> dict:
    """Rank 1 makes another call than the others: all say so."""
    seen = {}
    other = {
        "count": lambda comm: comm.all_reduce(np.ones(11, "float32")),
        "op": lambda comm: comm.all_reduce(np.ones(10, "float32"), op="max"),
        "kind": lambda comm: comm.all_reduce(np.ones(10, "float64")),
        "barrier": lambda comm: comm.barrier(),
    }
    for word, call in other.items():
        comm = mixed().comm
        x = warm(comm)
        warm(comm, 11)
        for _ in range(6):
            call(comm)
        seen[word] = error_of(call if comm.rank == 1 else lambda c, x=x: c.all_reduce(x), comm)
        seen[f"{word} again"] = error_of(comm.all_reduce, x).split(":")[0]
    return seen


def behind() -> dict:
    """Rank 0 broadcasts where the others reduce: it learns that at its next call."""
    comm = mixed().comm
    x = warm(comm)
    for _ in range(6):
        comm.broadcast(x)
    comm.barrier()
    if comm.rank == 0:
        first = error_of(comm.broadcast, x)
        return {"error": error_of(comm.all_reduce, x) if first == "no error" else first}
    return {"error": error_of(comm.all_reduce, x)}


def never_comes() -> dict:
    comm = mixed().comm
    x = warm(comm)
    if comm.rank == 1:
        time.sleep(4 * SHORT)
    return {"error": error_of(comm.all_reduce, x, timeout=SHORT)}


def killed() -> dict:
    comm = mixed().comm
    x = warm(comm)
    if comm.rank == 2:
        die()
    return {"error": error_of(lambda: [comm.all_reduce(x) for _ in range(9)])}


def leaves() -> dict:
    """Rank 2 closes its communicator while the others go on."""
    comm = mixed().comm
    x = warm(comm)
    if comm.rank == 2:
        comm.close()
        return {"error": error_of(comm.all_reduce, x)}
    return {"error": error_of(lambda: [comm.all_reduce(x) for _ in range(9)])}


def until_stopped(comm, thread) -> str:
    """Make calls until another thread ends them; another rank's may do so from the first on."""

    def forever() -> None:
        x = warm(comm)
        thread.start()
        for _ in range(10**6):
            comm.all_reduce(x)

    try:
        return error_of(forever)
    except ValueError as error:  # as of a call that runs while its memory is released
        return f"ValueError: {error}"
    finally:
        if thread.ident is not None:
            thread.join()


def aborts() -> dict:
    """Another thread aborts while this one makes calls, on every rank at another time."""
    seen = []
    for _ in range(8):
        comm = mixed().comm
        thread = threading.Timer(0.001 * (1 + comm.rank), comm.abort, ["enough"])
        seen.append(until_stopped(comm, thread))
        comm.close()
    return {"seen": seen}


def closes() -> dict:
    """Another thread closes the communicator between calls and in the middle of one."""
    seen = []
    for _ in range(8):
        comm = mixed().comm
        seen.append(until_stopped(comm, threading.Timer(0.002, comm.close)))
    return {"seen": seen}


def in_turns() -> dict:
    """Threads of a rank that make calls of one communicator at once, all of them alike."""
    counted = mixed()
    comm, wrong = counted.comm, []
    warm(comm)

    def work():
        x = np.empty(10, "float32")
        for _ in range(300):
            x[:] = 1
            comm.all_reduce(x)
            if x[0] != comm.nranks:
                wrong.append(float(x[0]))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"wrong": wrong[:3], "made": counted.made, "compiled": is_compiled()}


def beside() -> dict:
    """Groups, asynchronous calls, options, and so many other calls that texts are replaced."""
    counted = mixed()
    comm, x = counted.comm, warm(counted.comm)
    n, seen = comm.nranks, []
    with ringcoll.group():
        x[:] = 1
        comm.all_reduce(x)
        seen.append(float(x[0]) == 1)  # it has only been noted
    seen.append(float(x[0]) == n)
    for _ in range(4):
        y = np.ones(10, "float32")
        work = comm.all_reduce(y, async_op=True)
        x[:] = 2
        comm.all_reduce(x)
        work.wait()
        seen.append((float(x[0]), float(y[0])) == (2 * n, n))
    x[:] = 1
    comm.all_reduce(x, timeout=9)
    seen.append(float(x[0]) == n)
    before = counted.made
    for count in range(1, 300):
        for op in ("sum", "max"):
            comm.all_reduce(np.ones(count, "float32"), op=op)
    x[:] = 1
    comm.all_reduce(x)
    seen.append(float(x[0]) == n)
    comm.trim()
    warm(comm, times=9)
    seen.append((counted.made > before) == is_compiled())
    child = os.fork()
    if child == 0:
        os._exit(not all("process" in error_of(comm.all_reduce, x) for _ in range(3)))
    seen.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0)
    comm.barrier()
    comm.close()
    return {"seen": seen, "error": error_of(comm.all_reduce, x).split(":")[0]}


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        *(
            alike,
            odd,
            threads,
            ahead,
            replaced,
            traced,
            later,
            later_errors,
            late,
            unseen,
            disagree,
            behind,
            never_comes,
            killed,
            leaves,
            aborts,
            closes,
        ),
        *(in_turns, beside),
    )
}

if __name__ == "__main__":
    is_compiled()
    perform(SCENARIOS)
