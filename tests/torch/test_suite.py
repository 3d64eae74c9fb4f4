"""The script that runs PyTorch's tests, and its lists: what it would overlook, nobody would see."""

import errno
import json
import os
import sys
import tempfile
from collections import Counter

import pytest

from tests.torch import suite
from tests.torch.suite import (
    LISTS,
    Result,
    Runner,
    Variant,
    judged,
    left_out,
    run_all,
    settled,
    variants,
)


def result(outcome, why="", name="test_x"):
    return Result(name, outcome, why, 0.0)


def test_no_test_stands_in_two_lists():
    lists = json.loads(LISTS.read_text(encoding="utf-8"))
    names = [name for names in lists["excluded"].values() for name in names]
    names += [name for names in lists["ci"]["tests"].values() for name in names]
    assert [name for name, times in Counter(names).items() if times > 1] == []
    assert {Variant(*v) for v in (("ringcoll", 3), ("gloo", 4), ("mpi", 4))} >= {
        Variant(name.split("@")[0], int(name.split("@")[1])) for name in lists["ci"]["tests"]
    }


@pytest.mark.parametrize(
    ("outcome", "why", "reason", "said"),
    [
        ("passed", "", "", None),
        ("passed", "", "sparse", "excluded (sparse), but passes"),
        ("failed", "x", "", "failed"),
        ("failed", "x", "sparse", None),
        ("skipped", "Only MPI", "", "neither run nor excluded: Only MPI"),
        ("skipped", "Only MPI", "sparse", None),
    ],
)
def test_verdicts(outcome, why, reason, said):
    excluded = {"test_x": reason} if reason else {}
    wrong = judged({"test_x": result(outcome, why)}, excluded, 0, ["test_x"])
    assert len(wrong) == (said is not None)
    assert said is None or said in wrong[0]


@pytest.mark.parametrize(
    "why",
    [
        "Need at least 4 CUDA devices",
        "Need at least 1 accelerator device",
        "Test requires world size of 4",
        "Skipped due to small world size.",
    ],
)
def test_few_gpus_are_no_mistake(why):
    found = {"test_x": result("skipped", why)}
    assert judged(found, {}, 2, ["test_x"]) == []
    assert len(judged(found, {}, 0, ["test_x"])) == 1


def test_a_skip_for_want_of_a_gpu_is_not_tried_under_other_names():
    assert settled(result("passed"))
    assert settled(result("failed"))
    assert settled(result("skipped", "CUDA is not available."))
    assert not settled(result("skipped", "Skipped due to small world size."))


class Scripted(Runner):
    """Writes what a variant would; ``test_dies`` takes its interpreter with it.

    After ``test_last`` the time is over.
    """

    def __init__(self, logs, jobs, known):
        super().__init__("ringcoll", 0, jobs, logs, 1, scratch=logs)
        self.known = known
        self.asked = []

    def _python(self, variant, out, names):
        self.asked.append((str(variant), names))
        with out.open("w") as file:
            for name in names:
                if name == "test_dies":
                    return -11
                outcome = self.known[name].get(variant.known_as, "skipped")
                outcome, _, why = outcome.partition(": ")
                file.write(json.dumps(vars(result(outcome, why, name))) + "\n")
                if name == "test_last":
                    self.until = 0
                    break
        return 0


@pytest.mark.parametrize("jobs", [1, 3])
def test_what_dies_has_failed_and_the_rest_is_run(tmp_path, jobs):
    names = ["test_a", "test_dies", "test_b", "test_c"]
    runner = Scripted(tmp_path, jobs, {name: {"gloo": "passed"} for name in names})
    results = runner.run(Variant("gloo", 4), names)
    assert [r.name for r in results] == names
    assert [r.outcome for r in results] == ["passed", "failed", "passed", "passed"]
    assert results[1].why == "exit status -11"


def test_each_test_is_run_by_the_first_variant_that_does_not_skip_it(tmp_path, capsys):
    known = {"test_own": {"ringcoll": "passed"}, "test_mpi": {"mpi": "failed"}, "test_none": {}}
    runner = Scripted(tmp_path, 1, known)
    found = run_all(runner, variants("ringcoll", 0), list(known))
    assert {name: (r.outcome, r.variant) for name, r in found.items()} == {
        "test_own": ("passed", "ringcoll@3"),
        "test_mpi": ("failed", "mpi@4"),
        "test_none": ("skipped", "gloo@8"),
    }
    assert runner.asked[-1] == ("gloo@8", ["test_none"])
    assert "1 passed, 2 skipped, 0 failed" in capsys.readouterr().out


def test_too_few_ranks_are_the_reason_wherever_a_test_was_skipped_for_another(tmp_path):
    few = "Skipped due to small world size."
    known = {"test_nccl": {"ringcoll": "skipped: Only NCCL", "nccl": f"skipped: {few}"}}
    found = run_all(Scripted(tmp_path, 1, known), variants("ringcoll", 2), list(known))
    assert found["test_nccl"].why == few
    assert judged(found, {}, 2, list(known)) == []


def test_what_needs_a_library_is_left_out_only_without_it():
    reasons = {"needs torchvision": ["test_a", "test_b"], "sparse": ["test_c"]}
    found = {
        "test_a": result("passed"),
        "test_b": result("skipped", "no torchvision"),
        "test_c": result("passed"),
        "test_d": result("failed"),
    }
    assert left_out(reasons, found) == {"test_b": "needs torchvision", "test_c": "sparse"}


def test_what_there_was_no_time_for_is_said(tmp_path):
    """Nor has a test been skipped that another variant might have run."""
    known = {
        "test_a": {"ringcoll": "passed"},
        "test_mpi": {"mpi": "passed"},
        "test_last": {"ringcoll": "passed"},
        "test_b": {"ringcoll": "passed"},
    }
    found = run_all(Scripted(tmp_path, 1, known), variants("ringcoll", 0), list(known))
    assert {name: r.outcome for name, r in found.items()} == {
        "test_a": "passed",
        "test_last": "passed",
    }
    assert judged(found, {}, 0, list(known)) == [
        f"{name} was not run: the time was over" for name in ("test_mpi", "test_b")
    ]


def test_a_folder_that_fills_while_it_is_removed_costs_no_verdict(tmp_path, monkeypatch, capsys):
    def rmdir(path, **how):
        if os.fspath(path).endswith("left"):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        plain(path, **how)

    plain = os.rmdir
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["suite", "test_x"])
    monkeypatch.setattr(suite, "run_all", lambda *_: {"test_x": result("passed")})
    monkeypatch.setattr(os, "rmdir", rmdir)
    assert suite.main() == 0
    assert "1 tests passed, 0 things wrong" in capsys.readouterr().out
