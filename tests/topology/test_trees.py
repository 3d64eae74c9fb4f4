"""Trees and chains."""

from __future__ import annotations

import pytest

from ringcoll.errors import ArgumentError
from ringcoll.topology.presets import preset
from ringcoll.topology.search import chains, find_rings, find_tree
from ringcoll.topology.system import PathClass
from tests.topology.graph import mesh, switched, tree


def test_a_chain_is_a_ring_cut_open():
    rings = find_rings(preset("dgx1-p100"))
    found = chains(rings, root=3)
    assert len(found) == len(rings.rings)
    for chain, ring in zip(found, rings.rings, strict=True):
        assert chain.order[0] == 3
        at = ring.order.index(3)
        assert chain.order == ring.order[at:] + ring.order[:at]
        assert len(chain.hops) == 7
        assert chain.bandwidth == ring.bandwidth


def test_where_every_pair_has_a_link_the_tree_is_flat():
    found = find_tree(mesh(7, 20))
    assert found is not None
    assert found.bandwidth == 20
    assert found.depth == 2
    assert max(found.parents.count(parent) for parent in range(7)) == 2
    wide = find_tree(mesh(7, 20), root=2, children=6)
    assert wide is not None
    assert wide.parents == (2, 2, -1, 2, 2, 2, 2)
    assert wide.hops[2] is PathClass.LOC


def test_where_children_share_a_link_the_tree_is_a_chain():
    found = find_tree(switched([100, 100, 100, 100]))
    assert found is not None
    assert found.bandwidth == 100
    assert found.parents == (-1, 0, 1, 2)


def test_sockets_are_crossed_once():
    found = find_tree(tree([[0, 2, 4, 6], [1, 3, 5, 7]], 12, 12, sockets=10))
    assert found is not None
    assert found.bandwidth == 10
    assert sum(hop is PathClass.SYS for hop in found.hops) == 1


def test_more_children_where_that_alone_reaches_all():
    star = mesh(4, 20, [(0, 1, 1), (0, 2, 1), (0, 3, 1)])
    found = find_tree(star, children=2)
    assert found is not None
    assert found.parents == (-1, 0, 0, 0)


def test_no_tree():
    assert find_tree(mesh(4, 20, [(0, 1, 1), (2, 3, 1)])) is None
    single = find_tree(mesh(1, 20))
    assert single is not None
    assert (single.parents, single.depth) == ((-1,), 0)


def test_wrong_arguments():
    system = mesh(3, 20)
    with pytest.raises(ArgumentError, match="root=3"):
        find_tree(system, root=3)
    with pytest.raises(ArgumentError, match="children=0"):
        find_tree(system, children=0)
    with pytest.raises(ArgumentError, match="root=-1"):
        chains(find_rings(system), root=-1)
