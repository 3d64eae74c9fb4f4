"""What a person sees of a plan: ``print(plan)``, its repr and its table in a notebook."""

from __future__ import annotations

from ringcoll.algorithms import build
from ringcoll.launch import Launch
from ringcoll.lower import lower
from ringcoll.plan import Block, Plan


def test_print_shows_the_space_time_table():
    lines = str(build("all_gather", "ring", 3)).splitlines()
    assert lines[0] == "all_gather of 3 ranks, 1 chunks"
    assert [line.split() for line in lines[2:6]] == [
        ["time", "/", "t", "0", "1"],
        ["rank", "0", "c0>1", "c2>1"],
        ["rank", "1", "c1>2", "c0>2"],
        ["rank", "2", "c2>0", "c1>0"],
    ]
    assert "writes to rank r" in lines[-1]


def test_a_barrier_and_a_lowered_plan_have_one_too():
    assert "rank 0    !1  !2" in str(build("barrier", "dissemination", 4))
    assert "rank 1    " in str(lower(build("all_reduce", "two_shot", 3), Launch(slices=2)))


def test_repr_is_short():
    plan = build("all_reduce", "ring", 4)
    assert repr(plan) == "Plan(all_reduce of 4 ranks, 4 chunks: 24 steps in 4 blocks)"


def test_notebooks_get_the_same_cells_escaped():
    html = build("broadcast", "one_shot", 3)._repr_html_()
    assert html.count("<tr>") == 4
    assert "<th>rank 2</th>" in html
    assert "<td>all&lt;0</td>" in html


def test_what_has_no_table_is_listed_step_by_step():
    stuck = build("barrier", "all_pairs", 2)
    stuck = Plan(stuck.collective, stuck.order[1:])
    assert "wait 1.0.0" in str(stuck)
    assert stuck._repr_html_().startswith("<pre>")
    many = build("all_gather", "ring", 65)
    assert str(many).count("\n") == len(many.order) + 1
    assert Block(64) in many.steps
