"""The commands of host times on GPUs: the calls that they make, their records and tables."""

from __future__ import annotations

import json
from functools import partial
from itertools import cycle

import numpy as np
import pytest

import ringcoll
from benchmarks.gpu import buckets, command, first_calls, host_calls
from benchmarks.gpu.first_calls import KINDS, calls_of, given, wrong_of
from benchmarks.gpu.host_calls import Kind
from benchmarks.gpu.timer import host_us


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    """Makes ranks that send these messages, and runs a command with them and ``--out``."""
    monkeypatch.setattr(command, "require", lambda parser, **needs: 4)

    def run(module, messages, *words):
        parts = []

        def run_ranks(work, nranks, args, seconds, keep, *, forked):
            parts.append(args)
            for message in messages:
                keep([dict(message) for _ in range(nranks)])

        monkeypatch.setattr(command, "run_ranks", run_ranks)
        status = module.main(["--ranks", "2", "--out", str(tmp_path), "--commit", "abc", *words])
        shared = "_on_one_gpu" if "--one-gpu" in words else ""
        path = tmp_path / f"gpu_{module.__name__.rpartition('.')[2]}_2{shared}.json"
        found = json.loads(path.read_text())
        assert {"date", "command", "gpus", "versions", "machine"} <= found.keys()
        assert (found["commit"], found["errors"]) == ("abc", {})
        return status, found, parts

    return run


FIRST = [{"init_s": 0.5}] + [
    {"name": name, "bytes": nbytes, "ms": 900.0, "host_ms": 800.0, "wrong": 0}
    for nbytes in first_calls.SIZES
    for name in KINDS
]


@pytest.mark.parametrize("nranks", [2, 3])
def test_every_first_call_is_compared(nranks):
    """The same calls on CPU ranks have no wrong elements, and a changed one is counted."""

    def work(comm):
        found = {}
        for name in KINDS:
            a, b = given(comm.rank, 32), np.full(32, -1, np.float32)
            calls_of(comm, a, b, 5)[name]()
            right = wrong_of(name, comm.rank, comm.nranks, 5, a, b)
            (a if name in first_calls.IN_PLACE else b)[3] += 0.5
            found[name] = right, wrong_of(name, comm.rank, comm.nranks, 5, a, b)
        return found

    for found in ringcoll.spawn(work, nranks, device="cpu"):
        assert found == dict.fromkeys(KINDS, (0, 1))


def test_first_calls_are_cold_and_then_warm_by_default(ranks, capsys):
    status, found, parts = ranks(first_calls, FIRST)
    assert status == 0
    assert [row["kernels"] for row in found["rows"]] == ["cold"] * 44 + ["warm"] * 44
    assert found["init_s"] == {"cold": 0.5, "warm": 0.5}
    (cold, _, settle, shared), (warm, package, *_) = parts
    assert not shared and "one_gpu" not in found
    assert cold == warm and settle == first_calls.SETTLE and not package
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].endswith("gpu_first_calls_2.json")
    assert "44 first calls 39.60 s; slowest all_reduce 256 900 ms" in shown[1]
    assert shown[2].startswith("warm ") and shown[3:] == ["wrong elements: 0"]


def test_a_cache_is_filled_before_warm_calls_alone(ranks):
    _, found, parts = ranks(first_calls, FIRST, "--kernels", "warm")
    assert len(parts) == 2 and found["init_s"] == {"warm": 0.5}
    assert {row["kernels"] for row in found["rows"]} == {"warm"}


def test_kernels_of_the_package_must_be_there(ranks, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("ringcoll.executors.cuda.shipped.FOLDER", tmp_path / "compiled")
    with pytest.raises(SystemExit, match="2"):
        ranks(first_calls, FIRST, "--kernels", "package")
    assert "python -m ringcoll kernels sm_90 --ranks 2 --out" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "compiled").mkdir()
    (tmp_path / "compiled" / "sm_90.json").touch()
    _, found, parts = ranks(first_calls, FIRST, "--kernels", "package")
    assert [row["kernels"] for row in found["rows"]] == ["package"] * 44 and parts[0][1]


