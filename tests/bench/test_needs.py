"""What benchmarks say where they cannot run."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import needs

ROOT = Path(__file__).parents[2]
WITHOUT = """
import runpy, sys
sys.modules.update(cupy=None, torch=None)
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""


@pytest.fixture
def machine(monkeypatch):
    """Makes this a machine with so many GPUs, or why it has none, and a torch or none."""

    def make(gpus, why=None, torch=None):
        found = None if torch is None else SimpleNamespace(__spec__=object(), cuda=torch)
        monkeypatch.setattr(needs, "devices", lambda: (None,) * gpus)
        monkeypatch.setattr(needs, "available", lambda: why)
        monkeypatch.setitem(sys.modules, "torch", found)

    return make


def cuda(there):
    return SimpleNamespace(is_available=lambda: there)


def parser():
    return argparse.ArgumentParser("links.py")


def test_what_is_there_is_counted(machine):
    machine(4, torch=cuda(True))
    assert needs.require(parser()) == needs.require(parser(), gpus=4, torch=True) == 4
    machine(0, "no GPU", torch=cuda(False))
    assert needs.require(parser(), gpus=0, torch=True) == 0
    machine(1)
    assert needs.require(parser()) == 1


@pytest.mark.parametrize(
    ("here", "asked", "said"),
    [
        ((0, "no GPU"), {}, "NVIDIA GPUs with CuPy, but here no GPU"),
        ((0, "no GPU"), {"torch": True}, "NVIDIA GPUs with CuPy and torch, but here no GPU"),
        ((0, "no GPU"), {"instead": "; or not"}, "NVIDIA GPUs with CuPy, but here no GPU; or not"),
        ((0, "no GPU"), {"gpus": 0, "torch": True}, "torch, but here torch cannot be imported"),
        (
            (2,),
            {"torch": True},
            "NVIDIA GPUs with CuPy and torch, but here torch cannot be imported",
        ),
        ((2, None, cuda(False)), {"torch": True}, "but here torch sees no GPU"),
        ((2,), {"gpus": 4}, "but here 4 ranks want a GPU each, of which there are 2"),
    ],
)
def test_what_is_missing_is_said_in_a_sentence(machine, capsys, here, asked, said):
    machine(*here)
    with pytest.raises(SystemExit) as ended:
        needs.require(parser(), **asked)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("links.py: needs ") and said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "name",
    [
        "gpu.bars",
        "gpu.buckets",
        "gpu.campaign",
        "gpu.ddp_buckets",
        "gpu.deterministic",
        "gpu.first_calls",
        "gpu.host_calls",
        "gpu.links",
        "gpu.nodes",
        "gpu.overlap",
        "gpu.session",
        "gpu.timing_model",
        "gpu.yardstick",
        "peers",
        "torch_calls",
        "training",
    ],
)
def test_benchmarks_of_gpus_end_at_once_without_cupy_and_torch(name, tmp_path):
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT, f"benchmarks.{name}", "--out", str(tmp_path / "out")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (found.returncode, found.stdout) == (2, "")
    assert "but here CuPy cannot be imported" in found.stderr
    assert "pip install" in found.stderr and found.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
