"""The examples of training loops run as they stand, on CPU ranks and on what GPUs there are."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

import ringcoll
from benchmarks.examples import cupy_loop
from ringcoll.bootstrap import run_ranks
from ringcoll.cuda.device import devices

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "benchmarks" / "examples"

needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="JAX is not installed"
)


def run(capfd, name, nranks, **environment):
    """Losses before and after of an example among processes."""
    argv = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RINGCOLL_TIMEOUT": "60", **environment}
    statuses = run_ranks(argv, nranks, env=env)
    out, err = capfd.readouterr()
    assert statuses == [0] * nranks, err
    assert "replicas are equal to the bit" in out
    said = re.search(r"ranks: (\d+), on (\w+).*loss (\S+) -> (\S+)", out)
    assert said is not None, out
    assert int(said[1]) == nranks
    return said[2], float(said[3]), float(said[4])


@pytest.mark.parametrize("name", ["cupy_loop", pytest.param("jax_loop", marks=needs_jax)])
def test_loops_on_cpu_ranks(capfd, name):
    device, first, last = run(capfd, name, 2, RINGCOLL_DEVICE="cpu", JAX_PLATFORMS="cpu")
    assert device == "cpu"
    assert last < first / 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cupy_loop", pytest.param("jax_loop", marks=needs_jax)])
def test_loops_on_gpus(capfd, name):
    if name == "cupy_loop":
        cupy = pytest.importorskip("cupy")
        try:
            cupy.ones((2, 2)) @ cupy.ones((2, 2))
        except (ImportError, RuntimeError) as error:
            pytest.skip(f"CuPy finds no cuBLAS: {error}")
    device, first, last = run(capfd, name, min(4, len(devices())), RINGCOLL_DEVICE="cuda")
    assert device == "cuda"
    assert last < first / 2


def test_ranks_may_be_threads():
    losses = ringcoll.spawn(cupy_loop.train, 3, device="cpu", timeout=20)
    assert all(last < first / 2 for first, last, _ in losses)
    assert len({weights.tobytes() for _, _, weights in losses}) == 1


def test_examples_read_like_documentation():
    for path in EXAMPLES.glob("*.py"):
        assert 40 <= len(path.read_text(encoding="utf-8").splitlines()) <= 90, path.name
