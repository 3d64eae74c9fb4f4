"""A user's algorithm: a function that returns a plan, proven once, then run like ours."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll import (
    ArgumentError,
    ArgumentTypeError,
    Block,
    Buffer,
    Chunk,
    Collective,
    MismatchError,
    Plan,
    Step,
)
from ringcoll.errors import Deadlock, EntryViolation, IllegalStep, LaunchRefused, WrongResult
from ringcoll.plan import hello
from ringcoll.verifier import prover


def inp(rank, index=0):
    return Chunk(rank, Buffer.INPUT, index)


def out(rank, index=0):
    return Chunk(rank, Buffer.OUTPUT, index)


def scratch(rank, index=0):
    return Chunk(rank, Buffer.SCRATCH, index)


def hub(nranks):
    """Rank 0 reduces what all have, and all fetch the sum from it."""
    steps = [(Block(0), Step(tuple(inp(r) for r in range(nranks)), (out(0),)))]
    steps += [(Block(r), Step((out(0),), (out(r),))) for r in range(1, nranks)]
    return Plan(Collective("all_reduce", nranks), tuple(steps))


def line(nranks, root=0):
    """Broadcast along the ranks in order, from the root on."""
    ranks = [(root + d) % nranks for d in range(nranks)]
    steps = [(Block(root), Step((inp(root),), (out(root),)))]
    steps += [(Block(b), Step((out(a),), (out(b),))) for a, b in itertools.pairwise(ranks)]
    return Plan(Collective("broadcast", nranks, root=root), tuple(steps))


def loses_one(nranks):
    """Forgets the last rank's contribution."""
    whole = hub(nranks)
    block, step = whole.order[0]
    return whole.with_order(((block, Step(step.srcs[:-1], step.dsts)), *whole.order[1:]))


def counts_twice(nranks):
    whole = hub(nranks)
    block, step = whole.order[0]
    return whole.with_order(
        ((block, Step((*step.srcs, step.srcs[0]), step.dsts)), *whole.order[1:])
    )


def leaves_out(nranks):
    """The last rank gets nothing."""
    return hub(nranks).with_order(hub(nranks).order[:-1])


def partial_in_output(nranks):
    steps = [(Block(0), Step((inp(0), inp(1)), (out(0),)))]
    steps += [(Block(0), Step((out(0), inp(2)), (out(0),)))]
    steps += [(Block(r), Step((out(0),), (out(r),))) for r in (1, 2)]
    return Plan(Collective("all_reduce", nranks), tuple(steps))


def outside(nranks):
    return Plan(Collective("all_reduce", nranks), ((Block(0), Step((inp(0, 5),), (out(0),))),))


def waits_for_ever(nranks):
    order = tuple(
        (block, Step(step.srcs, step.dsts, waits=(Block((block.rank + 1) % nranks),)))
        for block, step in hub(nranks).order
    )
    return hub(nranks).with_order(order)


def unsynchronised(nranks):
    """Hand-written signals are kept: one signal alone does not order the plan."""
    order = list(hub(nranks).order)
    order[0] = (order[0][0], Step(order[0][1].srcs, order[0][1].dsts, signals=(Block(1),)))
    order[1] = (order[1][0], Step(order[1][1].srcs, order[1][1].dsts, waits=(Block(0),)))
    return hub(nranks).with_order(tuple(order))


@pytest.mark.parametrize("count", [0, 1, 33, 20_000])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_runs_like_ours(count, symmetric, in_place):
    def work(comm):
        room = comm.empty if symmetric else np.empty
        x, y = room(count, "float64"), room(count, "float64")
        for number in range(3):
            x[:] = comm.rank + number
            target = x if in_place else y
            comm.all_reduce(x, None if in_place else y, algorithm=hub, slices=1 + number)
            assert set(target) <= {6.0 + 4 * number}
            target[:] = comm.rank
            comm.broadcast(target, root=number, algorithm=line)
            assert set(target) <= {float(number)}

    ringcoll.spawn(work, 4)


def copies_first(nranks):
    """Rank 0 begins with a copy of its own, which in place is one onto itself."""
    others = (inp(rank) for rank in range(1, nranks))
    own = [Step((inp(0),), (out(0),)), Step((out(0), *others), (out(0),))]
    fetch = [(Block(rank), Step((out(0),), (out(rank),))) for rank in range(1, nranks)]
    return Plan(Collective("all_reduce", nranks), (*((Block(0), step) for step in own), *fetch))


@pytest.mark.parametrize("inside", [(), (0,), (1,), (0, 1, 2)])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("count", [10, 100_000])
def test_one_that_copies_a_chunk_onto_itself_serves_ranks_out_of_place(count, symmetric, inside):
    """A launch is in place for all where it is for one; the copy is missed by the others."""

    def work(comm):
        make = comm.empty if symmetric else np.empty
        mine, theirs = make(count, "float32"), make(count, "float32")
        mine[:], theirs[:] = comm.rank + 1, -100
        if comm.rank in inside:
            comm.all_reduce(mine, algorithm=copies_first)
            return set(mine)
        comm.all_reduce(mine, theirs, algorithm=copies_first)
        return set(theirs)

    assert ringcoll.spawn(work, 3) == [{6.0}] * 3


