"""The contract across nodes, under the interpreter's own mpiexec; numpy is the reference."""

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.mark.parametrize(
    ("names", "inside"),
    [("a,b", True), ("a,a,b,b", True), ("a,b,b,b,a", False)],
    ids=["a rank each", "two and two", "mixed, without shared memory in MPI"],
)
def test_every_collective(nodes, names, inside):
    nranks = len(names.split(","))
    # Five ranks go no other way in more sizes.
    words, env = ((), {}) if inside else (("few",), {"MPIR_CVAR_NOLOCAL": "1"})
    outcome = nodes("collectives", names, *words, **env)
    assert outcome.errors == ""
    assert outcome.statuses == [0]
    assert outcome.word("failures") == {rank: [] for rank in range(nranks)}
    assert outcome.word("nranks") == dict.fromkeys(range(nranks), nranks)
    assert min(outcome.word("count").values()) > (300 if inside else 150)
