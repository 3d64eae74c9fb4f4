"""The whole contract under the interpreter's own mpiexec: a start for each number of ranks."""

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


# Four run the stress test and the contract across nodes; plans for more are checked in threads.
@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_every_collective(mpi, nranks):
    # Nothing may lean on assert: one of the runs goes without it.
    outcome = mpi("collectives", nranks, optimised=nranks == 2)
    assert outcome.errors == ""
    assert outcome.statuses == [0]
    assert outcome.word("failures") == {rank: [] for rank in range(nranks)}
    assert outcome.word("nranks") == dict.fromkeys(range(nranks), nranks)
    assert min(outcome.word("count").values()) > 300


def test_options_from_the_environment(mpi):
    outcome = mpi("environment", 2, RINGCOLL_DETERMINISTIC="1", RINGCOLL_TIMEOUT="2")
    assert outcome.errors == ""
    assert outcome.word("failures") == {rank: [] for rank in range(2)}
    assert min(outcome.word("count").values()) == 5
