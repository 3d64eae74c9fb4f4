"""The README's example of training: torchrun, two CPU ranks, one changed word."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "benchmarks" / "examples" / "mnist.py"


def installed(folder: Path) -> str:
    """A path on which torch finds the backend although ringcoll need not be installed."""
    info = folder / "ringcoll-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ringcoll\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[torch.backends]\nringcoll = ringcoll.torch.register:register\n"
    )
    return os.pathsep.join((str(ROOT), str(folder)))


@pytest.mark.parametrize(
    ("nranks", "extra"),
    [
        pytest.param(2, {"CUDA_VISIBLE_DEVICES": ""}, id="two CPU ranks"),
        pytest.param(1, {}, id="one GPU", marks=pytest.mark.gpu),
        pytest.param(2, {}, id="two GPUs", marks=pytest.mark.multi_gpu),
    ],
)
def test_digits_are_learned_and_replicas_stay_equal(tmp_path, nranks, extra):
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {"PYTHONPATH": installed(tmp_path), "OMP_NUM_THREADS": "1", **extra}
    found = subprocess.run(
        [*argv, f"--nproc-per-node={nranks}", str(EXAMPLE)],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert found.returncode == 0, found.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", found.stdout)]
    assert len(losses) == 8
    assert losses[-1] < losses[0] / 5
    accuracy = re.search(r"accuracy (\S+)%", found.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) > 90
    assert "replicas are equal to the bit" in found.stdout


def test_the_readme_shows_lines_of_the_example():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```py\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    example = [line.strip() for line in EXAMPLE.read_text(encoding="utf-8").splitlines()]
    assert [line for line in shown.splitlines() if line and line.strip() not in example] == []
