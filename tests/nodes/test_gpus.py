"""GPU ranks on several nodes: whole communicators of fake GPUs, under the interpreter's mpiexec."""

import pytest

from tests.kernels.stand_in import folder, needs_compiler

pytest.importorskip("cupy")
pytestmark = [pytest.mark.mpi, pytest.mark.slow, needs_compiler]


@pytest.fixture(autouse=True)
def built_once():
    """Ranks find what others have built."""
    folder()


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        # A start for each placement: to start a rank takes longer than most parts do.
        ("a,b", "collectives types options vectors one_core"),
        ("a,b,b", "vectors streams splits"),
        ("a,b,c", "rails reduces direct crosses"),
        ("a,a,b,b", "collectives layers crosses direct reduces"),
        ("a,b,b,a,a,b", "rails direct_of_some"),  # three of each, by turns and not
    ],
)
def test_every_call(nodes, names, parts):
    outcome = nodes("gpus", names, *parts.split(), plain=names == "a,b")
    assert outcome.errors == ""
    assert outcome.statuses == [0]
    nranks = len(names.split(","))
    assert outcome.word("failures") == {rank: [] for rank in range(nranks)}
    assert min(outcome.word("count").values()) >= 6


def test_generic_kernels_carry_first_calls_inside_nodes_and_in_parts_on_one(nodes):
    outcome = nodes("first_calls", "a,a,b,b")
    assert (outcome.errors, outcome.statuses) == ("", [0])
    assert outcome.word("failures") == {rank: [] for rank in range(4)}
    assert outcome.word("count") == dict.fromkeys(range(4), 10)
