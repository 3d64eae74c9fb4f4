"""Names and options: what is asked for and not there is refused by name."""

from __future__ import annotations

import pytest

from ringcoll.algorithms import ALGORITHMS, build, options
from ringcoll.errors import ArgumentError

ALL = [(c, a) for c, builders in ALGORITHMS.items() for a in builders]


@pytest.mark.parametrize(("collective", "algorithm"), ALL)
def test_only_keeps_the_steps_of_the_chosen_ranks_in_order(collective, algorithm):
    nranks = 2 if collective == "send" else 6
    whole = build(collective, algorithm, nranks)
    for only in (frozenset({0}), frozenset({1, nranks - 1})):
        part = build(collective, algorithm, nranks, only=only)
        assert part.order == tuple(item for item in whole.order if item[0].rank in only)
        assert part.collective == whole.collective
        assert part.symmetry == whole.symmetry


def test_same_arguments_give_the_same_plan():
    assert build("all_reduce", "ring", 4) is build("all_reduce", "ring", 4, rings=None)


@pytest.mark.parametrize(
    ("arguments", "options_", "said"),
    [
        (("allreduce", "ring", 4), {}, "all_reduce"),
        (("all_reduce", "rings", 4), {}, "two_shot"),
        (("all_reduce", "ring", 4), {"root": 1}, "does not take root; it takes rings"),
        (("all_reduce", "one_shot", 4), {"rings": [[0, 1, 2, 3]]}, "it takes no options"),
        (("all_reduce", "ring", 4), {"nodes": [2, 2]}, "does not take nodes"),
        (("all_reduce", "ring", 0), {}, "nranks=0"),
        (("all_reduce", "ring", 4), {"rings": [[0, 1, 2]]}, "visit each of 4 ranks once"),
        (("all_reduce", "ring", 4), {"rings": [[0, 1, 2, 2]]}, "visit each of 4 ranks once"),
        (("all_reduce", "ring", 4), {"rings": []}, "at least one ring"),
        (("broadcast", "chain", 4), {"root": 4}, "root"),
        (("broadcast", "one_shot", 4), {"root": -1}, "root"),
        (("send", "pair", 3), {}, "two ranks"),
    ],
)
def test_what_is_not_there_is_refused_by_name(arguments, options_, said):
    with pytest.raises(ArgumentError, match=said):
        build(*arguments, **options_)


def test_options_are_the_parameters_of_the_builder():
    assert options("broadcast", "ring") == {"root", "rings"}
    assert options("all_to_all", "all_pairs") == frozenset()
