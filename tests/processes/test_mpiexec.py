"""The whole contract under the interpreter's own mpiexec: a start for each number of ranks."""

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


# Four, a power of two as two are, run the stress test and the contract across nodes.
@pytest.mark.parametrize("nranks", [1, 2, 3, 5])
def test_every_collective(mpi, nranks):
    # Nothing may lean on assert: one of the runs goes without it.
    # Up to three ranks see every size.
    words = ["few"] if nranks == 5 else []
    outcome = mpi("collectives", nranks, *words, optimised=nranks == 2)
    assert outcome.errors == ""
    assert outcome.statuses == [0]
    assert outcome.word("failures") == {rank: [] for rank in range(nranks)}
    assert outcome.word("nranks") == dict.fromkeys(range(nranks), nranks)
    assert min(outcome.word("count").values()) > (200 if words else 300)


def test_options_from_the_environment(mpi):
    outcome = mpi("environment", 3, RINGCOLL_DETERMINISTIC="1", RINGCOLL_TIMEOUT="2")
    assert outcome.errors == ""
    assert outcome.word("failures") == {rank: [] for rank in range(3)}
    assert min(outcome.word("count").values()) == 5
