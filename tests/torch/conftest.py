"""Tests of the backend of torch: left out where there is no torch.

Loading torch takes seconds a process, so one world of ranks lives as long as the session and runs
functions of tests/torch/on_ranks by their names. A world that has failed is replaced.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def worlds():
    from tests.torch.world import Worlds

    worlds = Worlds()
    yield worlds
    worlds.close()


@pytest.fixture(scope="session")
def programs():
    """Runs programs as processes that end as Python does."""
    from tests.torch.programs import Programs

    programs = Programs()
    yield programs
    programs.close()


@pytest.fixture
def ranks(worlds):
    """Runs a function of ``on_ranks`` on 4 ranks of a living group; returns what each returned."""
    return worlds.run
