"""Every collective in many sizes, from plain and from symmetric arrays, in place and out of it.

``python collectives.py [few] WORD``: WORD only marks the process. Under a launcher, or alone.
``few`` is for ranks of which only the network is another one: three sizes, memory and place by
turns. ``fewest`` is for those that differ from them in their hosts alone: no algorithm by name, no
options and no vectors, or with ``vectors`` only these.
"""

import sys

import numpy as np

import ringcoll
from ringcoll.algorithms import ALGORITHMS
from ringcoll.communicator import rank as rank_state
from tests.processes.programs.reference import (
    COLLECTIVES,
    ROOTED,
    data,
    expected,
    inputs,
    invoke,
    lengths,
)
from tests.processes.programs.verdict import Checks, error_of, say

SCRATCH = 2 << 20  # bytes: what is larger costs more time and goes no other way
LARGE = 300_001  # float32 elements: more bytes than a half of SCRATCH has
POISON = 77


def collectives(comm, checks: Checks, *, few: bool = False) -> None:
    n = comm.nranks
    pool = [comm.empty(LARGE + 63 * n, "float32") for _ in range(2)]
    for number, name in enumerate(COLLECTIVES):
        spread = n if max(lengths(name, 1, n)) == n else 1
        counts = [0, 1, n - 1, n + 1, 1001, 20_000 // spread + 1, LARGE // spread]
        if few:
            counts = [1, 1001, counts[-1]]
        for index, count in enumerate(dict.fromkeys(counts)):
            # In place or not by turns: each pair of size, memory and place comes up. All three of
            # them with each other are called by threads, in tests/communicator.
            turns = (bool((number + index // 2) % 2),) if few else (False, True)
            for symmetric in turns:
                in_place = (number // 2 + index if few else number + index + symmetric) % 2 == 0
                root = (number + index // 2) % n if name in ROOTED else 0
                what = f"{name} count={count} {symmetric=} {in_place=} root={root}"
                one(comm, checks, name, count, root, in_place, what, pool if symmetric else [])


def one(comm, checks, name, count, root, in_place, what, pool=(), **how) -> None:
    """One call and all that must be true of it."""
    n, rank = comm.nranks, comm.rank
    sent = inputs(name, count, n, seed=count + root)
    want = expected(name, count, sent, rank, root)
    length = lengths(name, count, n)
    # An odd offset into the pool: nothing may lean on alignment.
    send, recv = (
        pool[k][3 : 3 + size] if len(pool) else np.empty(size, "float32")
        for k, size in enumerate(length)
    )
    send[:], recv[:] = sent[rank], POISON
    if in_place and name in ("all_gather", "gather"):
        recv[rank * count : (rank + 1) * count] = sent[rank]
    invoke(comm, name, send, recv, in_place=in_place, root=root, **how)
    if want is None:
        checks.equal(
            f"{what}: this rank receives nothing", recv, _untouched(recv, in_place, sent, rank)
        )
        checks.equal(f"{what}: what is sent stays", send, sent[rank])
        return
    own = slice(rank * count, (rank + 1) * count)
    if not in_place or name in ("all_gather", "gather"):
        got = recv
    elif name == "broadcast":
        got = send if rank == root else recv
    elif name == "reduce_scatter":
        got = send[own]
    elif name == "scatter":
        got = send[own] if rank == root else recv
    else:
        got = send
    checks.equal(what, got, want)
    if not in_place:
        checks.equal(f"{what}: what is sent stays", send, sent[rank])


def _untouched(recv, in_place, sent, rank):
    before = np.full_like(recv, POISON)
    if in_place and recv.size > sent[rank].size:  # gather: the slot was filled by the test
        before[rank * sent[rank].size : (rank + 1) * sent[rank].size] = sent[rank]
    return before


def algorithms(comm, checks: Checks) -> None:
    """By name, staged: a few elements, and enough for several slices."""
    if comm.nranks > 4:
        return  # in process this is tested for more ranks
    for name in COLLECTIVES:
        for algorithm in ALGORITHMS[name]:
            for count in (comm.nranks + 1, 50_001)[comm.nranks > 2 :]:  # few elements: two ranks
                root = count % comm.nranks
                what = f"{name} by {algorithm} count={count}"
                one(comm, checks, name, count, root, False, what, algorithm=algorithm)


def types_and_operators(comm, checks: Checks) -> None:
    n = comm.nranks
    for dtype in ("int8", "uint16", "int64", "float64", "complex64"):
        for op, fold in (("sum", np.add), ("prod", np.multiply), ("max", np.maximum)):
            if dtype == "complex64" and op == "max":
                continue
            sent = [data(5, rank, 333, dtype) for rank in range(n)]
            want = sent[0].copy()
            for part in sent[1:]:
                want = fold(want, part)
            got = np.empty(333, dtype)
            comm.all_reduce(sent[comm.rank], got, op=op)
            checks.equal(f"all_reduce {op} of {dtype}", got, want)
    scaled = data(6, comm.rank, 17)
    comm.all_reduce(scaled, op=ringcoll.premul_sum(comm.rank + 1))
    want = sum((rank + 1) * data(6, rank, 17) for rank in range(n))
    checks.equal("each rank its own factor", scaled, want)


def folds_in_rank_order(comm, checks: Checks) -> None:
    """With deterministic=True the bits are those of a left fold."""
    n = comm.nranks
    for count in (5, 1001, 70_001):
        sent = [np.random.default_rng((9, r)).standard_normal(count, "float32") for r in range(n)]
        want = sent[0].copy()
        for part in sent[1:]:
            want += part
        got = sent[comm.rank].copy()
        comm.all_reduce(got)
        checks.equal(f"left fold of {count}", got.view("int32"), want.view("int32"))


def point_to_point(comm, checks: Checks) -> None:
    n, rank = comm.nranks, comm.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    for count in (0, 1, 1001, 300_001):
        got = np.full(count, POISON, "float32")
        if n > 1:
            comm.sendrecv(data(1, rank, count), right, got, left)
            checks.equal(f"sendrecv of {count}", got, data(1, left, count))
        # To everybody at once, to itself too, in any order.
        rows = np.full((n, count), POISON, "float32")
        with ringcoll.group():
            for peer in reversed(range(n)):
                comm.recv(rows[peer], peer)
            for peer in range(n):
                comm.send(data(10 + peer, rank, count), peer)
        for peer in range(n):
            checks.equal(f"{count} from {peer}", rows[peer], data(10 + rank, peer, count))
    # A train of sends from 0 to the last, of changing sizes and types: matched in order.
    if n > 1:
        for number in range(40):
            count, dtype = 7 * number % 50, ("float32", "int16")[number % 2]
            if rank == 0:
                comm.send(data(number, 0, count, dtype), n - 1)
            elif rank == n - 1:
                got = np.full(count, POISON, dtype)
                comm.recv(got, 0)
                checks.equal(f"send {number}", got, data(number, 0, count, dtype))


def vectors(comm, checks: Checks) -> None:
    n, rank = comm.nranks, comm.rank
    for scale in (1, 1001, 60_000):
        counts = [scale * ((r + 1) % 3) for r in range(n)]  # one in three has nothing
        sent = [data(2, r, counts[r]) for r in range(n)]
        whole, starts = np.concatenate(sent), np.cumsum([0, *counts])
        got = np.full(whole.size, POISON, "float32")
        comm.all_gather_v(sent[rank], got, counts)
        checks.equal(f"all_gather_v {counts}", got, whole)

        gaps = [int(start) + 2 * r for r, start in enumerate(starts[:-1])]
        spread = np.full(whole.size + 2 * n, POISON, "float32")
        comm.all_gather_v(sent[rank], spread, counts, gaps)
        want = np.full_like(spread, POISON)
        for r, at in enumerate(gaps):
            want[at : at + counts[r]] = sent[r]
        checks.equal(f"all_gather_v {counts} with gaps", spread, want)

        full = [data(3, r, whole.size) for r in range(n)]
        part = np.full(counts[rank], POISON, "float32")
        comm.reduce_scatter_v(full[rank], part, counts)
        checks.equal(f"reduce_scatter_v {counts}", part, sum(full)[starts[rank] : starts[rank + 1]])

        root = scale % n
        at_root = np.full(whole.size, POISON, "float32") if rank == root else None
        comm.gather_v(sent[rank], at_root, counts, root=root)
        if at_root is not None:
            checks.equal(f"gather_v {counts}", at_root, whole)
        part = np.full(counts[rank], POISON, "float32")
        comm.scatter_v(whole if rank == root else None, part, counts, root=root)
        checks.equal(f"scatter_v {counts}", part, sent[rank])

        to = [[scale * ((a + 2 * b) % 3) for b in range(n)] for a in range(n)]
        received = [to[peer][rank] for peer in range(n)]
        got = np.full(sum(received), POISON, "float32")
        comm.all_to_all_v(data(4, rank, sum(to[rank])), to[rank], got, received)
        pieces = []
        for peer in range(n):
            at = sum(to[peer][:rank])
            pieces.append(data(4, peer, sum(to[peer]))[at : at + to[peer][rank]])
        checks.equal(f"all_to_all_v {scale}", got, np.concatenate(pieces))


def splits(comm, checks: Checks) -> None:
    n, rank = comm.nranks, comm.rank
    shared = comm.empty(90_000, "float32")
    checks.true("no colour, no communicator", comm.split(None) is None)
    with comm.split(rank % 2, key=-rank) as half:
        members = [r for r in reversed(range(n)) if r % 2 == rank % 2]
        checks.equal("who is who", [half.rank, half.nranks], [members.index(rank), len(members)])
        for count in (3, shared.size):
            shared[:count] = rank
            half.all_reduce(shared[:count])
            checks.true(f"sum of {members}", (shared[:count] == sum(members)).all())
            # The parent's calls go between the child's.
            own = np.full(5, rank)
            comm.all_reduce(own)
            checks.true("sum of all", (own == n * (n - 1) // 2).all())
        with half.split(half.rank // 2) as quarter:
            shared[:] = 1
            quarter.all_reduce(shared)
            checks.true("a child's child", (shared == quarter.nranks).all())
    only = comm.split(0 if rank == n - 1 else None)
    checks.true("only the last has one", (only is None) == (rank != n - 1))
    if only is not None:
        only.all_reduce(shared)
        only.close()
    if rank or n == 1:
        with comm.shrink([0] if n > 1 else []) as rest:
            ones = np.ones(50)
            rest.all_reduce(ones)
            checks.true(
                "without rank 0", (ones == rest.nranks).all() and rest.nranks == max(1, n - 1)
            )
    comm.barrier()


def asynchronous(comm, checks: Checks) -> None:
    n, rank = comm.nranks, comm.rank
    for symmetric in (False, True):
        size = 30_000
        arrays = [
            comm.empty(size, "float32") if symmetric else np.empty(size, "float32")
            for _ in range(6)
        ]
        for number, array in enumerate(arrays):
            array[:] = number + rank
        works = [
            comm.all_reduce(array[: size >> (2 * number)], async_op=True)
            for number, array in enumerate(arrays)
        ]
        # A blocking call comes after them.
        last = np.full(3, rank)
        comm.all_reduce(last)
        checks.true("all are done", all(work.done() for work in works))
        checks.true("a blocking call in between", (last == n * (n - 1) // 2).all())
        for number, array in reversed(list(enumerate(arrays))):
            works[number].wait(5)
            checks.true("no exception", works[number].exception() is None)
            reached = size >> (2 * number)
            want = np.full(size, number + rank, "float32")
            want[:reached] = n * number + n * (n - 1) // 2
            checks.equal(f"async {number} {symmetric=}", array, want)
    arrays = [np.full(10, rank), np.full(20_000, rank)]
    with ringcoll.group():
        works = [comm.all_reduce(array, async_op=True) for array in arrays]
        checks.true("a group's work waits for its end", "UsageError" in error_of(works[0].wait))
    for work, array in zip(works, arrays, strict=True):
        work.wait()
        checks.true("in a group", (array == n * (n - 1) // 2).all())
    comm.synchronize()


def memory_comes_and_goes(comm, checks: Checks) -> None:
    """Blocks are unmapped and their numbers used again, under a call that is kept prepared."""
    n, rank = comm.nranks, comm.rank
    kept = comm.empty(20_000, "float32")
    for size in (20_000, 30_000, 20_000, 40_000, 50_000):
        other = comm.empty(size, "float32")
        # Rank 0 passes the same array each time, the others what the last empty() gave.
        mine = kept if rank == 0 else other[: kept.size]
        for _ in range(3):
            mine[:] = size + rank
            comm.all_reduce(mine)
            checks.true(f"from a block of {size}", (mine == n * size + n * (n - 1) // 2).all())
        del other, mine


def refusals(comm, checks: Checks) -> None:
    """Refused before anything moves: the communicator goes on."""
    x = np.zeros(10, "float32")
    if comm.rank == comm.nranks - 1:
        checks.true("strided", error_of(comm.all_reduce, x[::2]).startswith("ArgumentError"))
        checks.true("keyword", "op=" in error_of(comm.all_reduce, x, "max"))
        checks.true("overlap", "ArgumentError" in error_of(comm.all_reduce, x[:5], x[2:7]))
        checks.true(
            "no such rank", "ArgumentError" in error_of(comm.broadcast, x, root=comm.nranks)
        )
        checks.true("no such option", "slices" in error_of(comm.all_reduce, x, slice=3))
        wrong = error_of(comm.all_reduce, x, algorithm="bruck")
        checks.true(f"no such algorithm of all_reduce: {wrong}", wrong.startswith("ArgumentError"))
        odd = error_of(comm.all_gather, x, np.zeros(comm.nranks * 10 + 1, "float32"))
        checks.true("a size that does not match", "ArgumentError" in odd)
    comm.all_reduce(x + 1, x)
    checks.true("on it goes", (x == comm.nranks).all())


def main() -> None:
    checks, fewest = Checks(), "fewest" in sys.argv
    few = fewest or "few" in sys.argv
    rank_state.SCRATCH_BYTES = SCRATCH
    with ringcoll.init(timeout=20) as comm:
        n = comm.nranks
        refusals(comm, checks)
        collectives(comm, checks, few=few)
        if not fewest:
            algorithms(comm, checks)
        for part in (point_to_point, splits):
            part(comm, checks)
        if not fewest or "vectors" in sys.argv:
            vectors(comm, checks)
        if not fewest:
            for part in (types_and_operators, asynchronous, memory_comes_and_goes):
                part(comm, checks)
        # A second communicator of the same ranks, used by turns with the first.
        with ringcoll.init(timeout=20, deterministic=True) as second:
            folds_in_rank_order(second, checks)
            both = [np.full(5, comm.rank), np.full(5, comm.rank)]
            with ringcoll.group():
                for one_of, array in zip((comm, second)[:: 1 - 2 * (n % 2)], both, strict=True):
                    one_of.all_reduce(array)
            checks.equal("two communicators in a group", both, [[n * (n - 1) // 2] * 5] * 2)
        comm.barrier()
    say(comm.rank, nranks=n, count=checks.count, failures=checks.failures[:5])


if __name__ == "__main__":
    main()