@pytest.mark.parametrize("module", [first_calls, host_calls])
def test_ranks_that_share_a_gpu_say_so_in_their_record(ranks, module, capsys):
    messages = FIRST if module is first_calls else [{"name": "x", "us": 1.0, "wrong": 0}]
    status, found, parts = ranks(module, messages, "--one-gpu")
    assert status == 0 and found["one_gpu"] and all(part[-1] for part in parts)
    assert capsys.readouterr().out.splitlines()[0].endswith("_2_on_one_gpu.json")


def test_a_wrong_element_is_an_exit_status(ranks):
    status, found, _ = ranks(first_calls, [*FIRST[:-1], {**FIRST[-1], "wrong": 3}])
    assert status == 1 and sum(row["wrong"] for row in found["rows"]) == 12


def test_a_row_has_the_slowest_rank_and_all_wrong_elements():
    found = command.slowest([{"us": 7.0, "wrong": 1}, {"us": 9.123, "wrong": 2}], "us")
    assert found == {"us": 9.12, "wrong": 3, "ranks": 2}


def test_host_calls_have_a_row_a_kind(ranks, capsys):
    messages = [
        {"name": name, "bytes": 256, "us": 7.5, "wrong": 0} for name in ("same array", "barrier")
    ]
    status, found, _ = ranks(host_calls, messages)
    assert status == 0 and [row["us"] for row in found["rows"]] == [7.5, 7.5]
    assert capsys.readouterr().out.splitlines()[1].split() == ["same", "array", "7.50", "us"]


def test_kinds_of_host_calls_are_compared():
    """A kind as the command has it, on CPU ranks."""

    def work(comm):
        x, y = np.zeros(128), np.zeros(64 * comm.nranks)
        halves = cycle([x[:64], x[64:]])
        every = np.repeat(np.arange(comm.nranks) + 1.0, 64)
        found = []
        for wanted in (comm.nranks * (comm.nranks + 1) / 2, 7):
            turns = Kind(lambda: comm.all_reduce(next(halves)), x, x, wanted, 2)
            found.append(host_calls.wrong_of(turns, comm.rank, comm.barrier))
        gathered = Kind(lambda: comm.all_gather(x[:64], y), x, y, every)
        found.append(host_calls.wrong_of(gathered, comm.rank, comm.barrier))
        return [*found, float(abs(x).sum())]

    assert ringcoll.spawn(work, 2, device="cpu") == [[0, 128, 0, 0.0]] * 2


def test_kinds_take_turns_and_warm_blocks_do_not_count():
    seen: list[str] = []
    calls = {name: partial(seen.append, name) for name in "ab"}
    found = host_us(calls, partial(seen.append, "|"), blocks=2, repeats=2, warm=1)
    assert "".join(seen) == "|aa|bb" * 3 + "|"
    assert found.keys() == calls.keys() and all(us >= 0 for us in found.values())


def test_buckets_have_a_line_a_group_and_a_state(ranks, capsys):
    times = {"call_us": 20.04, "call_us_p5": 15.0, "future_us": 5.5, "future_us_p5": 4.0}
    about = {"name": "ringcoll, group", "bytes": 4 * buckets.COUNT, "wrong": 0}
    states = ("warm", "after a backward pass")
    messages = [{**about, "state": state, **times} for state in states]
    status, found, ((_, device, calls),) = ranks(buckets, messages)
    assert (status, device, calls) == (0, "cuda", 80)
    assert [(row["state"], row["call_us"]) for row in found["rows"]] == [(s, 20.04) for s in states]
    shown = capsys.readouterr().out.splitlines()[1:3]
    assert " ".join(shown[0].split()).endswith("call 20.0 ( 15.0) us future 5.5 ( 4.0) us")
    assert "after a backward pass" in shown[1]
