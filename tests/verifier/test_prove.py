"""``ringcoll.prove``: an own algorithm, in every launch that may run it."""

from __future__ import annotations

from typing import Any

import pytest

import ringcoll
from ringcoll import ArgumentError, ArgumentTypeError, Block, Buffer, Chunk, Collective, Plan, Step
from ringcoll.algorithms import ALGORITHMS, build
from ringcoll.errors import Deadlock, EntryViolation, IllegalStep, Race, WrongResult
from ringcoll.launch import ALL_MAPPED, IN_BAND, Launch
from ringcoll.lower import lower
from ringcoll.verifier.induction import verify_slices
from ringcoll.verifier.launches import hops


def star(nranks):
    """Rank 0 sums all inputs, the others fetch the sum."""
    inputs = tuple(Chunk(rank, Buffer.INPUT, 0) for rank in range(nranks))
    outputs = [Chunk(rank, Buffer.OUTPUT, 0) for rank in range(nranks)]
    order = [(Block(0), Step(inputs, (outputs[0],)))]
    order += [(Block(r), Step((outputs[0],), (outputs[r],))) for r in range(1, nranks)]
    return Plan(Collective("all_reduce", nranks), tuple(order))


def line(nranks, root=0):
    """Each rank hands the buffer on."""
    order = [(Block(root), Step((Chunk(root, Buffer.INPUT, 0),), (Chunk(root, Buffer.OUTPUT, 0),)))]
    for at in range(nranks - 1):
        src, dst = (Chunk((root + at + d) % nranks, Buffer.OUTPUT, 0) for d in (0, 1))
        order.append((Block(src.rank), Step((src,), (dst,))))
    return Plan(Collective("broadcast", nranks, root=root), tuple(order))


def rootless(nranks):
    """The same, which forgets the root."""
    return line(nranks)


def signalled(nranks):
    """A copy that brings its own signals."""
    src, dst = Chunk(0, Buffer.INPUT, 0), Chunk(1, Buffer.OUTPUT, 0)
    own = Chunk(0, Buffer.OUTPUT, 0)
    order = [
        (Block(1), Step(signals=(Block(0),))),
        (Block(0), Step((src,), (own, dst), (Block(1),), (Block(1),))),
        (Block(1), Step(waits=(Block(0),))),
    ]
    return Plan(Collective("broadcast", nranks), tuple(order))


def test_a_function_is_proven_in_every_launch():
    report = ringcoll.prove(star, 4)
    simple = [each for each in report.launches if each.launch.protocol == "Simple"]
    ways = {(each.launch.mapped == ALL_MAPPED, each.launch.in_place) for each in simple}
    assert ways == {(True, True), (True, False), (False, True), (False, False)}
    assert all(each.proof is not None and each.slices == () for each in simple)
    assert (report.hops, report.proof.rank_order, report.calls) == (2, True, True)
    text = str(report)
    assert text.startswith("proven: all_reduce of 4 ranks")
    assert text.count("every S") == 4
    assert "2 hops, waits and signals derived" in text
    # It reads another rank's SCRATCH, which protocols without signals of their own cannot order.
    refused = f"refused: {', '.join(IN_BAND)}, staged, in place"
    assert f"{refused}: rank 0 channel 0 lane 0 reads 1.S[0]" in text


def test_a_plan_a_name_and_a_root():
    assert ringcoll.prove(star(3)).plan == star(3)
    assert ringcoll.prove(line, 3, root=2).plan == line(3, 2)
    named = ringcoll.prove("ring", 3, collective="all_reduce", slices=[1, 5])
    assert [each.slices for each in named.launches] == [(1, 5)] * 4 + [(1,)] * 2
    assert all(each.proof is not None for each in named.launches)


def test_across_nodes():
    report = ringcoll.prove("hierarchical", 4, collective="all_reduce", nodes=(0, 0, 1, 1))
    assert {each.launch.nodes for each in report.launches} == {(0, 0, 1, 1)}
    assert all(each.proof is not None for each in report.launches)


def test_own_signals_are_kept_and_what_they_cannot_carry_is_listed():
    report = ringcoll.prove(signalled, 2)
    assert "its own waits and signals" in str(report)
    mapped, staged = report.launches[0], report.launches[2]
    assert (mapped.slices, mapped.signals) == ((1,), 2)
    assert staged.proof is None
    assert "hand-written synchronisation cannot be staged" in staged.refusal


@pytest.mark.parametrize("name", ALGORITHMS["barrier"])
def test_a_barrier_has_no_buffers_and_one_launch(name):
    report = ringcoll.prove(name, 4, collective="barrier")
    assert [each.proof is not None for each in report.launches] == [True]
    assert report.hops == {"all_pairs": 1, "dissemination": 2}[name]


@pytest.mark.parametrize(
    ("collective", "algorithm", "nranks", "count"),
    [
        ("all_reduce", "ring", 4, 6),
        ("all_reduce", "one_shot", 4, 1),
        ("all_reduce", "two_shot_fused", 4, 2),
        ("all_reduce", "recursive_doubling", 8, 3),
        ("broadcast", "chain", 5, 4),
        ("all_gather", "bruck", 8, 3),
    ],
)
def test_hops(collective, algorithm, nranks, count):
    assert hops(build(collective, algorithm, nranks)) == count


