"""What crosses nodes is messages, and no more is needed: proven, and broken on purpose."""

from itertools import product

import pytest

from ringcoll.algorithms import ALGORITHMS, build
from ringcoll.algorithms.nodes import renumbered
from ringcoll.encode import encode, expand
from ringcoll.errors import ArgumentError, IllegalStep, LaunchRefused, PlanError, Race
from ringcoll.launch import ALL_MAPPED, Launch
from ringcoll.lower import lower
from ringcoll.lower.network import check_messages
from ringcoll.plan import Block, Buffer, Chunk, Step
from ringcoll.verifier.calls import verify_calls
from ringcoll.verifier.examine import Case, examine, judge
from ringcoll.verifier.mutants import sample
from ringcoll.verifier.prover import Prover, verify
from ringcoll.verifier.reachability import history

PLACES = ((0, 1), (0, 0, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 2), (0, 1, 1, 0, 2))
STAGED: frozenset[Buffer] = frozenset()


def every(nranks):
    for collective, algorithms in ALGORITHMS.items():
        if collective != "send" or nranks == 2:
            yield from ((collective, algorithm) for algorithm in algorithms)


def crossing(plan, nodes):
    return [
        (block, step)
        for block, step in plan.order
        if any(nodes[c.rank] != nodes[block.rank] for c in (*step.srcs, *step.dsts))
    ]


@pytest.mark.parametrize("nodes", PLACES, ids=str)
def test_every_algorithm_is_proven_across_nodes(nodes):
    # Of memory, slices and place each pair; all three meet in tests/lower, on one node.
    for (collective, algorithm), mapped, count in product(
        every(len(nodes)), (STAGED, ALL_MAPPED), (1, 3)
    ):
        plan = build(collective, algorithm, len(nodes))
        slices = 1 if collective == "barrier" else count
        can = collective not in ("send", "barrier")
        for in_place in ((mapped is STAGED) == (count == 3) and can,):
            launch = Launch("Simple", slices, 2, mapped, in_place, nodes)
            lowered = lower(plan, launch)
            verify(lowered, nodes=nodes)
            for _, step in crossing(lowered, nodes):
                assert [dst.buffer for dst in step.dsts] == [Buffer.WIRE]


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "broadcast", "all_to_all"])
def test_the_program_spells_out_the_lowered_plan(collective):
    nodes = (0, 0, 1, 1)
    for algorithm in ALGORITHMS[collective]:
        plan = build(collective, algorithm, 4)
        for slices in (1, 2, 7):
            launch = Launch("Simple", slices, 2, STAGED, False, nodes)
            lowered, program = lower(plan, launch), encode(plan, launch)
            for block in program.programs:
                spelt = tuple(expand(program, block, slices))
                assert spelt == lowered.steps[block.block]


def test_nothing_is_sent_twice_to_a_node():
    lowered = lower(build("all_gather", "all_pairs", 6), Launch(nodes=(0, 0, 0, 1, 1, 1)))
    # Each of 6 segments crosses once, in whichever direction.
    assert len(crossing(lowered, (0, 0, 0, 1, 1, 1))) == 6


def test_no_credit_crosses_nodes():
    nodes = (0, 0, 1, 1)
    for algorithm in ALGORITHMS["all_reduce"]:
        lowered = lower(build("all_reduce", algorithm, 4), Launch(slices=9, nodes=nodes))
        sent = {
            (block, signal)
            for block, step in lowered.order
            for signal in step.signals
            if nodes[block.rank] != nodes[signal.rank] and step.dsts[0].buffer is not Buffer.WIRE
        }
        assert not sent


def test_hand_written_synchronisation_crosses_without_data_only():
    nodes = (0, 1)
    barrier = lower(build("barrier", "dissemination", 2), Launch(nodes=nodes))
    check_messages(barrier, nodes)
    plan = build("broadcast", "chain", 2)
    first, *rest = plan.order
    signalling = plan.with_order(((first[0], first[1]._replace(signals=(Block(1),))), *rest))
    with pytest.raises(LaunchRefused, match="hand-written"):
        lower(signalling, Launch(nodes=nodes))


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [("all_reduce", "hierarchical"), ("all_reduce", "ring"), ("broadcast", "chain")],
)
@pytest.mark.parametrize("nodes", [(0, 1), (0, 0, 1)], ids=str)
def test_mutants_of_messages_are_rejected(collective, algorithm, nodes):
    plan = build(collective, algorithm, len(nodes))
    lowered = lower(plan, Launch("Simple", 3, 2, STAGED, False, nodes))
    before, prover = history(lowered), Prover(lowered.collective, nodes=nodes)
    rejected = 0
    for kind, mutant in sample(lowered, seed=1):
        verdict = judge(kind, mutant, before, prover)
        assert not verdict.failure, f"{kind}: {verdict.failure}"
        rejected += verdict.rejected
    assert rejected > 20