def test_is_made_and_proven_once(monkeypatch):
    made, proven = [], []
    prover.prove_launch.cache_clear()
    honest = prover.Prover.prove

    def mine(nranks):
        made.append(nranks)
        return hub(nranks)

    def prove_noted(self, plan):
        proven.append(plan)
        return honest(self, plan)

    monkeypatch.setattr(prover.Prover, "prove", prove_noted)

    def work(comm):
        x = np.ones(5)
        for _ in range(20):
            comm.all_reduce(x, algorithm=mine)
        return x[0]

    assert ringcoll.spawn(work, 3) == [3.0**20] * 3
    assert made == [3]
    # As it is written, and as it runs.
    assert len(proven) == 2


def test_a_name_that_is_no_utf_8_is_escaped():
    def mine(nranks):
        return hub(nranks)

    mine.__qualname__ = "\udcff.py:mine"

    def work(comm):
        x = np.ones(5)
        comm.all_reduce(x, algorithm=mine)
        part = comm.split(0, config=ringcoll.Config(algorithm=mine))
        assert "\\udcff.py:mine" in part.explain("all_reduce", 40)
        return x[0]

    assert ringcoll.spawn(work, 2) == [2.0] * 2


class Unhashed:
    """A function whose plans nobody could find again."""

    __hash__: Any = None

    def __call__(self, nranks):
        return hub(nranks)


def test_what_has_no_hash_is_refused_in_words():
    def work(comm):
        x = np.ones(5)
        with pytest.raises(
            ArgumentTypeError, match=r"all_reduce on rank .*Plan and has a hash, or"
        ):
            comm.all_reduce(x, algorithm=Unhashed())
        comm.all_reduce(x)
        return x[0]

    assert ringcoll.spawn(work, 2) == [2.0] * 2
    with pytest.raises(ArgumentTypeError, match=r"init: option algorithm=.*has a hash"):
        ringcoll.spawn(work, 2, algorithm=Unhashed())


def test_of_the_communicator():
    def work(comm):
        x = np.ones(3)
        comm.barrier()
        comm.all_reduce(x)
        return x[0]

    assert ringcoll.spawn(work, 3, algorithm=hub) == [3.0] * 3


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        (loses_one, WrongResult, "(0[0] + 1[0]), written to OUTPUT 0.O[0]"),
        (counts_twice, WrongResult, "the contribution of rank 0 once, seen twice"),
        (leaves_out, WrongResult, "2.O[0]: seen nothing, wanted every rank's [0] once"),
        (partial_in_output, WrongResult, "wanted partials in SCRATCH only"),
        (outside, IllegalStep, "0.I[5] lies outside of the buffer of 1 chunks"),
        (waits_for_ever, Deadlock, "seen 0 of 1 signals wanted of rank 1"),
        (unsynchronised, EntryViolation, "seen no sign that rank 1 has entered"),
    ],
)
@pytest.mark.parametrize("count", [4, 9000])
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_wrong_plan_is_refused_and_harms_nobody(wrong, kind, text, count, symmetric):
    def work(comm):
        x = comm.empty(count, "float64") if symmetric else np.empty(count)
        y = np.full(count, 5.0)
        x[:] = 2
        for _ in range(2):
            with pytest.raises(kind, match=re.escape(text)):
                comm.all_reduce(x, y, algorithm=wrong)
        assert (set(x), set(y)) == ({2.0}, {5.0})
        comm.all_reduce(x)
        return x[0]

    assert ringcoll.spawn(work, 3) == [6.0] * 3


@pytest.mark.parametrize("first", ["alone", "with the data", "last"])
def test_hand_written_steps_may_wait_for_hellos(first):
    """A rank may write to another's OUTPUT once that has entered."""

    def signalled(nranks):
        order = []
        for rank in range(2):
            peer, there = Block(1 - rank), (hello(1 - rank),)
            own = Step((inp(rank),), (out(rank, rank),))
            sent = Step((inp(rank),), (out(1 - rank, rank),), signals=(peer,))
            if first == "alone":
                steps = [Step(waits=there), own, sent]
            elif first == "with the data":
                steps = [sent._replace(waits=there), own]
            else:
                steps = [own, sent._replace(waits=there)]
            order += [(Block(rank), step) for step in (*steps, Step(waits=(peer,)))]
        order.sort(key=lambda item: bool({*item[1].waits} & {Block(0), Block(1)}))
        return Plan(Collective("all_gather", nranks), tuple(order))

    def work(comm):
        x, y = comm.empty(500, "float64"), comm.empty(1000, "float64")
        x[:], y[:] = comm.rank + 1, 0
        for _ in range(3):
            comm.all_gather(x, y, algorithm=signalled)
        return set(y[:500]), set(y[500:])

    assert ringcoll.spawn(work, 2) == [({1.0}, {2.0})] * 2


