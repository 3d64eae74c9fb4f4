"""The contract across nodes, under the interpreter's own mpiexec; numpy is the reference."""

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.mark.parametrize(
    "names",
    ["a,b", "a,a,b,b", "a,b,a,b", "a,b,b,b,a"],
    ids=["a rank each", "two and two", "by turns", "unequal and mixed"],
)
def test_every_collective(nodes, names):
    nranks = len(names.split(","))
    outcome = nodes("collectives", names)
    assert outcome.errors == ""
    assert outcome.statuses == [0]
    assert outcome.word("failures") == {rank: [] for rank in range(nranks)}
    assert outcome.word("nranks") == dict.fromkeys(range(nranks), nranks)
    assert min(outcome.word("count").values()) > 400


def test_every_collective_without_shared_memory_in_mpi(nodes):
    outcome = nodes("collectives", "a,b,b", MPIR_CVAR_NOLOCAL="1")
    assert outcome.errors == ""
    assert outcome.word("failures") == {0: [], 1: [], 2: []}
