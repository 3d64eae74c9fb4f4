"""Messages under way between nodes, by the programs of those inside one."""

import pytest

from tests.processes.test_messages import *  # noqa: F403

pytestmark = [pytest.mark.mpi, pytest.mark.slow]  # type: ignore[assignment]
