"""The contract across nodes, under the interpreter's own mpiexec; numpy is the reference."""

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.mark.parametrize(
    ("names", "words"),
    # Two ranks make calls of all sizes; nodes of two and three ranks are there for the vectors.
    [("a,b", ()), ("a,a,b,b", ("few",)), ("a,b,b,b,a", ("fewest", "vectors"))],
    ids=["a rank each", "two and two", "mixed, without shared memory in MPI"],
)
def test_every_collective(nodes, names, words):
    nranks = len(names.split(","))
    env = {"MPIR_CVAR_NOLOCAL": "1"} if "fewest" in words else {}
    outcome = nodes("collectives", names, *words, plain=not words, **env)
    assert outcome.errors == ""
    assert outcome.statuses == [0]
    assert outcome.word("failures") == {rank: [] for rank in range(nranks)}
    assert outcome.word("nranks") == dict.fromkeys(range(nranks), nranks)
    assert min(outcome.word("count").values()) > {(): 300, ("few",): 250}.get(words, 90)