@pytest.mark.parametrize(
    ("collective", "algorithm"), [("all_reduce", "hierarchical"), ("gather", "one_shot")]
)
def test_all_of_an_algorithm_across_nodes_is_proven_and_doubted(collective, algorithm):
    found = examine(Case(collective, algorithm, 2, nodes=(0, 1)))
    made, rejected, equivalent = found.mutants()
    assert not found.failures
    assert made == rejected + equivalent
    assert rejected > 200


def test_a_message_that_nobody_is_told_of_is_a_race():
    nodes = (0, 1)
    lowered = lower(build("broadcast", "chain", 2), Launch(nodes=nodes))
    silent = lowered.with_order(
        tuple((block, step._replace(signals=(), waits=())) for block, step in lowered.order)
    )
    with pytest.raises(Race):
        verify(silent, nodes=nodes)


def wrong_plans():
    """A broadcast in two messages, right and in every way wrong that the executor cannot carry."""
    plan = build("broadcast", "chain", 2)
    lowered = lower(plan, Launch(slices=2, nodes=(0, 1)))
    sends = [at for at, (block, step) in enumerate(lowered.order) if block.rank == 0 and step.dsts]
    sends = [at for at in sends if lowered.order[at][1].dsts[0].buffer is Buffer.WIRE]
    reads = [at for at, (_, s) in enumerate(lowered.order) if s.srcs and s.srcs[0].rank == 1]
    reads = [at for at in reads if lowered.order[at][1].srcs[0].buffer is Buffer.WIRE]
    order = list(lowered.order)

    def changed(at, **fields):
        copy = list(order)
        copy[at] = copy[at][0], copy[at][1]._replace(**fields)
        return lowered.with_order(tuple(copy))

    def sources(at):
        return order[at][1].srcs

    first, second = reads[:2]
    swapped = list(order)
    swapped[first] = order[first][0], order[first][1]._replace(srcs=sources(second))
    swapped[second] = order[second][0], order[second][1]._replace(srcs=sources(first))
    yield "out of order", lowered.with_order(tuple(swapped)), "wanted a copy of a message|order"
    yield "read twice", changed(second, srcs=sources(first)), "once"
    yield "written twice", changed(sends[1], dsts=order[sends[0]][1].dsts), "one new message"
    yield "never read", lowered.with_order(tuple(order[: reads[-1]])), "never received|none awaits"

    def moved(at, **fields):
        copy = list(order)
        copy[at] = copy[at][0]._replace(**fields), copy[at][1]
        return lowered.with_order(tuple(copy))

    yield "two that send", moved(sends[1], lane=9), "two blocks that send to rank 1"
    yield "two that read", moved(second, lane=9), "one block to read"
    yield "read on another channel", moved(first, channel=1), "one block to read"
    out = (Chunk(1, Buffer.OUTPUT, 0),)
    yield "no message", changed(sends[0], dsts=out), "wanted a message"
    yield "no news", changed(first, waits=()), "no message stands for"
    credit = (order[first][0],)
    yield "a credit", changed(sends[1], waits=credit), "no message stands for"


@pytest.mark.parametrize(("plan", "why"), [(p, w) for _, p, w in wrong_plans()])
def test_what_the_executor_cannot_carry_is_refused(plan, why):
    with pytest.raises(IllegalStep, match=why):
        check_messages(plan, (0, 1))


def test_calls_in_a_row_with_messages():
    nodes = (0, 1)
    launch = Launch("Simple", 1, 2, STAGED, False, nodes)
    total = lower(build("all_reduce", "hierarchical", 2), launch)
    rooted = lower(build("broadcast", "chain", 2), launch)
    verify_calls((total, rooted, total, rooted, rooted))


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (3, 1, 0, 2)], ids=str)
def test_renumbered_plans_are_the_same_collective(order):
    for collective, algorithm in every(4):
        plan = build(collective, algorithm, 4)
        if plan.collective.kind.prefix:
            with pytest.raises(ArgumentError, match="a prefix follows the numbers of the ranks"):
                renumbered(plan, order)
            continue
        plan = renumbered(plan, order)
        if plan.collective.kind.has_root:
            assert plan.collective.root == order[0]
        if collective != "barrier":
            verify(lower(plan, Launch()))


def test_sends_and_receives_keep_their_lanes():
    lowered = lower(build("all_to_all", "all_pairs", 3), Launch(nodes=(0, 1, 2)))
    for block, steps in lowered.steps.items():
        carried = [
            any(c.buffer is Buffer.WIRE for c in (*step.srcs, *step.dsts))
            for step in steps
            if step != Step() and step.dsts
        ]
        assert len(set(carried)) <= 1, block


def test_a_reduction_into_another_node_is_refused_by_the_proof():
    nodes = (0, 1)
    with pytest.raises(PlanError):
        verify(lower(build("all_reduce", "ring", 2), Launch()), nodes=nodes)
