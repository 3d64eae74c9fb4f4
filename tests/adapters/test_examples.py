"""The programs of examples/ run as they stand, on CPU ranks and on what GPUs there are."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ringcoll
from examples import cupy_loop
from ringcoll.bootstrap import run_ranks
from ringcoll.cuda.device import devices
from tests.launching import launch

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ELSEWHERE = {"ddp_digits.py": "tests/torch/test_examples.py"}

needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="JAX is not installed"
)
LOOPS = ["cupy_loop", pytest.param("jax_loop", marks=needs_jax)]


def environment(**extra):
    return {**os.environ, "PYTHONPATH": str(ROOT), "RINGCOLL_TIMEOUT": "60", **extra}


def output(argv, cwd, **extra):
    found = subprocess.run(
        argv,
        cwd=cwd,
        env=environment(RINGCOLL_DEVICE="cpu", **extra),
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def losses(capfd, name, nranks, **extra):
    """The device, and the first and the last loss of every rank."""
    argv = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")]
    statuses = run_ranks(argv, nranks, env=environment(**extra))
    out, err = capfd.readouterr()
    assert statuses == [0] * nranks, err
    found = re.findall(
        r"rank \d of (\d) on (\w+)\S*: loss (\S+) -> (\d\.\d+), weights (-?\d+\.\d{9})", out
    )
    assert [(int(n), kind) for n, kind, *_ in found] == [(nranks, extra["RINGCOLL_DEVICE"])] * (
        nranks
    ), out
    assert len({weights for *_, weights in found}) == 1, "replicas end with equal weights"
    return [(float(first), float(last)) for _, _, first, last, _ in found]


@pytest.mark.parametrize("name", LOOPS)
def test_loops_on_cpu_ranks(capfd, name):
    found = losses(capfd, name, 2, RINGCOLL_DEVICE="cpu", JAX_PLATFORMS="cpu")
    assert all(last < first / 2 for first, last in found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOOPS)
def test_loops_on_gpus(capfd, name):
    if name == "cupy_loop":
        cupy = pytest.importorskip("cupy")
        try:
            cupy.ones((2, 2)) @ cupy.ones((2, 2))
        except (ImportError, RuntimeError) as error:
            pytest.skip(f"CuPy finds no cuBLAS: {error}")
    found = losses(capfd, name, min(4, len(devices())), RINGCOLL_DEVICE="cuda")
    assert all(last < first / 2 for first, last in found)


def test_replicas_stay_equal():
    found = ringcoll.spawn(cupy_loop.train, 3, device="cpu", timeout=20)
    assert all(last < first / 2 for first, last, _ in found)
    assert len({weights.tobytes() for _, _, weights in found}) == 1


@pytest.mark.mpi
def test_ten_lines(tmp_path):
    said = output([*launch(2), sys.executable, str(EXAMPLES / "ten_lines.py")], tmp_path)
    # Launchers may join the ranks' lines.
    assert sorted(re.findall(r"rank (\d) of 2: 1\.0", said)) == ["0", "1"]


@pytest.mark.mpi
def test_bandwidth_sweep(tmp_path):
    pytest.importorskip("matplotlib")
    program = [sys.executable, str(EXAMPLES / "bandwidth_sweep.py"), "sweep.png"]
    said = output([*launch(2), *program], tmp_path)
    assert len(re.findall(r"^ +\d+ KiB  ringcoll \S+ GB/s  MPI \S+ GB/s$", said, re.MULTILINE)) == 8
    assert (tmp_path / "sweep.png").read_bytes()[:4] == b"\x89PNG"


def test_own_algorithm(tmp_path):
    said = output([sys.executable, str(EXAMPLES / "torus_all_reduce.py")], tmp_path)
    assert said == f"{[True] * 6}\n"


def test_recovery_from_a_lost_rank(tmp_path):
    said = output([sys.executable, str(EXAMPLES / "shrink.py")], tmp_path)
    # Not line by line: processes that print at once may share one.
    found = re.findall(r"rank (\d) is rank (\d) of 3 now; sum 3\.0", said)
    assert sorted(found) == [("0", "0"), ("1", "1"), ("3", "2")]
    assert said.count("rank 2 died") == 3


def test_sharded_layer(tmp_path):
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    # An installed ringcoll brings the plugin, a checkout that is only on the path does not.
    if not list(importlib.metadata.distributions(name="ringcoll")):
        argv += ["-p", "ringcoll.pytest_plugin"]
    said = output([*argv, str(EXAMPLES / "test_sharded_layer.py")], tmp_path)
    assert "9 passed" in said


def test_notebook(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    program = (
        "import sys, nbclient, nbformat\n"
        "notebook = nbformat.read(sys.argv[1], as_version=4)\n"
        "nbclient.NotebookClient(notebook, timeout=60).execute()\n"
        "print([cell.outputs[-1]['data' if 'data' in cell.outputs[-1] else 'text'] "
        "for cell in notebook.cells if cell.get('outputs')])\n"
    )
    assert client is not None
    said = output([sys.executable, "-c", program, str(EXAMPLES / "notebook.ipynb")], tmp_path)
    assert "[1.5, 1.5, 1.5, 1.5]" in said
    assert said.count("array([3., 3.], dtype=float32)") == 3
    assert "all_reduce" in said
    assert len(notebook.cells) == 7


def test_every_example_is_short_and_tested():
    source = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.iterdir():
        if path.suffix == ".py":
            assert len(path.read_text(encoding="utf-8").splitlines()) <= 60, path.name
        if path.suffix in (".py", ".ipynb"):
            where = ELSEWHERE.get(path.name)
            text = source if where is None else (ROOT / where).read_text(encoding="utf-8")
            assert path.stem in text, path.name
