"""The clock: exact for the chain, honest about windows, equal however a plan is folded."""

from __future__ import annotations

import pytest

from ringcoll.algorithms import ALGORITHMS, build
from ringcoll.collectives import Collective
from ringcoll.errors import ArgumentError, Deadlock, PlanError
from ringcoll.launch import Launch, Layout
from ringcoll.lower import lower, place
from ringcoll.model.closed_form import CLOSED_FORMS, chain_time, closed_form
from ringcoll.model.fold import arrivals, fold
from ringcoll.model.graph import TICKS
from ringcoll.model.links import Links, Wire, equal_nodes
from ringcoll.model.predict import Clock, predict
from ringcoll.plan import Block, Buffer, Chunk, Plan, Step
from tests.model.plans import chain

N, B = 64 * 2**20, 10e9
MOVING = [(c, a) for c, builders in ALGORITHMS.items() for a in builders if c != "barrier"]


def ranks_of(collective, *some):
    return (2,) if collective == "send" else some


@pytest.mark.parametrize("nranks", [2, 3, 5, 8])
def test_the_chain_takes_what_the_formula_says(nranks):
    plans = chain(nranks), build("broadcast", "chain", nranks), build("reduce", "chain", nranks)
    for alpha, latency in ((0.0, 0.0), (1e-5, 0.0), (1e-5, 3e-6)):
        clocks = [Clock(plan, Links(B, alpha, latency), window=4) for plan in plans]
        for slices in range(1, 65):
            wanted = chain_time(nranks, N, slices, B, alpha, latency)
            for clock in clocks:
                # Exact but for the rounding of the formula itself.
                seconds = clock.predict(N, slices).seconds
                assert seconds == pytest.approx(wanted, rel=4e-16 if latency or alpha else 0)


def test_the_chain_is_exact_to_the_last_bit_where_the_formula_is():
    for slices in (1, 3, 48, 1000):
        assert predict(chain(5), N, Links(B), slices=slices).seconds == chain_time(5, N, slices, B)


def test_a_relayed_chain_with_one_slot_runs_at_half_rate():
    full = chain_time(4, N, 256, B)
    alone = predict(chain(4, relay=True), N, Links(B), slices=256, window=1).seconds
    assert alone == pytest.approx(2 * full, rel=0.01)
    for window in (2, 8):
        plan = chain(4, relay=True)
        assert predict(plan, N, Links(B), slices=256, window=window).seconds == full
        lowered = lower(plan, Launch(slices=64, window=window))
        assert predict(lowered, N, Links(B)).seconds == chain_time(4, N, 64, B)
    lowered = lower(chain(4, relay=True), Launch(slices=64, window=1))
    assert predict(lowered, N, Links(B)).seconds > 1.9 * chain_time(4, N, 64, B)


@pytest.mark.parametrize(("flight", "enough"), [(0, 2), (1, 4), (2, 6), (3, 8)])
def test_full_rate_needs_two_slots_and_two_flights(flight, enough):
    # L is `flight` slice times; W must be at least 2 + 2L/t.
    slices = 96
    slice_time = N / slices / B
    links = Links(B, latency=flight * slice_time)
    full = chain_time(5, N, slices, B, latency=flight * slice_time)
    plan = chain(5, relay=True)
    assert predict(plan, N, links, slices=slices, window=enough).seconds == pytest.approx(full)
    if enough > 2:
        slow = predict(plan, N, links, slices=slices, window=enough - 2).seconds
        assert slow == pytest.approx(full * enough / (enough - 2), rel=0.1)


