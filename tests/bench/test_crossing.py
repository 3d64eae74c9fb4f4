"""What the benchmark of nodes counts as crossing."""

import pytest

from benchmarks.gpu.crossing import CROSSING, crossing


@pytest.mark.parametrize("name", CROSSING)
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 1), (2, 2), (3, 2)])
def test_what_one_rank_sends_another_gets(name, nodes, per_node):
    ranks = range(nodes * per_node)
    found = [crossing(name, rank, nodes, per_node, 12 << 20, 4) for rank in ranks]
    for rank in ranks:
        for peer, nbytes in found[rank].sends.items():
            assert peer // per_node != rank // per_node
            assert found[peer].recvs[rank] == nbytes
    assert sum(map(len, (each.sends for each in found))) == sum(len(each.recvs) for each in found)


def test_of_a_reduce_the_roots_node_gets_more_than_it_sends():
    root, other = (crossing("reduce", rank, 2, 2, 64, 4) for rank in (0, 2))
    assert (root.sends, root.recvs) == ({2: 32}, {2: 48})
    assert (other.sends, other.recvs) == ({0: 48}, {0: 32})
    assert crossing("all_reduce", 0, 2, 2, 64, 4).most == root.most == 48
    assert crossing("all_to_all", 0, 2, 2, 64, 4).sends == {2: 16, 3: 16}
