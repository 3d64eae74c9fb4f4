"""Calls that lie beside those of the compiled part: each gives what it did, or the error's name.

Each takes a communicator; its second half of calls meets what the first has made known.
"""

from typing import Any

import numpy as np

import ringcoll


def outcome(call, *given, **how):
    """What a call has returned, or the name of its error."""
    try:
        return str(call(*given, **how))
    except Exception as error:
        return type(error).__name__


def shared(comm):
    """Arguments that share memory, in every way, beside others of their shape."""
    base, seen = np.arange(64, dtype="f4"), []
    for _ in range(6):
        comm.all_reduce(base[:16], base[32:48])
    for shift in (0, 1, 8, 15, 16, 0, 16, 0, 0):
        x = np.arange(64, dtype="f4")
        seen.append(outcome(comm.all_reduce, x[:16], x[shift : shift + 16]))
        seen.append(x.tolist())
    n, rank = comm.nranks, comm.rank
    for _ in range(6):
        whole = np.full(8 * n, rank, "f4")
        comm.all_gather(whole[8 * rank : 8 * rank + 8], whole)
        seen.append(whole.tolist())
    return seen


def roots(comm):
    x, seen = np.empty(8, "f4"), []
    for call in (comm.broadcast, comm.reduce):
        for _ in range(6):
            for root in (*range(comm.nranks), np.int64(1)):
                x[:] = comm.rank + 1
                call(x, root=root)
                seen.append(float(x[0]) if call == comm.broadcast or root == comm.rank else 0)
    for bad in (True, 1.0, comm.nranks, -1, "0", None):
        seen.append(outcome(comm.broadcast, x, root=bad))
    return seen


def arrays(comm):
    """Arrays that look like one that is known, but for one thing."""
    x, seen = np.ones(8, "f4"), []
    for _ in range(6):
        x[:] = 1
        comm.all_reduce(x)
    others = (
        np.ones((2, 4), "f4"),
        np.ones((4, 2), "f4").T,
        np.ones(16, "f4")[::2],
        np.ones(8, ">f4"),
        np.ones(8, np.dtype("f4", metadata={"a": 1})),
        np.ma.ones(8, "f4"),
        np.ones(33, "u1")[1:].view("f4"),
        np.array(1, "f4"),
        np.empty(0, "f4"),
        np.ones(8, "f4").data,
        [1.0] * 8,
        np.ones(8, "i4"),
        np.ones(8, "u4"),
    )
    for array in others * 3:
        seen.append(outcome(comm.all_reduce, array))
        seen.append(np.asarray(array).tolist())
    x.flags.writeable = False
    seen.append(outcome(comm.all_reduce, x))
    y = np.ones(8, "f4")
    for _ in range(6):
        comm.all_reduce(x, y)
    y.flags.writeable = False
    seen.append(outcome(comm.all_reduce, x, y))
    z = np.ones(8, "f4")
    z.resize(4, refcheck=False)
    comm.all_reduce(z)
    z.dtype = np.dtype("i4")  # type: ignore[misc]
    comm.all_reduce(z)
    return [*seen, y.tolist(), z.tolist()]


def options(comm):
    """Of the same words and other types, and of other words."""
    x, seen, config = np.empty(8, "f4"), [], ringcoll.Config(deterministic=True, timeout=9)
    hows: tuple[dict[str, Any], ...] = (
        {},
        {"config": config},
        {"deterministic": True},
        {"deterministic": 1},
        {"config": None},
        {"stream": None},
        {"stream": 0},
        {"async_op": False},
        {"async_op": np.ones(2)},
        {"timeout": 9},
        {"timeout": "x"},
        {"tag": "a"},
        {"tag": 5},
        {"op": "sum"},
        {"op": "bad"},
        {"op": ringcoll.premul_sum(2.0)},
        {"op": ringcoll.premul_sum(comm.rank + 1.0)},
        {"op": "".join(["s", "um"])},
        {"op": np.str_("sum")},
        {"algorithm": "ring"},
        {"algorithm": "nope"},
        {"verify": True},
        {"nope": 1},
    )
    for _ in range(4):
        for how in hows:
            x[:] = comm.rank + 1
            seen.append(outcome(comm.all_reduce, x, **how))
            seen.append(float(x[0]))
    return seen


def counts(comm):
    """For each rank its own; arguments of the same sizes, of which the counts alone differ."""
    n, rank, seen = comm.nranks, comm.rank, []
    rows = [3, 5, 4, 4][:n], [3, 4, 5, 4][:n], [3, 5, 4, 4][:n]
    for _ in range(6):
        for each in rows:
            x, y = np.full(each[rank], rank + 1, "i4"), np.full(sum(each), -1, "i4")
            comm.all_gather_v(x, y, each)
            seen.append(y.tolist())
            comm.all_gather_v(x, y, np.array(each))
            seen.append(y.tolist())
    return seen


def memory(comm):
    """Symmetric and registered arrays, and calls behind ``trim``."""
    x, y, z, seen = comm.empty(8, "f4"), comm.empty(8, "f4"), np.ones(8, "f4"), []
    for turn in range(9):
        x[:] = comm.rank + 1
        comm.all_reduce(x, y)
        comm.all_reduce(x)
        z[:] = 1
        comm.all_reduce(z)
        seen += [float(x[0]), float(y[0]), float(z[0])]
        if turn == 4:
            comm.register(z)
            comm.trim()
    return seen


def beside(comm):
    """Asynchronous calls, messages and large calls before and behind."""
    n, rank, seen, x, large = comm.nranks, comm.rank, [], np.ones(8, "f4"), np.ones(1 << 18, "f4")
    for _ in range(12):
        sent, got = np.full(8, rank, "f4"), np.empty(8, "f4")
        received = comm.recv(got, (rank - 1) % n, async_op=True)
        x[:] = 1
        comm.all_reduce(x)
        others = [np.ones(8, "f4") for _ in range(3)]
        works = [comm.all_reduce(other, async_op=True) for other in others]
        comm.all_reduce(x)
        comm.send(sent, (rank + 1) % n)
        comm.broadcast(x)
        for work in (*works, received):
            work.wait()
        comm.all_to_all(np.arange(n, dtype="f4"), np.empty(n, "f4"))
        comm.barrier()
        large[:] = 1
        comm.all_reduce(large)
        seen += [float(x[0]), float(got[0]), float(large[7])]
        seen += [float(other[0]) for other in others]
    return seen


def turns(comm):
    """In place on some ranks only, on others in the next call."""
    n, rank, seen = comm.nranks, comm.rank, []
    for turn in range(12):
        x, y = np.full(8, rank + 1, "f4"), np.zeros(8, "f4")
        whole, own = np.full(8 * n, rank, "f4"), np.full(8, rank + 5, "f4")
        if (rank + turn) % 2:
            comm.all_reduce(x)
            whole[8 * rank : 8 * rank + 8] = own
            comm.all_gather(None, whole)
            seen.append(float(x[0]))
        else:
            comm.all_reduce(x, y)
            comm.all_gather(own, whole)
            seen.append(float(y[0]))
        seen.append(whole.tolist())
    return seen


CALLS = shared, roots, arrays, options, counts, memory, beside, turns
