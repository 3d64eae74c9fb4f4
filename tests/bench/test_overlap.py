"""What the benchmark of a GEMM beside an all_reduce makes of the times that ranks have seen."""

from __future__ import annotations

import json

import pytest

from benchmarks.gpu import overlap
from benchmarks.gpu.overlap import WAYS, beside, row_of, table

ALONE = {"us": 1000.0, "gemm_us": 1500.0}


def message(way, *, wrong=0, **times):
    """What a rank sends of three repetitions, of which one was disturbed."""
    usual = {**ALONE, "beside_us": 1400.0, "gemm_beside_us": 1650.0, "both_us": 1e4, **times}
    late = {key: 9 * us for key, us in usual.items()}
    return {"way": way, "calls": 9, "wrong": wrong, "samples": [usual, late, usual]}


def test_only_calls_that_ended_while_the_other_stream_was_busy_count():
    assert beside([10.0, 20.0, 30.0, 31.0], [15.0, 30.0]) == 10.0
    assert beside([15.0, 30.0], [10.0, 20.0, 30.0, 31.0]) == 15.0
    assert beside([50.0, 60.0], [40.0]) == 50.0


def test_the_slowest_rank_and_the_median_of_the_repetitions_count():
    row = row_of([message(0), message(0, beside_us=1500.0, wrong=2)], 8192, 256 << 20)
    assert (row["us"], row["beside_us"], row["slowdown"]) == (1000.0, 1500.0, 1.5)
    assert (row["gemm_us"], row["gemm_beside_us"], row["gemm_slowdown"]) == (1500.0, 1650.0, 1.1)
    assert (row["ranks"], row["repetitions"], row["wrong"]) == (2, 3, 2)


def test_every_way_has_a_name_of_its_own():
    assert len({way.name for way in WAYS}) == len(WAYS)
    ours = [way for way in WAYS if way.lib == "ringcoll"]
    options = {(way.memory, tuple(way.options.items())) for way in ours}
    wanted = ((), (("max_sms", 16),), (("engine", "copy"),))
    assert options == {(memory, each) for memory in ("symmetric", "plain") for each in wanted}


@pytest.mark.parametrize(("wrong", "status"), [(0, 0), (3, 1)])
def test_a_record_has_a_row_a_way_and_the_table_comes_last(
    monkeypatch, tmp_path, capsys, wrong, status
):
    def ranks(work, nranks, args, seconds, keep):
        for number in range(len(WAYS)):
            keep([message(number, wrong=wrong * (number == 4)) for _ in range(nranks)])

    monkeypatch.setattr(overlap, "require", lambda parser, **needs: 4)
    monkeypatch.setattr(overlap, "run_ranks", ranks)
    assert overlap.main(["--ranks", "2", "--out", str(tmp_path), "--commit", "abc"]) == status
    found = json.loads((tmp_path / "gpu_overlap_2.json").read_text())
    assert {"date", "command", "gpus", "versions"} <= found.keys()
    assert (found["commit"], found["errors"]) == ("abc", {})
    assert [row["name"] for row in found["rows"]] == [way.name for way in WAYS]
    assert all(row["bytes"] == 256 << 20 and row["edge"] == 8192 for row in found["rows"])
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].endswith("gpu_overlap_2.json") and shown[-1].startswith("nccl, plain")
    assert [line for line in shown if "WRONG" in line] == shown[7:8] * bool(wrong)


def test_a_way_that_ranks_refuse_leaves_the_others(monkeypatch, capsys):
    def ranks(work, nranks, args, seconds, keep):
        keep([{"way": 4, "refused": "no such launch"}] * nranks)
        keep([message(0)] * nranks)

    monkeypatch.setattr(overlap, "require", lambda parser, **needs: 2)
    monkeypatch.setattr(overlap, "run_ranks", ranks)
    assert overlap.main([]) == 1
    shown = capsys.readouterr().out
    assert f"{WAYS[4].name}: no such launch" in shown
    assert table([row_of([message(0)] * 2, 8192, 256 << 20)]) in shown
    assert table([]) == "nothing was timed"
