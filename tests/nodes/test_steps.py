"""Where a rank stands among the nodes."""

import pytest

from ringcoll.executors.cuda_nodes.steps import Steps


def place(members: list[list[int]], rank: int) -> Steps:
    steps = object.__new__(Steps)
    node = next(n for n, ranks in enumerate(members) if rank in ranks)
    local = members[node].index(rank)
    steps.__dict__.update(members=members, node=node, local=local, nodes=len(members))
    return steps


@pytest.mark.parametrize("members", [[[0], [1]], [[0, 2], [1, 3]], [[0, 1], [2, 4], [3, 5]]])
def test_no_two_ranks_send_to_the_same_one_at_a_time(members):
    everyone = sorted(rank for ranks in members for rank in ranks)
    for way in (1, -1):
        orders = [place(members, rank).foreign(way) for rank in everyone]
        for at_once in zip(*orders, strict=True):
            assert sorted(at_once) == everyone


@pytest.mark.parametrize("members", [[[0, 2, 4], [1, 3]], [[0], [1, 2], [3, 4, 5, 6]]])
def test_on_unequal_nodes_all_foreign_ranks_are_met_once(members):
    for rank in range(sum(map(len, members))):
        others = sorted(r for ranks in members if rank not in ranks for r in ranks)
        steps = place(members, rank)
        assert sorted(steps.foreign(1)) == sorted(steps.foreign(-1)) == others
