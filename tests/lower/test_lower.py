"""Lowering: what comes out is right, synchronised with nothing to spare, and still a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringcoll.algorithms import build
from ringcoll.collectives import Collective
from ringcoll.errors import ArgumentError, IllegalStep, LaunchRefused, PlanError
from ringcoll.launch import ALL_MAPPED, Launch
from ringcoll.lower import lower
from ringcoll.plan import HELLO, Block, Buffer, Chunk, Plan, Step, hello
from ringcoll.verifier.prover import verify
from tests.lower.plans import every_launch, every_plan

IN, OUT, TMP = Buffer.INPUT, Buffer.OUTPUT, Buffer.SCRATCH


@pytest.mark.parametrize("nranks", [1, 2, 3, 4])
def test_every_lowered_plan_is_proven(nranks: int) -> None:
    proven = 0
    for plan in every_plan(nranks, root=nranks - 1):
        for slices in (1, 3):
            for launch in every_launch(plan, slices):
                proof = verify(lower(plan, launch))
                proven += proof.steps > 0 or nranks == 1
    assert proven > 100


@pytest.mark.parametrize("algorithm", ["ring", "two_shot", "one_shot"])
@pytest.mark.parametrize("mapped", [ALL_MAPPED, frozenset()], ids=["mapped", "staged"])
@pytest.mark.parametrize("in_place", [False, True])
def test_no_derived_wait_can_be_dropped(
    algorithm: str, mapped: frozenset[Buffer], *, in_place: bool
) -> None:
    launch = Launch(slices=3, window=2, mapped=mapped, in_place=in_place)
    lowered = lower(build("all_reduce", algorithm, 3), launch)
    verify(lowered)
    tried = 0
    for at, (block, step) in enumerate(lowered.order):
        for k, wait in enumerate(step.waits):
            if wait.channel == HELLO:
                continue
            rest = step._replace(waits=step.waits[:k] + step.waits[k + 1 :])
            order = list(lowered.order)
            order[at] = (block, rest)
            _drop_matching_signal(lowered, order, at, wait, block)
            with pytest.raises(PlanError):
                verify(lowered.with_order(tuple(order)))
            tried += 1
    assert tried > 0


def _drop_matching_signal(
    plan: Plan, order: list[tuple[Block, Step]], at: int, src: Block, dst: Block
) -> None:
    """Remove from ``order`` the signal that the wait at ``at`` took: the m-th of its pair."""
    taken = sum(step.waits.count(src) for block, step in plan.order[:at] if block == dst)
    for i, (block, step) in enumerate(plan.order):
        if block == src and dst in step.signals:
            if taken == 0:
                left = list(step.signals)
                left.remove(dst)
                order[i] = (block, order[i][1]._replace(signals=tuple(left)))
                return
            taken -= 1


def test_entry_waits_stand_first_and_exit_waits_last() -> None:
    lowered = lower(build("all_reduce", "two_shot_fused", 3), Launch(slices=2, in_place=True))
    for rank in range(3):
        (block,) = lowered.blocks(rank)
        steps = lowered.steps[block]
        others = tuple(r for r in range(3) if r != rank)
        assert steps[0] == Step(waits=tuple(hello(r) for r in others))
        assert steps[-1].waits == tuple(Block(r) for r in others)
        assert not steps[-1].dsts


def test_in_place_reads_input_through_scratch_only_where_it_is_overwritten() -> None:
    one_shot = lower(build("all_reduce", "one_shot", 3), Launch(in_place=True))
    assert {c.buffer for _, step in one_shot.order for c in step.srcs} == {IN, TMP}
    two_shot = lower(build("all_reduce", "two_shot_fused", 3), Launch(in_place=True))
    assert two_shot.scratch() == 0


def test_in_place_drops_a_copy_onto_itself() -> None:
    lowered = lower(build("all_gather", "one_shot", 3), Launch(in_place=True))
    cell = lowered.collective.cell
    for _, step in lowered.order:
        assert not {cell(c) for c in step.srcs} & {cell(c) for c in step.dsts}


def test_a_staged_write_to_many_is_written_once() -> None:
    lowered = lower(build("all_reduce", "two_shot_fused", 4), Launch(mapped=frozenset()))
    for block, step in lowered.order:
        far = [c for c in (*step.srcs, *step.dsts) if c.rank != block.rank]
        assert all(c.buffer is TMP for c in far)
        assert len([c for c in step.dsts if c.buffer is TMP]) <= 1


def test_a_scratch_chunk_has_no_more_slots_than_slices() -> None:
    plan = build("broadcast", "chain", 3)
    for slices in (1, 2, 3, 5):
        launch = Launch(slices=slices, window=2, mapped=frozenset())
        assert lower(plan, launch).scratch() == min(2, slices)


def test_one_slice_fuses_the_lanes_of_a_channel() -> None:
    plan = build("all_reduce", "two_shot", 3)
    assert {b.lane for b in plan.steps} == {0, 1}
    assert {b.lane for b in lower(plan, Launch(slices=1)).steps} == {0}
    assert {b.lane for b in lower(plan, Launch(slices=2)).steps} == {0, 1}


def test_hand_written_synchronisation_is_kept() -> None:
    plan = build("barrier", "dissemination", 5)
    assert lower(plan, Launch()).order == plan.order


def test_hand_written_synchronisation_is_neither_staged_nor_sliced() -> None:
    a, b = Block(0), Block(1)
    order = (
        (a, Step((Chunk(0, IN, 0),), (Chunk(1, OUT, 0),), signals=(b,))),
        (b, Step(waits=(a,))),
    )
    plan = Plan(Collective("send", 2), order)
    assert lower(plan, Launch()).order == order
    with pytest.raises(LaunchRefused, match="staged"):
        lower(plan, Launch(mapped=frozenset()))
    with pytest.raises(LaunchRefused, match="slices=1"):
        lower(plan, Launch(slices=2))


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (Step((Chunk(0, IN, 0),), (Chunk(1, OUT, 0), Chunk(1, OUT, 0))), "same destination twice"),
        (Step((Chunk(0, IN, 0),), (Chunk(1, OUT, 5),)), "outside"),
        (Step((), (Chunk(1, OUT, 0),)), "without destinations"),
        (Step((Chunk(0, IN, 0),), (Chunk(1, TMP, 0, 2),)), "different sizes"),
    ],
)
def test_a_step_without_meaning_is_refused(step: Step, said: str) -> None:
    with pytest.raises(IllegalStep, match=said) as caught:
        lower(Plan(Collective("broadcast", 2), ((Block(0), step),)), Launch())
    assert "rank 0" in str(caught.value)
    assert "step 0" in str(caught.value)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ["all_to_all", "all_gather"])
def test_by_hops_a_step_that_waits_for_nothing_stands_behind_none_that_waits(
    name: str, *, in_place: bool
) -> None:
    """Ranks that share a core would give it away at each that waits for a later one of a peer."""
    for algorithm in ("all_pairs", "one_shot"):
        plan = build(name, algorithm, 4)
        launch = Launch(mapped=frozenset(), in_place=in_place, by_hops=True)
        lowered = lower(plan, launch)
        assert verify(lowered).steps == verify(lower(plan, replace(launch, by_hops=False))).steps
        for rank in range(4):
            own = [step for block, step in lowered.order if block.rank == rank]
            others = [[wait for wait in step.waits if wait.rank != rank] for step in own]
            free = [not waits for waits in others]
            assert free == sorted(free, reverse=True)
            assert free.count(False) == 3


def test_slices_and_nodes_keep_the_order_of_the_plan() -> None:
    plan = build("all_to_all", "all_pairs", 3)
    cut = Launch(slices=2, mapped=frozenset())
    assert lower(plan, replace(cut, by_hops=True)) == lower(plan, cut)
    with pytest.raises(ArgumentError, match="between nodes"):
        Launch(nodes=(0, 0, 1), by_hops=True)
