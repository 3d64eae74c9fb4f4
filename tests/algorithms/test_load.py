"""Algorithms by FILE.py:FUNCTION and MODULE:FUNCTION: what is loaded, and what is refused how."""

from __future__ import annotations

import copy
import os
import re
import sys

import pytest

from ringcoll.algorithms import ALGORITHMS, build, name_of, options
from ringcoll.algorithms.load import find, find_all, load
from ringcoll.errors import ArgumentError
from ringcoll.plan import Plan

STAR = '''
from ringcoll import Block, Buffer, Chunk, Collective, Plan, Step
from helper_of_star import scale

def star(nranks):
    """Rank 0 sums all inputs, the others fetch the sum."""
    inputs = tuple(Chunk(rank, Buffer.INPUT, 0) for rank in range(nranks))
    outputs = [Chunk(rank, Buffer.OUTPUT, 0) for rank in range(nranks)]
    order = [(Block(0), Step(inputs, (outputs[0],)))]
    order += [(Block(r), Step((outputs[0],), (outputs[r],))) for r in range(1, nranks)]
    return Plan(Collective("all_reduce", nranks), tuple(order))

def fan(nranks, *, root=0):
    order = [(Block(root), Step((Chunk(root, Buffer.INPUT, 0),),
             tuple(Chunk(r, Buffer.OUTPUT, 0) for r in range(nranks))))]
    return Plan(Collective("broadcast", nranks, root=root), tuple(order))

def fails(nranks):
    return scale(1) / 0

def leaves(nranks):
    raise SystemExit(0)

def unsaid(nranks):
    class Unsaid(Exception):
        def __str__(self):
            raise RuntimeError
    raise Unsaid

def answers_nothing(nranks):
    pass
'''


@pytest.fixture
def star(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "star.py").write_text(STAR)
    (tmp_path / "helper_of_star.py").write_text("def scale(x):\n    return x\n")
    yield tmp_path
    sys.modules.pop("helper_of_star", None)


def test_a_function_of_a_file_is_an_algorithm(star):
    found = load("star.py:star")
    assert name_of(found) == "star.py:star"
    assert name_of(load(f"{star}/star.py:star")) == "star.py:star"
    assert str(found.__doc__).startswith("Rank 0 sums")
    plan = build("all_reduce", found, 4)
    assert isinstance(plan, Plan) and plan == found(4)
    assert build("all_reduce", found, 4) is plan
    assert options("all_reduce", found) == frozenset()
    assert load(f"{star}/star.py:star")(3) == found(3)


def test_a_function_may_take_the_root(star):
    fan = find("broadcast", "star.py:fan")
    assert options("broadcast", fan) == {"root"}
    assert build("broadcast", fan, 3, root=2).collective.root == 2
    with pytest.raises(ArgumentError, match=r"star\.py:star does not take root; leave it out"):
        build("all_reduce", load("star.py:star"), 3, root=1)
    with pytest.raises(ArgumentError, match=r"root; write def star\(nranks, root=0\)"):
        build("broadcast", load("star.py:star"), 3, root=1)


def test_another_process_loads_the_file_again(star):
    again = copy.copy(load("star.py:star"))  # as pickle makes it
    assert again(4) == load("star.py:star")(4)


def test_a_function_of_a_module_and_our_own_names(star):
    ours = load("ringcoll.algorithms.ring:all_reduce")
    assert name_of(ours) == "ring:all_reduce"
    assert ours(4) == build("all_reduce", "ring", 4)
    assert find("all_reduce", "ring") == "ring"
    assert [name_of(a) for a in find_all("all_reduce", "ring, star.py:star")] == [
        "ring",
        "star.py:star",
    ]


def test_a_plan_of_another_collective_is_refused(star):
    with pytest.raises(ArgumentError, match=r"4 ranks: algorithm=star\.py:star returned"):
        build("broadcast", load("star.py:star"), 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("star.py:", "name the function too, as star.py:star; its functions are star, fan"),
        ("star.py", "name the function too, as star.py:star; its functions are star, fan"),
        (":star", "write FILE.py:FUNCTION or MODULE:FUNCTION"),
        ("moon.py:star", "there is no file moon.py in "),
        ("star.py:moon", "has no function moon; its functions are star, fan, fails"),
        ("star.py:STAR", "has no function STAR"),
        ("nowhere:star", "no module nowhere; .* or name a file: nowhere.py:star"),
        ("ringcoll.nowhere:star", "no module ringcoll.nowhere"),
        ("broken.py:star", r"broken.py raised SyntaxError: .*broken.py, line 1"),
        ("leaves.py:star", r"leaves.py raised SystemExit: 3 \(leaves.py, line 2\) while it was"),
        ("lacks.py:star", r"lacks.py raised ModuleNotFoundError: .*'nothing_such'"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name(star, text, said):
    (star / "broken.py").write_text("def star(nranks:\n")
    (star / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (star / "lacks.py").write_text("import nothing_such\n")
    with pytest.raises(ArgumentError, match=f"algorithm '{re.escape(text)}': .*{said}"):
        load(text)


def test_what_a_function_does_wrong_is_said_with_its_line(star):
    raised = r"fails\(4\) raised ZeroDivisionError: .* \(star.py, line 19\); mend it there"
    with pytest.raises(ArgumentError, match=f"algorithm 'star.py:fails': {raised}"):
        load("star.py:fails")(4)
    with pytest.raises(ArgumentError, match=r"returned a NoneType; it must return a ringcoll.Plan"):
        load("star.py:answers_nothing")(4)
    with pytest.raises(
        ArgumentError, match=r"leaves\(2\) raised SystemExit: 0 \(star.py, line 22\)"
    ):
        load("star.py:leaves")(2)
    with pytest.raises(ArgumentError, match=r"unsaid\(2\) raised Unsaid \(star.py, line 28\)"):
        load("star.py:unsaid")(2)


def test_a_file_whose_name_is_no_utf_8_is_loaded(star):
    name = os.fsdecode(b"\xff.py")
    (star / name).write_text(STAR)
    assert load(f"{name}:star")(2).nranks == 2
    assert name_of(load(f"{name}:star")) == "\\udcff.py:star"


def test_an_unknown_name_is_answered_with_the_nearest():
    names = ", ".join(ALGORITHMS["broadcast"])
    with pytest.raises(ArgumentError, match=f"broadcast has {names}; did you mean ring?"):
        find("broadcast", "rings")
    with pytest.raises(ArgumentError, match="bruck is one of all_gather, all_to_all"):
        find("broadcast", "bruck")