@pytest.mark.parametrize(("collective", "algorithm"), MOVING)
@pytest.mark.parametrize("topology", ["switch", "pairs", "memory"])
def test_an_algorithm_and_its_lowered_plan_take_the_same_time(collective, algorithm, topology):
    for nranks in ranks_of(collective, *((1, 3, 4) if topology == "switch" else (3,))):
        plan = build(collective, algorithm, nranks)
        if any(chunk.size > 1 for _, step in plan.order for chunk in step.srcs):
            continue
        for slices, window in ((1, 2), (2, 1), (7, 3)):
            links = Links(B, 1e-6, 2e-6, topology, local_bandwidth=3 * B)
            sliced = predict(plan, N, links, slices=slices, window=window)
            lowered = predict(lower(plan, Launch(slices=slices, window=window)), N, links)
            # A lowered plan tells a rank that it may end when the others' blocks end.
            late = [end - early for early, end in zip(sliced.ends, lowered.ends, strict=True)]
            assert min(late) > -1e-15
            assert lowered.seconds - sliced.seconds < 2.001e-6


@pytest.mark.parametrize(("collective", "algorithm"), MOVING)
def test_a_staged_plan_and_its_lowered_plan_take_the_same_time(collective, algorithm):
    links = Links(B, 1e-6, 2e-6, local_bandwidth=3 * B)
    for nranks in ranks_of(collective, 3):
        for slices, window in ((1, 2), (7, 3)):
            launch = Launch(slices=slices, window=window, mapped=frozenset())
            staged = place(build(collective, algorithm, nranks), launch)
            sliced = predict(staged, N, links, slices=slices, window=window)
            lowered = predict(lower(build(collective, algorithm, nranks), launch), N, links)
            assert abs(lowered.seconds - sliced.seconds) < 2.001e-6


@pytest.mark.parametrize(("collective", "algorithm"), [*MOVING, ("barrier", "dissemination")])
@pytest.mark.parametrize("topology", ["switch", "pairs", "memory"])
def test_one_rank_stands_for_all_of_a_symmetric_plan(collective, algorithm, topology):
    for nranks in ranks_of(collective, *((2, 3, 8, 12) if topology == "switch" else (3, 8))):
        full = build(collective, algorithm, nranks)
        if full.symmetry is None:
            continue
        one = build(collective, algorithm, nranks, only=frozenset({0}))
        for slices, window in ((1, 2), (2, 1), (5, 2)) if collective != "barrier" else ((1, 2),):
            links = Links(B, 1e-6, 2e-6, topology, local_bandwidth=3 * B)
            whole = predict(full, N, links, slices=slices, window=window, symmetry=False)
            folded = predict(one, N, links, slices=slices, window=window)
            assert folded.seconds == whole.seconds
            assert folded.ends == whole.ends
            assert folded.occupied == whole.occupied
            assert folded.steps == whole.steps


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [("all_reduce", "ring"), ("all_gather", "ring"), ("all_reduce", "all_pairs")],
)
def test_symmetric_folds_are_equal_up_to_64_ranks(collective, algorithm):
    full = build(collective, algorithm, 64)
    one = build(collective, algorithm, 64, only=frozenset({0}))
    links = Links(B, 1e-6, 2e-6)
    for slices in (1, 3):
        whole = predict(full, N, links, slices=slices, symmetry=False)
        assert predict(one, N, links, slices=slices).seconds == whole.seconds
        assert whole.steps == whole.folded


def check_stretched(clock, slices):
    predicted = clock.predict(N, slices)
    graph, costs = clock.graph(slices), clock.costs(N, slices)
    ends = arrivals(graph, fold(graph, costs, slices), clock.plan.nranks)
    assert predicted.ends == tuple(end / TICKS for end in ends)
    return predicted


@pytest.mark.parametrize(("collective", "algorithm"), MOVING)
def test_a_stretched_fold_is_the_whole_fold(collective, algorithm):
    for nranks, windows in ((3, (1, 3)), (5, (2,)), (8, (1, 3))):
        plan = build(collective, algorithm, *ranks_of(collective, nranks))
        for window in windows:
            check_stretched(Clock(plan, Links(B, 1e-6, 5e-6), window=window), 61)


