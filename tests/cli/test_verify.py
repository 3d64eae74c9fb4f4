"""``ringcoll verify``: its counts, its JSON, its exit status."""

from __future__ import annotations

import json

import pytest

from ringcoll.cli import main
from ringcoll.lower import lower
from ringcoll.plan import Plan
from ringcoll.verifier import examine as examine_module


def run(capsys, *words):
    status = main(["verify", "--jobs", "1", *words])
    return status, capsys.readouterr().out


def test_json_alone_on_stdout(capsys):
    status, out = run(
        capsys, "--ranks", "1-3", "--collective", "broadcast", "--algorithm", "chain", "--json", "-"
    )
    found = json.loads(out)
    assert status == 0
    assert set(found) == {"plans", "steps", "mutants", "failures"}
    assert found["failures"] == []
    counts = found["mutants"]
    assert counts["made"] == counts["rejected"] + counts["equivalent"] > 100
    for key in ("made", "rejected", "equivalent"):
        assert counts[key] == sum(kind[key] for kind in counts["kinds"].values())
    for kind in ("drop_wait", "double_signal", "redirect_destination"):
        assert counts["kinds"][kind]["equivalent"] == 0


def test_table(capsys, tmp_path):
    target = tmp_path / "verify.json"
    status, out = run(
        capsys, "--ranks", "2", "--collective", "send", "--mutants", "none", "--json", str(target)
    )
    lines = out.splitlines()
    assert status == 0
    assert lines[0].split() == [
        "collective",
        "algorithm",
        "ranks",
        "plans",
        "steps",
        "mutants",
        "rejected",
        "equivalent",
        "failures",
    ]
    row = lines[1].split()
    assert row[:3] == ["send", "pair", "2"]
    assert lines[-1].split()[1:] == row[3:]
    assert json.loads(target.read_text())["plans"] == int(row[3])
    assert json.loads(target.read_text())["mutants"]["made"] == 0


def test_several_processes_give_the_same(capsys):
    words = ["--ranks", "2,3", "--collective", "gather", "--json", "-"]
    alone = run(capsys, *words)
    assert main(["verify", "--jobs", "2", *words]) == alone[0] == 0
    assert capsys.readouterr().out == alone[1]


def test_a_failure_is_reported(capsys, monkeypatch):
    def forgetful(plan: Plan, launch):
        """A lowering that loses the last step."""
        right = lower(plan, launch)
        return right.with_order(right.order[:-1])

    monkeypatch.setattr(examine_module, "lower", forgetful)
    words = ["--ranks", "4", "--collective", "scatter", "--algorithm", "one_shot"]
    status, out = run(capsys, *words)
    assert status == 1
    assert "FAILED collective scatter, algorithm one_shot, ranks 4" in out
    status, out = run(capsys, *words, "--json", "-")
    failure = json.loads(out)["failures"][0]
    assert status == 1
    assert failure["mutant"] is None
    assert failure["launch"] == "mapped, out of place, S=1, W=2"
    assert "scatter of 4 ranks" in failure["error"]


def test_nothing_to_do(capsys):
    assert main(["verify", "--collective", "send", "--algorithm", "ring"]) == 2
    assert "no algorithm" in capsys.readouterr().err


def test_ranks_and_nodes_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        main(["verify", "--nodes", "2,2", "--ranks", "3"])
    assert "not allowed with argument --nodes" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "a", "3-1", "0", "1-", "-2", "1,,2", "1.5"])
def test_ranks_that_are_no_numbers_are_refused(text, capsys):
    with pytest.raises(SystemExit):
        main(["verify", f"--ranks={text}"])
    assert "--ranks" in capsys.readouterr().err


def test_a_plan_that_means_nothing_is_reported_with_its_algorithm_and_its_ranks(capsys, tmp_path):
    """The other algorithms are still proven."""
    own = tmp_path / "own.py"
    own.write_text(
        """
from ringcoll import Block, Buffer, Chunk, Collective, Plan, Step

def beyond(nranks):
    step = Step((Chunk(2, Buffer.INPUT, 0),), (Chunk(0, Buffer.OUTPUT, 0),))
    return Plan(Collective("all_reduce", nranks), ((Block(0), step),))

def outside(nranks):
    step = Step((Chunk(0, Buffer.INPUT, 7),), (Chunk(0, Buffer.OUTPUT, 0),))
    return Plan(Collective("all_reduce", nranks), ((Block(0), step),))
"""
    )
    names = f"{own}:beyond,{own}:outside,ring"
    words = ("--ranks", "2", "--mutants", "none", "--collective", "all_reduce")
    status, out = run(capsys, "--algorithm", names, *words)
    failed = [line for line in out.splitlines() if line.startswith("FAILED")]
    assert status == 1
    for line, name, why in zip(
        failed, ("beyond", "outside"), ("chunk of rank 2, wanted one", "outside of"), strict=True
    ):
        assert "collective all_reduce, algorithm " in line
        assert f"{name}, ranks 2" in line
        assert "rank 0 channel 0 lane 0, step 0" in line
        assert why in line
    assert any(line.split()[:3] == ["all_reduce", "ring", "2"] for line in out.splitlines())