def test_a_wrong_plan_is_refused_with_rank_block_and_step():
    lost = star(4).with_order(star(4).order[:-1])
    with pytest.raises(WrongResult, match=r"rank 3, .*3\.O\[0\]: seen nothing, wanted every"):
        ringcoll.prove(lost)
    twice = star(2).with_order(
        ((Block(0), Step((Chunk(0, Buffer.INPUT, 0),) * 2, (Chunk(0, Buffer.OUTPUT, 0),))),)
    )
    with pytest.raises(WrongResult, match=r"rank 0 channel 0 lane 0, step 0: .*seen twice"):
        ringcoll.prove(twice)
    late = signalled(2)
    with pytest.raises(Deadlock, match="step 0: seen 0 of 1 signals wanted of rank 1"):
        ringcoll.prove(late.with_order(late.order[1:]))


def test_what_is_right_as_it_is_written_names_the_launch_that_fails(monkeypatch):
    def broken(plan, launch, **how):
        if launch.in_place:
            raise Race("all_reduce: a race")
        return verify_slices(plan, launch, **how)

    monkeypatch.setattr("ringcoll.verifier.launches.verify_slices", broken)
    with pytest.raises(Race, match=r"a race \(mapped, in place, S=1, W=2\)"):
        ringcoll.prove(star, 3)


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "text"),
    [
        ((star,), {}, ArgumentError, "nranks is missing"),
        (("ring", 4), {}, ArgumentError, "collective= is missing"),
        ((7, 4), {}, ArgumentTypeError, "seen a int, wanted a function"),
        ((star(4), 3), {}, ArgumentError, "wanted nranks=3"),
        ((star, 4), {"collective": "broadcast"}, ArgumentError, "returned a plan of all_reduce"),
        (
            (star, 4),
            {"root": 1},
            ArgumentError,
            "does not take root; leave it out, all_reduce has no root",
        ),
        ((rootless, 3), {"root": 1}, ArgumentError, "write def rootless(nranks, root=0"),
        ((lambda n: star(n + 1), 4), {}, ArgumentError, "of 5 ranks, 1 chunks for 4 ranks"),
        ((lambda _: None, 4), {}, ArgumentTypeError, "returned a NoneType for 4 ranks, wanted"),
    ],
)
def test_what_is_no_algorithm_is_refused(arguments, options, kind, text):
    with pytest.raises(kind, match=text.replace("(", r"\(")):
        ringcoll.prove(*arguments, **options)


def test_verify_proves_lowered_plans_and_sends_others_to_prove():
    assert ringcoll.verify(lower(star(4), Launch())).total
    with pytest.raises(EntryViolation, match=r"no waits and signals yet: ringcoll\.prove\(plan\)"):
        ringcoll.verify(star(4))


CHUNK = Chunk(0, Buffer.INPUT, 0)
# What a checker of types would refuse.
AnyChunk: Any = Chunk
AnyStep: Any = Step


@pytest.mark.parametrize(
    ("collective", "order", "message"),
    [
        ("all_reduce", (), "its collective is 'all_reduce', wanted a Collective"),
        (None, [], "its order is a list, wanted a tuple"),
        (None, ((0, Step()),), "entry 0 of its order: .*wanted a pair"),
        (None, ((Block(0), AnyStep([CHUNK])),), "step 0: srcs=.*wanted a tuple of Chunk"),
        (None, ((Block(0), AnyStep(CHUNK, (CHUNK,))),), "srcs=.*wanted a tuple of Chunk"),
        (None, ((Block(0), AnyStep(waits=(0,))),), r"waits=\(0,\), wanted a tuple of Block"),
        (None, ((Block(0), Step((AnyChunk(0, "input", 0),))),), "is 'input', wanted Buffer.INPUT"),
    ],
)
def test_what_is_no_plan_is_named(collective, order, message):
    plan = Plan(collective or Collective("all_reduce", 3), order)
    with pytest.raises(ringcoll.ArgumentTypeError, match=message):
        ringcoll.prove(plan)
    with pytest.raises(ringcoll.ArgumentTypeError, match=message):
        ringcoll.prove(lambda nranks: plan, 3)


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (Step((Chunk(3, Buffer.INPUT, 0),), (Chunk(1, Buffer.OUTPUT, 0),)), IllegalStep, "rank 3,"),
        (Step((Chunk(0, Buffer.INPUT, 9),), (Chunk(1, Buffer.OUTPUT, 0),)), IllegalStep, "9"),
        (AnyStep([CHUNK]), ringcoll.ArgumentTypeError, "wanted a tuple of Chunk"),
        (Step((Chunk(1, Buffer.SCRATCH, 0),), (Chunk(1, Buffer.OUTPUT, 0),)), WrongResult, "seen"),
    ],
)
def test_errors_number_the_steps_of_a_block_as_they_are_written(step, error, message):
    """Steps of other blocks are not counted, nor the wait for entry that lowering adds."""
    first = Step((Chunk(0, Buffer.INPUT, 0),), (Chunk(1, Buffer.SCRATCH, 1),))
    order = [*star(3).order, (Block(1, channel=1), first), (Block(1, channel=1), step)]
    with pytest.raises(error, match=rf"rank 1 channel 1 lane 0, step 1: .*{message}"):
        ringcoll.prove(Plan(Collective("all_reduce", 3), tuple(order)))
