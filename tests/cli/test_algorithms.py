"""``ringcoll algorithms``, and a person's own algorithm in every command."""

from __future__ import annotations

import json

import pytest

from ringcoll.algorithms import ALGORITHMS
from ringcoll.cli import main
from tests.cli.own import STAR


@pytest.fixture(autouse=True)
def star(tmp_path, monkeypatch):
    (tmp_path / "star.py").write_text(STAR)
    monkeypatch.chdir(tmp_path)


def run(capsys, words):
    status = main(words.split())
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_all_algorithms_are_listed_with_a_sentence(capsys):
    status, out, err = run(capsys, "algorithms")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    for collective, builders in ALGORITHMS.items():
        first = lines.index(collective) + 1
        listed = [line.split()[0] for line in lines[first : first + len(builders)]]
        assert listed == list(builders)
    assert all(len(line.split()) > 3 for line in lines if line.startswith("  "))


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_those_of_a_collective_are_drawn(capsys, collective):
    status, out, err = run(capsys, f"algorithms {collective}")
    assert (status, err) == (0, "")
    for name in ALGORITHMS[collective]:
        assert f"{collective} by {name}: " in out
    rows = 2 if collective == "send" else 4
    assert out.count("\n    rank ") == rows * len(ALGORITHMS[collective])


def test_ranks_and_own_algorithms_are_drawn(capsys):
    status, out, _ = run(capsys, "algorithms star.py:star --ranks 3")
    assert status == 0
    assert "all_reduce by star.py:star: Rank 0 sums all inputs, the others fetch the sum\n" in out
    assert "rank 0    all+<1,2" in out and "rank 3" not in out


def test_an_unknown_collective_is_answered_with_the_nearest(capsys):
    status, out, err = run(capsys, "algorithms allreduce")
    assert (status, out) == (2, "")
    assert "the collectives are all_reduce, " in err and "did you mean all_reduce?" in err


def test_explain_takes_it(capsys):
    status, out, err = run(capsys, "explain all_reduce --algorithm star.py:star --slices 1")
    assert (status, err) == (0, "")
    assert "all_reduce of 1 MiB by star.py:star, 4 ranks" in out
    assert "rank 0    all+<1,2,3" in out
    assert "launch: star.py:star (given)" in out
    assert "  star.py:star: at least" in out, "it stands among those that the model compares"


@pytest.mark.parametrize(
    "words",
    [
        "algorithms star.py:twice",
        "explain all_reduce --algorithm star.py:twice",
        "model all_reduce --algorithm star.py:twice",
        "topo --preset dgx-h100 --algorithm star.py:twice",
    ],
)
def test_a_plan_that_no_call_runs_is_drawn_and_said_to_be_wrong(capsys, words):
    status, out, err = run(capsys, words)
    assert status == 0 and "star.py:twice" in out
    assert f"ringcoll {words.split()[0]}: no call runs this plan: all_reduce of " in err


def test_model_takes_it_beside_ours(capsys):
    words = "model all_reduce --bytes 1M --algorithm ring,star.py:star"
    status, out, err = run(capsys, f"{words} --slices 1 --json -")
    assert (status, err) == (0, "")
    ring, star = json.loads(out)["points"]
    assert (ring["algorithm"], star["algorithm"]) == ("ring", "star.py:star")
    # Three buffers into rank 0, three out of it.
    assert star["seconds"] == pytest.approx(6 * (1 << 20) / 10e9)
    status, out, _ = run(capsys, f"{words} --per-node 2 --nodes 1,2")
    assert status == 0 and "  star.py:star  fastest" in out


def test_verify_proves_it_and_breaks_it(capsys):
    words = "verify --algorithm star.py:star --ranks 2,3 --json -"
    status, out, err = run(capsys, f"{words} --jobs 1")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["failures"] == [] and found["plans"] > 0 and found["mutants"]["rejected"] > 100
    assert run(capsys, f"{words} --jobs 2") == (0, out, ""), "other processes load it again"


def test_verify_takes_a_list(capsys):
    words = "verify --algorithm tree,star.py:star --collective all_reduce --ranks 2 --mutants none"
    status, out, err = run(capsys, f"{words} --jobs 1")
    assert (status, err) == (0, "")
    assert [line.split()[1] for line in out.splitlines()[1:3]] == ["tree", "star.py:star"]


def test_verify_refuses_a_wrong_one(capsys):
    status, out, _ = run(capsys, "verify --algorithm star.py:twice --ranks 3 --mutants none")
    assert status == 1
    assert "FAILED collective all_reduce, algorithm star.py:twice, ranks 3" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("explain all_reduce --algorithm moon.py:star", "there is no file moon.py"),
        ("explain broadcast --algorithm star.py:star", "algorithm=star.py:star returned"),
        ("model all_reduce --algorithm star.py:moon", "no function moon; its functions are star"),
        ("model all_reduce --algorithm star.py", "too, as star.py:star; its functions are star"),
        ("verify --algorithm ring,star.py", "name the function too, as star.py:star"),
        ("algorithms star.py", "name the function too, as star.py:star"),
        ("verify --algorithm rings", "did you mean ring?"),
        ("verify --algorithm ring,trees", "--algorithm trees: `ringcoll algorithms` lists"),
        ("explain all_reduce --algorithm two_shots", "did you mean two_shot?"),
    ],
)
def test_mistakes_are_one_line(capsys, words, said):
    status, out, err = run(capsys, words)
    assert (status, out) == (2, "")
    assert said in err and err.count("\n") == 1
