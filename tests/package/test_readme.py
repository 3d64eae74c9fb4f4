"""The README's Python examples run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SECTIONS = [
    "Ten lines that run",
    "Two commands",
    "torch",
    "Bench",
    "Topology",
    "Your own algorithm",
    "The timing model",
    "Test your own distributed code",
    "Clusters",
    "Environment",
    "Errors and remedies",
    "Limits",
]


def test_sections_stand_in_order():
    assert re.findall(r"^## (.+)$", README, re.MULTILINE) == SECTIONS


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs(example, tmp_path):
    if "import torch" in example:
        pytest.skip("needs ranks and an installed ringcoll; tests/torch has them")
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