def test_deep_pipelines_are_stretched_and_lanes_that_drift_apart_are_not():
    relayed = Clock(chain(40, relay=True), Links(B, 1e-6, 5e-5), window=3)
    assert check_stretched(relayed, 300).folded < 100 * 78
    two_shot = Clock(build("all_reduce", "two_shot", 4), Links(B))
    assert check_stretched(two_shot, 100).folded > 100 * len(two_shot.plan.order)


def test_large_symmetric_plans_fold_few_steps():
    one = build("all_reduce", "ring", 1024, only=frozenset({0}))
    predicted = predict(one, N, Links(B, 1e-6, 1e-6), slices=256)
    assert predicted.folded < 100 * len(one.order)
    assert predicted.steps == 256 * 1024 * len(one.order)
    assert len(predicted.ends) == 1024
    assert predicted.busiest == "egress of every rank"


@pytest.mark.parametrize(("collective", "algorithm"), sorted(CLOSED_FORMS))
def test_closed_forms_are_what_the_clock_says_of_one_slice(collective, algorithm):
    assert algorithm in ALGORITHMS[collective]
    for nranks in ranks_of(collective, 1, 2, 3, 4, 8, 11):
        form = closed_form(collective, algorithm, nranks)
        assert form is not None
        seconds = predict(build(collective, algorithm, nranks), N, Links(B, 1e-6, 3e-6)).seconds
        assert seconds == pytest.approx(form.seconds(N, B, 1e-6, 3e-6), rel=1e-9)


def test_more_bandwidth_never_hurts_and_more_bytes_never_help():
    for collective, algorithm in MOVING:
        plan = build(collective, algorithm, *ranks_of(collective, 5))
        for slices in (1, 6):
            slow = predict(plan, N, Links(B, 1e-6, 1e-6), slices=slices).seconds
            assert predict(plan, N, Links(2 * B, 1e-6, 1e-6), slices=slices).seconds < slow
            assert predict(plan, 2 * N, Links(B, 1e-6, 1e-6), slices=slices).seconds > slow
            assert predict(plan, N, Links(B, 2e-6, 1e-6), slices=slices).seconds > slow
            assert predict(plan, N, Links(B, 1e-6, 2e-6), slices=slices).seconds > slow


def test_no_order_of_steps_beats_the_busiest_port():
    for collective, algorithm in MOVING:
        plan = build(collective, algorithm, *ranks_of(collective, 6))
        for topology in ("switch", "pairs", "memory"):
            predicted = predict(plan, N, Links(B, 1e-6, topology=topology), slices=4)
            assert 0 < predicted.occupied <= predicted.seconds


def test_lanes_hide_one_hop_of_two_shot_behind_the_other():
    def fused(plan):
        return plan.with_order(
            tuple((Block(block.rank, block.channel), step) for block, step in plan.order)
        )

    plan = build("all_reduce", "two_shot", 4)
    links = Links(B, topology="pairs")
    lanes = predict(plan, N, links, slices=32).seconds
    # A slice's 3 writes hide its read; in one block they follow it.
    assert predict(fused(plan), N, links, slices=32).seconds == pytest.approx(
        lanes * 4 / 3, rel=0.02
    )


def test_ports_of_a_switch_are_shared_and_wires_of_pairs_are_not():
    plan = build("all_reduce", "one_shot", 5)
    assert predict(plan, N, Links(B)).seconds == pytest.approx(4 * N / B)
    assert predict(plan, N, Links(B, topology="pairs")).seconds == pytest.approx(N / B)


def test_hops_share_a_memory():
    plan = build("all_gather", "ring", 4)
    predicted = predict(plan, N, Links(B, topology="memory"))
    # 4 ranks copy 3 segments of N/4, and one more for themselves: two thirds of a double write.
    copies = 4 * (1.5 + 1 + 1) / 4
    assert predicted.seconds == pytest.approx(copies * N / B)
    assert predicted.busiest == "memory"


