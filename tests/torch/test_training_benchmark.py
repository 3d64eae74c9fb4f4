"""The benchmark of training, by CPU ranks on tiny models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from benchmarks import torch_calls
from benchmarks.models import gpt, resnet

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(autouse=True)
def one_thread():
    """Small operations gain nothing by more, and lose much where other processes run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


LOADED = "benchmarks.models.ranks", "torch._dynamo"  # an optimizer loads this, in a second
PROGRAM = """
import os, sys
from benchmarks.{name} import main
os.chdir({folder!r})
os.environ.update({environment!r})
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture
def run(programs):
    """Runs a benchmark that loads no torch of its own: status, output and errors."""

    def run(folder, name, *words, **environment):
        code = PROGRAM.format(name=name, folder=str(folder), environment=environment)
        [found] = programs.run(code, 1, *words, loads=LOADED)
        return found

    return run


@pytest.fixture
def bench(run):
    """Runs the benchmark of training; returns its record and where that lies."""

    def bench(folder, *words):
        argv = ["training", "--tiny", *words, "--out", str(folder), "--seconds", "90"]
        status, out, error = run(ROOT, *argv)
        assert status == 0, out + error
        path = Path(out.splitlines()[-1])
        return json.loads(path.read_text(encoding="utf-8")), path

    return bench


def command(folder, name, *words, **environment):
    """Runs a benchmark as a user does."""
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )


def records():
    return {path: path.stat().st_mtime_ns for path in RESULTS.rglob("*")}


def test_ways_train_alike_and_are_timed(bench, tmp_path):
    words = ["--device", "cpu", "--ranks", "2", "--cases", "resnet50:2,gpt:2", "--curve", "3"]
    found, path = bench(tmp_path, *words, "--steps", "1", "--rounds", "2")
    rows = found["rows"]
    ways = ("gloo", "ringcoll", "ringcoll-hook")
    assert [(r["model"], r["way"]) for r in rows] == [
        (model, way) for model in ("resnet50", "gpt") for way in ways
    ]
    assert all(row["replicas_equal"] for row in rows)
    assert all(row["loss_differs"] < 1e-3 for row in rows)
    assert all(len(row["curve"]) == 3 and row["step_ms"] > 0 for row in rows)
    assert {"date", "command", "commit", "machine", "versions"} <= found.keys()
    assert found["errors"] == {}
    assert path.parent == tmp_path


def test_fsdp_trains_alike_and_is_compared_with_the_peers_own(bench, tmp_path):
    words = ["--device", "cpu", "--ranks", "2", "--cases", "gpt:2", "--curve", "3"]
    ways = "peer,peer-fsdp,ringcoll-fsdp"
    found, _ = bench(tmp_path, *words, "--ways", ways, "--steps", "1", "--rounds", "1")
    rows = {row["way"]: row for row in found["rows"]}
    assert len(rows) == 3 and found["errors"] == {}
    peer, ours = rows["gloo-fsdp"], rows["ringcoll-fsdp"]
    assert peer["of_peer"] == 1.0 and ours["replicas_equal"]
    assert ours["of_peer"] == round(ours["step_ms"] / peer["step_ms"], 4)
    assert ours["loss_differs"] < 1e-3


def test_fsdp_of_a_model_that_it_refuses_is_refused_at_once(run, tmp_path):
    words = "--device", "cpu", "--ways", "ringcoll-fsdp", "--cases", "gpt:1,resnet50:1"
    status, _, error = run(tmp_path, "training", *words)
    assert status == 2
    assert "FSDP2 refuses weights in channels_last" in error


def test_nothing_is_written_without_a_place(run, tmp_path, monkeypatch, capsys):
    def ranks(function, arguments, nranks):
        Path(f"{arguments[-1]}.json").write_text('{"gloo all_reduce": 1.0}')

    before = records()
    words = ["--device", "cpu", "--ranks", "2", "--cases", "gpt:2", "--ways", "ringcoll"]
    status, out, error = run(
        tmp_path, "training", "--tiny", *words, "--curve", "2", "--rounds", "1"
    )
    assert status == 0, error
    assert "gpt" in out and list(tmp_path.iterdir()) == []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.multiprocessing, "spawn", ranks)
    torch_calls.main(["--device", "cpu"])
    assert json.loads(capsys.readouterr().out)["us a call"] == {"gloo all_reduce": 1.0}
    assert list(tmp_path.iterdir()) == [] and records() == before
    torch_calls.main(["--device", "cpu", "--out", "there"])
    assert (tmp_path / "there" / "torch_calls.json").is_file()


def test_buckets_of_every_group_are_timed_and_compared(run, tmp_path):
    words = ["--device", "cpu", "--calls", "4", "--out", str(tmp_path)]
    nowhere = str(tmp_path / "no bridge")
    status, out, error = run(tmp_path, "gpu.buckets", *words, RINGCOLL_CACHE_DIR=nowhere)
    assert status == 0, out + error
    assert out.splitlines()[-1] == "wrong elements: 0"
    written = json.loads((tmp_path / "cpu_buckets_2.json").read_text())
    rows = written["rows"]
    names = [
        *("Python, no communication", "C++, no communication"),
        *("gloo, backend alone", "gloo, group", "ringcoll, group"),
    ]
    states = ["warm", "after a backward pass", "after 64 MiB were written"]
    assert [(row["name"], row["state"]) for row in rows] == list(product(names, states))
    assert all(row["call_us"] > 0 and row["future_us"] > 0 for row in rows)
    assert written["errors"] == {} and written["machine"]["device"] == "cpu"


def test_buckets_of_ddp_are_timed_and_their_gradients_compared(run, tmp_path):
    words = ["--device", "cpu", "--steps", "4", "--out", str(tmp_path)]
    nowhere = str(tmp_path / "no bridge")
    status, out, error = run(tmp_path, "gpu.ddp_buckets", *words, RINGCOLL_CACHE_DIR=nowhere)
    assert status == 0, out + error
    assert out.splitlines()[-1] == "wrong elements: 0"
    written = json.loads((tmp_path / "cpu_ddp_buckets_2.json").read_text())
    rows = {row["name"]: row for row in written["rows"]}
    assert [*rows] == ["Python, no communication", "gloo, group", "ringcoll, group"]
    assert all(row["buckets"] == 24 for row in rows.values())
    assert all({"bucket_us", "bucket_us_p5"} <= row.keys() for row in rows.values())
    assert written["errors"] == {}


@pytest.mark.parametrize("name", ["training", "torch_calls"])
def test_a_missing_gpu_is_said_at_once(name, tmp_path):
    found = command(tmp_path, name, CUDA_VISIBLE_DEVICES="")
    assert (found.returncode, found.stdout) == (2, "")
    assert "needs NVIDIA GPUs with CuPy and torch, but here" in found.stderr
    assert "--device cpu" in found.stderr and found.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_unknown_ways_and_models_are_refused(run, tmp_path):
    words = "--device", "cpu", "--ways", "nccl", "--cases", "bert:1"
    status, _, error = run(tmp_path, "training", *words)
    assert status == 2
    assert "no such models or ways: bert, nccl" in error


def test_a_way_may_communicate_nothing(bench, tmp_path):
    words = ["--device", "cpu", "--ranks", "2", "--cases", "gpt:2", "--ways", "peer,peer-none"]
    found, _ = bench(tmp_path, *words, "--curve", "2", "--steps", "1", "--rounds", "1")
    assert {r["way"]: r["replicas_equal"] for r in found["rows"]} == {
        "gloo": True,
        "gloo-none": False,
    }


def test_runs_are_equal_to_the_bit_with_any_buckets(bench, tmp_path):
    # Three ranks: of two, every order of adding gives the same.
    words = [
        "--device",
        "cpu",
        "--ranks",
        "3",
        "--cases",
        "gpt:2",
        "--curve",
        "3",
        "--buckets",
        "25,25,0.02",
    ]
    found, _ = bench(tmp_path, "--deterministic", *words, "--ways", "ringcoll,ringcoll-hook")
    rows = found["rows"]
    assert [(row["way"], row["equal"]) for row in rows] == [
        ("ringcoll", True),
        ("ringcoll-hook", True),
    ]
    assert all(len(set(row["last_loss"])) == 1 for row in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("nranks", [1, pytest.param(2, marks=pytest.mark.multi_gpu)])
def test_ways_on_gpus(bench, tmp_path, nranks):
    words = ["--device", "cuda", "--ranks", str(nranks), "--cases", "resnet50:8,gpt:4"]
    ways = "peer,ringcoll,ringcoll-hook,ringcoll-bf16"
    timed, path = bench(tmp_path, *words, "--ways", ways, "--curve", "5", "--rounds", "2")
    assert len(timed["rows"]) == 8
    assert all(row["replicas_equal"] for row in timed["rows"])
    for row in timed["rows"]:
        # Batch norms of a few images enlarge what rounding to bfloat16 changes: 0.06 was seen on a
        # GPU, and 0.02 on CPUs, there as with rounding and gloo's sum. Whether the sums themselves
        # are right is for the tests of the hook.
        enlarged = (row["model"], row["way"]) == ("resnet50", "ringcoll-bf16")
        assert row["loss_differs"] < (0.2 if enlarged else 0.05), row
    assert path.with_suffix(".json").is_file()
    words += ["--ways", "ringcoll,ringcoll-hook", "--curve", "5", "--buckets", "25,25,0.1"]
    repeated, _ = bench(tmp_path, *words, "--deterministic")
    assert [row["equal"] for row in repeated["rows"]] == [True] * 4


def test_own_models_have_the_sizes_of_the_known_ones():
    def count(module):
        return sum(parameter.numel() for parameter in module.parameters())

    with torch.device("meta"):
        assert count(resnet.ResNet()) == 25_557_032
        assert count(gpt.GPT(50257)) == 124_439_808


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (1, 2, 7, 10)])
def test_repeatable_pooling_is_max_pooling(shape):
    x = torch.randn(shape, requires_grad=True)
    for pool in (torch.nn.MaxPool2d(3, 2, 1), resnet.SlicedMaxPool()):
        found = pool(x)
        (gradient,) = torch.autograd.grad(found.square().sum(), x)
        results = (found, gradient)
        if isinstance(pool, torch.nn.MaxPool2d):
            wanted = results
    assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


@pytest.mark.parametrize("task", [gpt.task, resnet.task], ids=["gpt", "resnet50"])
def test_tiny_models_learn(task):
    torch.manual_seed(0)
    made = task(tiny=True)
    inputs, targets = made.sample(8, torch.Generator().manual_seed(0))
    optimizer = made.optimizer(made.module.parameters())
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = made.loss(made.module(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_replicas_on_nodes_train_alike(bench, tmp_path):
    words = ["--device", "cpu", "--nodes", "2", "--ranks", "2", "--cases", "gpt:2", "--curve", "3"]
    found, path = bench(tmp_path, *words, "--steps", "1", "--rounds", "2")
    assert path.name == "training_nodes_2.json"
    assert found["errors"] == {}
    assert found["nodes"] == 2
    assert [row["way"] for row in found["rows"]] == ["gloo", "ringcoll", "ringcoll-hook"]
    assert all(row["replicas_equal"] and row["loss_differs"] < 1e-3 for row in found["rows"])
