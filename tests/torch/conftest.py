"""Tests of the backend of torch: left out where there is no torch.

Loading torch takes seconds a process, so one world of ranks lives as long as the session and runs
functions of tests/torch/on_ranks by their names. A world that has failed is replaced.
"""

from __future__ import annotations

import os
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


@pytest.fixture(scope="session")
def with_bridge(tmp_path_factory):
    """A cache folder with the bridge, for all workers of a session."""
    from tests.torch.bridged import compiled_once

    base = tmp_path_factory.getbasetemp()
    return compiled_once((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "bridge")


@pytest.fixture
def two(programs, with_bridge, tmp_path):
    """Runs a program as two ranks whose groups have the bridge; returns what each printed."""
    from tests.torch.bridged import START

    def run(code, cache=with_bridge):
        ends = programs.run(START + code, 2, tmp_path / "store", cache)
        assert [(status, error) for status, _, error in ends] == [(0, "")] * 2
        return [out for _, out, _ in ends]

    return run


@pytest.fixture
def ranks(worlds):
    """Runs a function of ``on_ranks`` on 4 ranks of a living group; returns what each returned."""
    return worlds.run