def test_copies_within_a_rank_cost_what_the_links_say():
    plan = Plan(
        Collective("broadcast", 1),
        ((Block(0), Step((Chunk(0, Buffer.INPUT, 0),), (Chunk(0, Buffer.OUTPUT, 0),))),),
    )
    assert predict(plan, N, Links(B)).seconds == 0.0
    assert predict(plan, N, Links(B)).busiest == "nothing"
    assert predict(plan, N, Links(B, local_bandwidth=B)).seconds == N / B


def test_nodes_are_joined_by_the_network():
    plan = build("broadcast", "chain", 4)
    network = Wire(B / 10, 5e-6, 7e-6)
    links = Links(B, 1e-6, 2e-6, nodes=equal_nodes(4, 2), network=network)
    wanted = 2 * (N / B + 1e-6 + 2e-6) + N / (B / 10) + 5e-6 + 7e-6
    predicted = predict(plan, N, links)
    assert predicted.seconds == pytest.approx(wanted)
    assert predicted.busiest == "network egress of rank 1"


def test_a_barrier_pays_a_message_for_each_signal():
    links = Links(B, 1e-6, 4e-6)
    everyone = predict(build("barrier", "all_pairs", 8), 0, links).seconds
    assert everyone == pytest.approx(7e-6 + 4e-6)
    assert predict(build("barrier", "dissemination", 8), 0, links).seconds == pytest.approx(15e-6)


def bytes_of(layout):
    """The bytes of each chunk, of elements of 4."""
    return lambda chunk: layout.span(chunk.buffer, chunk.rank, chunk.index)[1] * 4


def test_uneven_chunks_take_the_time_of_the_longest():
    plan = build("all_gather", "all_pairs", 3)
    layout = Layout(plan.collective, counts=(10, 0, 1000))
    predicted = predict(plan, 0, Links(1.0), sizes=bytes_of(layout))
    assert predicted.seconds == pytest.approx(2 * 4000)
    lowered = lower(plan, Launch(slices=2, mapped=frozenset()))
    sliced = Layout(plan.collective, counts=(10, 0, 1000), slices=2)
    staged = predict(lowered, 0, Links(1.0), sizes=bytes_of(sliced))
    assert staged.seconds == pytest.approx(2 * 4000, rel=0.01)


def test_a_deadlock_is_named():
    one, other = Block(0), Block(1)
    order = ((one, Step(waits=(other,), signals=(other,))), (other, Step(waits=(one,))))
    with pytest.raises(Deadlock, match="rank 0"):
        predict(Plan(Collective("barrier", 2), order), 0, Links(B))


def test_what_makes_no_sense_is_refused():
    plan = build("broadcast", "chain", 4)
    with pytest.raises(ArgumentError, match="slices"):
        predict(plan, N, Links(B), slices=0)
    with pytest.raises(ArgumentError, match="slices"):
        predict(lower(plan, Launch(slices=2)), N, Links(B), slices=2)
    with pytest.raises(ArgumentError, match="nbytes"):
        predict(plan, -1, Links(B))
    with pytest.raises(ArgumentError, match="window"):
        predict(plan, N, Links(B), window=0)
    with pytest.raises(ArgumentError, match=r"links\.nodes"):
        predict(plan, N, Links(B, nodes=(0, 1)))
    with pytest.raises(PlanError, match="symmetry"):
        predict(plan, N, Links(B), symmetry=True)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"bandwidth": 0}, "bandwidth"),
        ({"bandwidth": 1.0, "alpha": -1.0}, "alpha"),
        ({"bandwidth": 1.0, "latency": float("inf")}, "latency"),
        ({"bandwidth": 1.0, "topology": "torus"}, "links"),
        ({"bandwidth": 1.0, "local_bandwidth": 0}, "local_bandwidth"),
    ],
)
def test_links_without_meaning_are_refused(given, names):
    with pytest.raises(ArgumentError, match=names):
        Links(**given)


def test_nodes_must_divide_the_ranks():
    assert equal_nodes(6, 3) == (0, 0, 1, 1, 2, 2)
    with pytest.raises(ArgumentError, match="nodes=4"):
        equal_nodes(6, 4)
