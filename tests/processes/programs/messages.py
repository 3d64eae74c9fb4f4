"""Messages under way between processes: ``python messages.py SCENARIO WORD``."""

import random

import numpy as np

import ringcoll
from tests.processes.programs.setting import LARGE, again, begin, die, numbers, perform
from tests.processes.programs.verdict import Checks, error_of


def in_any_order() -> dict:
    """As MPI's Irecv, Send and Wait, and beside collectives in another order on each rank."""
    checks = Checks()
    with begin(timeout=60) as comm:
        n, me = comm.nranks, comm.rank
        right, left = (me + 1) % n, (me - 1) % n
        for count in (0, 3, LARGE):
            out, total, got = np.zeros(count), np.ones(4), np.zeros(n * 3)
            pending = comm.recv(out, left, async_op=True)
            if me % 2:
                comm.all_reduce(total)
                comm.all_to_all_v(np.full(3 * n, float(me)), [3] * n, got, [3] * n)
            sent = comm.send(np.full(count, me + 1.0), right, async_op=True)
            if not me % 2:
                comm.all_reduce(total)
                comm.all_to_all_v(np.full(3 * n, float(me)), [3] * n, got, [3] * n)
            pending.wait()
            sent.wait()
            checks.equal(f"message of {count}", out, np.full(count, left + 1.0))
            checks.equal(f"sum beside it, {count}", total, np.full(4, float(n)))
            checks.equal(f"exchange beside it, {count}", got, np.repeat(np.arange(n), 3))
    return {"failures": checks.failures, "count": checks.count}


def random_programs() -> dict:
    """Hundreds of messages under way: named sources first, then any; with collectives between."""
    checks = Checks()
    with begin(timeout=60) as comm:
        n, me = comm.nranks, comm.rank
        for seed in range(3):
            shared, own = random.Random(seed), random.Random(f"{seed} {me}")
            counts = [0, 1, 7, 900, 60_000]
            ends = [(shared.randrange(n), shared.randrange(n)) for _ in range(40 * n)]
            messages = [(*both, shared.choice(counts)) for both in ends]
            mine = [m for m in messages if m[1] == me]
            exact = own.randrange(len(mine) + 1)
            todo = [("send", m) for m in messages if m[0] == me]
            for at, message in enumerate(mine):
                place = own.randrange(at, len(todo) + 1) if todo else 0
                todo.insert(place, ("recv", message))
            ordered = iter(enumerate(mine))
            numbers_sent, pending, outs = [0] * n, [], list[np.ndarray | None]()
            for kind, (_, peer, count) in todo:
                if kind == "send":
                    sent = content(me, peer, numbers_sent[peer], count)
                    numbers_sent[peer] += 1
                    pending.append(comm.send(sent, peer, async_op=True))
                    outs.append(None)
                    continue
                at, (sender, _, count) = next(ordered)
                named = at < exact
                out = np.full(count if named else max(counts), -1)
                outs.append(out)
                pending.append(comm.recv(out, sender if named else ringcoll.ANY, async_op=True))
                if at % 50 == 49:
                    found = comm.probe(wait=False)
                    checks.true(f"probe finds {found}", found is None or found.count in counts)
            for round_ in range(4):
                total = np.full(5, 1.0 + round_)
                comm.all_reduce(total)
                checks.equal(f"{seed}: sum {round_}", total, np.full(5, n * (1.0 + round_)))
            taken = [0] * n
            for work, received in zip(pending, outs, strict=True):
                work.wait()
                if received is None:
                    continue
                source = work.source
                count = [m[2] for m in messages if m[:2] == (source, me)][taken[source]]
                wanted = content(source, me, taken[source], count)
                taken[source] += 1
                checks.equal(f"{seed}: count from {source}", work.count, count)
                checks.equal(f"{seed}: message from {source}", received[:count], wanted)
            sums = [sum(m[:2] == (peer, me) for m in messages) for peer in range(n)]
            checks.equal(f"{seed}: messages by rank", taken, sums)
            comm.barrier()  # so that no message of the next round is taken for one of this
    return {"failures": checks.failures, "count": checks.count}


def content(sender, receiver, number, count):
    return np.arange(count) + 1000 * (number + 100 * receiver + 10_000 * sender)


def killed() -> dict:
    """The last rank dies with messages under way; all works hear of it, and the rest goes on."""
    comm = begin()
    last, n = comm.nranks - 1, comm.nranks
    outs = np.zeros((30, n, 4))
    other, pending = again(comm), []
    if comm.rank != last:
        pending = [comm.recv(out, by, async_op=True) for row in outs for by, out in enumerate(row)]
        pending.append(comm.recv(np.zeros(4), ringcoll.ANY, async_op=True))
        pending.append(comm.send(numbers(40 * LARGE), last, async_op=True))
    other.barrier()
    if comm.rank == last:
        die()
    errors = sorted({error_of(each.wait) for each in pending})
    refused = error_of(comm.send, numbers(), 0)
    rest = comm.shrink()
    out = np.zeros(4)
    work = rest.recv(out, ringcoll.ANY, async_op=True)
    rest.send(np.full(4, rest.rank + 1.0), (rest.rank + 1) % rest.nranks)
    work.wait()
    left = (rest.rank - 1) % rest.nranks
    after = [work.source == left, set(out) == {left + 1.0}]
    return {"errors": errors, "refused": refused, "after": after}


def too_long() -> dict:
    """A message that does not fit; all ranks hear of both ends."""
    comm = begin()
    errors = []
    for count in (11, LARGE):
        child = again(comm)
        if comm.rank == 1:
            error = error_of(child.send, numbers(count), 0)
        else:
            error = error_of(child.recv, numbers(), ringcoll.ANY) if comm.rank == 0 else "no error"
        errors.append(error if error != "no error" else error_of(child.barrier))
        child.close()
        comm.barrier()
    comm.close()
    return {"errors": errors}


def unlike_labels() -> dict:
    """Two messages that are received in the other order, by their labels."""
    comm = begin()
    outs = [np.zeros(2) for _ in "ab"]
    if comm.rank == 0:
        errors = [error_of(comm.send, np.ones(2), 1, tag=tag) for tag in "ab"]
    else:
        errors = [error_of(comm.recv, out, 0, tag="ba"[i]) for i, out in enumerate(outs)]
    errors.append(error_of(comm.barrier))
    comm.close()
    return {"errors": errors, "outs": [out.tolist() for out in outs]}


if __name__ == "__main__":
    perform(globals())
