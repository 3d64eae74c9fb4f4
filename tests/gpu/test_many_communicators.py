"""Two to eight communicators, whose first calls the ranks enqueue in orders of their own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import ringcoll
from ringcoll.bootstrap import run_ranks
from tests.gpu.communicators import work

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("blocking", [False, True])
def test_processes(blocking: bool, tmp_path: Path) -> None:
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    env = {**os.environ, "PYTHONPATH": path, "RINGCOLL_CACHE_DIR": str(tmp_path / "kernels")}
    argv = [sys.executable, "-m", "tests.gpu.communicators", str(tmp_path), str(blocking)]
    assert run_ranks(argv, 2, env=env) == [0, 0]
    assert [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)] == [[], []]


@pytest.mark.parametrize("blocking", [False, True])
def test_threads(blocking: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCOLL_CACHE_DIR", str(tmp_path))  # and with it a fresh loader
    found = ringcoll.spawn(lambda comm: work(comm, blocking=blocking), 2, device="cuda", timeout=20)
    assert found == [[], []]
