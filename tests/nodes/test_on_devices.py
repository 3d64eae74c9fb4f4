"""GPU ranks on nodes that one machine plays; where GPUs are few, ranks share them."""

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.mpi, pytest.mark.slow]


def names_of_all() -> str:
    """Two nodes of two to four ranks, of one a GPU where there are so many."""
    from ringcoll.cuda.device import devices

    each = max(2, min(4, len(devices()) // 2))
    return ",".join(["a"] * each + ["b"] * each)


@pytest.mark.parametrize(
    "parts",
    [
        *("collectives", "types", "layers", "rails", "reduces", "direct crosses"),
        *("vectors", "splits", "large captured", "late"),
    ],
)
def test_every_call(nodes, parts):
    names = names_of_all()
    outcome = nodes("real_gpus", names, *parts.split())
    assert outcome.errors == ""
    assert outcome.statuses == [0]
    assert outcome.word("failures") == {rank: [] for rank in range(len(names.split(",")))}


def test_unequal_nodes(nodes):
    outcome = nodes("real_gpus", "a,b", "collectives", "vectors")
    assert outcome.errors == ""
    assert outcome.word("failures") == {0: [], 1: []}
