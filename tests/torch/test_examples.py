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
    # A file for each rank: torchrun runs them without a buffer, so print writes a line and its
    # end apart, and in a pipe that they share the line of one comes between another's and its end.
    logs = tmp_path / "logs"
    flags = ["--standalone", f"--nproc-per-node={nranks}", "--redirects=3", f"--log-dir={logs}"]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *flags, str(EXAMPLE)],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    errors = [path.read_text(encoding="utf-8") for path in logs.rglob("stderr.log")]
    assert found.returncode == 0, (found.stderr, errors)
    by_rank = {path.parent.name: path for path in logs.rglob("stdout.log")}
    assert sorted(by_rank) == [str(rank) for rank in range(nranks)]
    printed = [by_rank[rank].read_text(encoding="utf-8") for rank in sorted(by_rank)]
    stand_in = "noisy shapes, which are no digits" in printed[0]
    assert stand_in is (importlib.util.find_spec("sklearn") is None)
    assert sum(text.count("No scikit-learn") for text in printed) == stand_in
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed[0])]
    assert len(losses) == 12
    assert losses[-1] < losses[0] / 5
    accuracy = [float(share) for text in printed for share in re.findall(r"accuracy (\S+)%", text)]
    assert len(accuracy) == nranks
    assert min(accuracy) > 90
    sums = [re.findall(r"sum of the weights (-?\d+\.\d{12})", text) for text in printed]
    assert [len(ends) for ends in sums] == [1] * nranks
    assert all(ends == sums[0] for ends in sums), "replicas end with the same weights, to the bit"


def test_the_readme_shows_lines_of_the_example():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```py\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    example = [line.strip() for line in EXAMPLE.read_text(encoding="utf-8").splitlines()]
    assert [line for line in shown.splitlines() if line and line.strip() not in example] == []
