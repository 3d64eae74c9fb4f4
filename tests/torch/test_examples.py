"""The example of training by torch: torchrun, two CPU ranks, one changed word."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ddp_digits.py"


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
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}
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
    stand_in = "noisy shapes, which are no digits" in found.stdout
    assert stand_in is (importlib.util.find_spec("sklearn") is None)
    assert found.stdout.count("No scikit-learn") == stand_in
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", found.stdout)]
    assert len(losses) == 12
    assert losses[-1] < losses[0] / 5
    accuracy = [float(share) for share in re.findall(r"accuracy (\S+)%", found.stdout)]
    assert len(accuracy) == nranks
    assert min(accuracy) > 90
    sums = re.findall(r"sum of the weights (-?\d+\.\d{12})", found.stdout)
    assert len(sums) == nranks
    assert len(set(sums)) == 1, "replicas end with the same weights, to the bit"


def test_the_readme_shows_lines_of_the_example():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```py\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    example = [line.strip() for line in EXAMPLE.read_text(encoding="utf-8").splitlines()]
    assert [line for line in shown.splitlines() if line and line.strip() not in example] == []
