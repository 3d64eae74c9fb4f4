"""The order in which a rank exchanges data with the ranks of other nodes."""

import pytest

from ringcoll.executors.cuda_nodes.phases import Phases


def place(members: list[list[int]], rank: int) -> Phases:
    phases = object.__new__(Phases)
    node = next(n for n, ranks in enumerate(members) if rank in ranks)
    local_rank = members[node].index(rank)
    phases.__dict__.update(members=members, node=node, local_rank=local_rank, nnodes=len(members))
    return phases


@pytest.mark.parametrize("members", [[[0], [1]], [[0, 2], [1, 3]], [[0, 1], [2, 4], [3, 5]]])
def test_no_two_ranks_send_to_the_same_one_at_a_time(members):
    everyone = sorted(rank for ranks in members for rank in ranks)
    for direction in (1, -1):
        orders = [place(members, rank).remote_ranks(direction) for rank in everyone]
        for at_once in zip(*orders, strict=True):
            assert sorted(at_once) == everyone


@pytest.mark.parametrize("members", [[[0, 2, 4], [1, 3]], [[0], [1, 2], [3, 4, 5, 6]]])
def test_on_unequal_nodes_each_remote_rank_has_one_turn(members):
    for rank in range(sum(map(len, members))):
        others = sorted(r for ranks in members if rank not in ranks for r in ranks)
        phases = place(members, rank)
        assert sorted(phases.remote_ranks(1)) == sorted(phases.remote_ranks(-1)) == others
