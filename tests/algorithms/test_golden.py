"""Three plans as text that a person can review.

After an intended change, write ``format_plan(build(...))`` over the file and review its diff.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ringcoll.algorithms import build
from ringcoll.plan import format_plan

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(
    ("collective", "algorithm", "nranks"),
    [("all_reduce", "ring", 4), ("all_reduce", "two_shot", 3), ("broadcast", "chain", 4)],
)
def test_plan_reads_as_reviewed(collective, algorithm, nranks):
    text = (GOLDEN / f"{collective}_{algorithm}_{nranks}.txt").read_text()
    assert format_plan(build(collective, algorithm, nranks)) == text
