"""The choice of an algorithm and its slices: the argmin of the clock, refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringcoll.algorithms import ALGORITHMS, build
from ringcoll.errors import ArgumentError, LaunchRefused
from ringcoll.model import fastest as model
from ringcoll.model.closed_form import chain_best_slices, chain_time
from ringcoll.model.fastest import SMALLEST, Candidate, best_slices, candidates_for, plan_for
from ringcoll.model.links import Links, Wire, equal_nodes
from ringcoll.model.predict import Clock, predict

N, B = 64 << 20, 10e9
LINKS = Links(B, 2e-6, 1e-6)


def fastest(collective, nranks, nbytes, *, links=LINKS, candidates=None):
    if candidates is None:
        nodes = {"nodes": links.nodes, "per_port": links.per_port}
        candidates = candidates_for(collective, nranks, **nodes)
    return model.fastest(collective, nranks, nbytes, links=links, candidates=candidates)


@pytest.mark.parametrize("collective", sorted(set(ALGORITHMS) - {"send"}))
@pytest.mark.parametrize("nbytes", [8, 1 << 16, 1 << 24])
def test_nothing_that_is_allowed_is_faster(collective, nbytes):
    choice = fastest(collective, 5, nbytes, links=LINKS)
    for algorithm in ALGORITHMS[collective]:
        plan = build(collective, algorithm, 5)
        for slices in (1, 2, 4) if collective != "barrier" and nbytes > 1 << 20 else (1,):
            assert choice.seconds <= predict(plan, nbytes, LINKS, slices=slices).seconds
    chosen = build(collective, choice.algorithm, 5)
    said = predict(chosen, nbytes, LINKS, slices=choice.slices)
    assert said.seconds == choice.seconds


def test_the_size_decides():
    assert fastest("all_reduce", 8, 8, links=LINKS).algorithm == "recursive_doubling"
    assert fastest("all_reduce", 8, N, links=LINKS).algorithm != "recursive_doubling"
    sliced = fastest("broadcast", 8, N, links=LINKS)
    assert sliced.slices > 1
    assert fastest("broadcast", 8, 8, links=LINKS).slices == 1


def test_a_choice_explains_itself():
    choice = fastest("all_reduce", 4, N, links=LINKS)
    assert choice.options[0].algorithm == choice.algorithm
    assert {option.algorithm for option in choice.options} == set(ALGORITHMS["all_reduce"])
    assert choice.reasons[0].startswith(f"{choice.algorithm}, S = {choice.slices}: ")
    assert any("at least" in reason for reason in choice.reasons)
    assert choice is fastest("all_reduce", 4, N, links=LINKS), "a choice is remembered"


def test_what_is_refused_is_named_and_never_chosen():
    ordered, every = ("one_shot", "two_shot"), candidates_for("all_reduce", 8)
    candidates = tuple(
        c if c.algorithm in ordered else replace(c, refusal="it sums in another order")
        for c in every
    )
    choice = fastest("all_reduce", 8, 8, links=LINKS, candidates=candidates)
    assert choice.algorithm in ordered
    assert "ring is refused: it sums in another order" in choice.reasons
    nobody = tuple(replace(c, refusal=f"no {c.algorithm}") for c in every)
    with pytest.raises(LaunchRefused, match=r"all_reduce of 8 ranks.*ring: no ring"):
        fastest("all_reduce", 8, 8, links=LINKS, candidates=nobody)
    with pytest.raises(LaunchRefused, match="there is none"):
        fastest("all_reduce", 8, 8, links=LINKS, candidates=())


def test_given_slices_are_kept_and_slices_stay_large_enough():
    mine = Candidate("mine", lambda: build("broadcast", "chain", 4), slices=7)
    choice = fastest("broadcast", 4, N, links=LINKS, candidates=(mine,))
    assert (choice.algorithm, choice.slices) == ("mine", 7)
    for nbytes in (1 << 12, 1 << 14, 1 << 20):  # without overhead, more slices are faster
        found = fastest("broadcast", 4, nbytes, links=Links(B))
        assert nbytes / found.slices >= SMALLEST


@pytest.mark.parametrize("alpha", [1e-7, 1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize("nranks", [2, 3, 8])
def test_the_search_finds_what_the_square_root_says(nranks, alpha):
    slices, seconds = best_slices(Clock(build("broadcast", "chain", nranks), Links(B, alpha)), N)
    closed = chain_best_slices(nranks, N, B, alpha)
    assert abs(slices - closed) <= 1
    near = {max(1, int(closed)), int(closed) + 1}
    assert seconds <= min(chain_time(nranks, N, s, B, alpha) for s in near) * (1 + 1e-12)


def test_a_barrier_has_one_slice():
    clock = Clock(build("barrier", "dissemination", 4), LINKS)
    slices, seconds = best_slices(clock, 0)
    assert slices == 1
    assert seconds == pytest.approx(6e-6)


def test_nodes_reach_the_algorithms_that_care():
    nodes = equal_nodes(6, 2)
    plan = plan_for("all_reduce", "hierarchical", 6, nodes=nodes)
    assert plan.symmetry is not None and plan.symmetry.shape == (2, 3)
    assert plan_for("all_reduce", "ring", 6, nodes=nodes) == build("all_reduce", "ring", 6)
    slow = Links(10 * B, 1e-6, nodes=equal_nodes(16, 2), network=Wire(B / 10, 1e-6))
    assert fastest("all_gather", 16, N, links=slow).algorithm == "hierarchical"


def test_many_ranks_are_one_where_they_are_alike():
    assert {block.rank for block in plan_for("all_reduce", "ring", 100).steps} == {0}
    assert len({block.rank for block in plan_for("all_reduce", "ring", 64).steps}) == 64
    assert len({block.rank for block in plan_for("broadcast", "chain", 100).steps}) == 99
    assert fastest("all_gather", 256, 1 << 28, links=LINKS).seconds > 0


def test_unknown_collectives_are_refused():
    with pytest.raises(ArgumentError, match="allreduce"):
        candidates_for("allreduce", 4)
