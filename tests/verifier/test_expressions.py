"""Trees of contributions: equal trees are one number."""

from __future__ import annotations

import pytest

from ringcoll.labels import Label
from ringcoll.verifier.expressions import NOTHING, Expressions, Flaw


def test_equal_trees_are_one_number():
    trees = Expressions(3)
    a, b, c = (trees.leaf(rank, 5) for rank in range(3))
    assert trees.leaf(1, 5) == b
    assert trees.reduce(a, [b, c]) == trees.reduce(trees.reduce(a, [b]), [c])
    assert trees.reduce(a, [b]) != trees.reduce(b, [a])
    assert trees.reduce(a, [trees.reduce(b, [c])]) != trees.reduce(a, [b, c])


def test_labels():
    trees = Expressions(3)
    a, b, c = (trees.leaf(rank, 0) for rank in range(3))
    assert trees.label[a] is Label.RAW
    assert trees.label[trees.reduce(a, [b])] is Label.PARTIAL
    whole = trees.reduce(a, [b, c])
    assert trees.label[whole] is Label.FINAL
    assert trees.is_final(whole, 0, 3)
    assert not trees.is_final(whole, 0, 2)
    assert not trees.is_final(whole, 1, 3)
    assert trees.in_rank_order(0, 3) == whole
    assert trees.in_rank_order(0, 3) != trees.reduce(c, [b, a])


def test_a_prefix_is_finished_where_it_is_written():
    trees = Expressions(3, prefix=True)
    a, b, c = (trees.leaf(rank, 0) for rank in range(3))
    partial = trees.reduce(a, [b])
    assert trees.label[trees.reduce(a, [b, c])] is Label.PARTIAL
    done = trees.finished(partial)
    assert done == trees.finished(partial) == trees.finished(done) == trees.in_rank_order(0, 2)
    assert trees.label[done] is Label.FINAL
    assert trees.is_final(done, 0, 2)
    assert not trees.is_final(done, 0, 3)
    assert not trees.is_final(partial, 0, 2)
    with pytest.raises(Flaw, match="wanted no finished result combined"):
        trees.reduce(done, [c])


def test_roundings():
    wide, narrow = Expressions(4), Expressions(4, rounds=True)
    for trees, wanted in ((wide, 1), (narrow, 3)):
        leaves = [trees.leaf(rank, 0) for rank in range(4)]
        partial = trees.reduce(leaves[0], [leaves[1]])
        partial = trees.reduce(partial, [leaves[2]])
        assert trees.roundings[trees.reduce(partial, [leaves[3]])] == wanted
        assert trees.roundings[trees.reduce(leaves[0], leaves[1:])] == 1


def test_flaws():
    trees = Expressions(3)
    a, b = trees.leaf(0, 0), trees.leaf(1, 0)
    with pytest.raises(
        Flaw, match=r"seen \(0\[0\] \+ 1\[0\]\) \+ 0\[0\], .* rank 0 once, seen twice"
    ):
        trees.reduce(a, [b, a])
    with pytest.raises(Flaw, match="one chunk"):
        trees.reduce(a, [trees.leaf(1, 1)])
    blind = Expressions(3, overlap=False)
    assert blind.reduce(blind.leaf(0, 0), [blind.leaf(0, 0)]) != NOTHING


def test_text_of_deep_trees_is_cut():
    trees = Expressions(100)
    text = trees.show(trees.in_rank_order(0, 100))
    assert text.startswith("~")
    assert "…" in text
    assert "99[0]" in text
    assert trees.show(NOTHING) == "nothing"