def test_hand_written_signals_cannot_be_staged_or_sliced_and_say_so():
    def signalled(nranks):
        order = [
            (Block(0), Step(waits=(Block(1),))),
            (Block(1), Step(signals=(Block(0),))),
        ]
        steps = [(Block(0), Step((inp(0), inp(1)), (out(0),), signals=(Block(1),)))]
        steps += [(Block(1), Step((out(0),), (out(1),), waits=(Block(0),), signals=(Block(0),)))]
        steps += [(Block(0), Step(waits=(Block(1),)))]
        return Plan(Collective("all_reduce", nranks), (order[1], order[0], *steps))

    def work(comm):
        plain = np.ones(9000)
        mapped, result = comm.empty(9000, "float64"), comm.empty(9000, "float64")
        mapped[:] = 1
        with pytest.raises(LaunchRefused, match="hand-written"):
            comm.all_reduce(plain, algorithm=signalled)
        with pytest.raises(LaunchRefused, match="hand-written"):
            comm.all_reduce(mapped, result, algorithm=signalled, slices=3)
        comm.all_reduce(mapped, result, algorithm=signalled)
        return set(plain), set(result)

    assert ringcoll.spawn(work, 2) == [({1.0}, {2.0})] * 2


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        (lambda nranks: line(nranks), ArgumentError, "returned a plan of broadcast"),
        (lambda nranks: hub(nranks + 1), ArgumentError, "returned a plan of all_reduce of 4 ranks"),
        (lambda nranks: "ring", ArgumentTypeError, "returned a str for 3 ranks, wanted a Plan"),
        (lambda nranks: None, ArgumentTypeError, "returned a NoneType"),
    ],
)
def test_what_is_no_plan_of_this_collective_is_refused(wrong, kind, text):
    def work(comm):
        x = np.full(3, 1.0)
        with pytest.raises(kind, match="algorithm=") as caught:
            comm.all_reduce(x, algorithm=wrong)
        assert text in str(caught.value)
        comm.all_reduce(x)
        return x[0]

    assert ringcoll.spawn(work, 3) == [3.0] * 3


def test_a_function_that_raises_or_takes_other_arguments_is_told():
    def broken(nranks):
        raise ZeroDivisionError("in my algorithm")

    def work(comm):
        x = np.full(3, 1.0)
        with pytest.raises(ZeroDivisionError, match="in my algorithm"):
            comm.all_reduce(x, algorithm=broken)
        with pytest.raises(ArgumentError, match="returned a plan of all_reduce"):
            comm.broadcast(x, algorithm=hub)
        with pytest.raises(ArgumentError, match=r"take root; write def hub\(nranks, root=0\)"):
            comm.broadcast(x, root=1, algorithm=hub)
        with pytest.raises(TypeError):
            comm.all_reduce(x, algorithm=lambda: None)
        comm.all_reduce(x)
        return x[0]

    assert ringcoll.spawn(work, 2) == [2.0] * 2


def test_ranks_whose_functions_make_different_plans_are_told():
    """Though both have one name and each plan is right."""

    def maker(center):
        def plan(nranks):
            order = [(Block(center), Step(tuple(inp(r) for r in range(nranks)), (out(center),)))]
            order += [
                (Block(r), Step((out(center),), (out(r),))) for r in range(nranks) if r != center
            ]
            return Plan(Collective("all_reduce", nranks), tuple(order))

        return plan

    def work(comm):
        comm.all_reduce(np.ones(3), algorithm=maker(1))
        comm.all_reduce(np.ones(3), algorithm=maker(comm.rank // 2))

    with pytest.raises(MismatchError, match=r"plan [0-9a-f]+"):
        ringcoll.spawn(work, 3)


def test_cannot_go_unproven():
    def work(comm):
        with pytest.raises(ArgumentError, match="verify=False"):
            comm.all_reduce(np.ones(3), algorithm=hub, verify=False)

    ringcoll.spawn(work, 2)


def test_must_be_deterministic_where_that_is_asked_for():
    def backwards(nranks):
        order = hub(nranks).order
        block, step = order[0]
        return hub(nranks).with_order(((block, Step(step.srcs[::-1], step.dsts)), *order[1:]))

    def work(comm):
        x = np.ones(4)
        comm.all_reduce(x, algorithm=hub, deterministic=True)
        comm.all_reduce(x, algorithm=backwards)
        with pytest.raises(WrongResult, match="not deterministic"):
            comm.all_reduce(x, algorithm=backwards, deterministic=True)
        return x[0]

    assert ringcoll.spawn(work, 3) == [9.0] * 3


def test_works_in_a_group_and_asynchronously():
    def work(comm):
        x, y = np.ones(4), np.ones(9000)
        with ringcoll.group():
            comm.all_reduce(x, algorithm=hub)
            comm.all_reduce(y, algorithm=hub)
        comm.all_reduce(x, algorithm=hub, async_op=True).wait()
        return x[0], y[-1]

    assert ringcoll.spawn(work, 3) == [(9.0, 3.0)] * 3
