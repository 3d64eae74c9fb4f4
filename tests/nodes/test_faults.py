"""What goes wrong reaches the ranks of other nodes too, as the same errors.

The tests are those of ranks on one node; here the ranks are on two nodes by turns, so that whoever
dies, leaves or differs has peers on its own node and on the other.
"""

import pytest

from tests.processes.test_faults import *  # noqa: F403

pytestmark = [pytest.mark.mpi, pytest.mark.slow]  # type: ignore[assignment]
