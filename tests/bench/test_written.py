"""Where benchmarks write: to what ``--out`` names, and nowhere without it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import collectives, nodes, nodes_chain, peers, record, timing_model
from benchmarks.gpu import (
    bars,
    buckets,
    campaign,
    command,
    ddp_buckets,
    deterministic,
    first_calls,
    host_calls,
    overlap,
    report,
    session,
)
from benchmarks.gpu import nodes as gpu_nodes
from benchmarks.gpu import timing_model as gpu_timing_model

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def records():
    return {path: path.stat().st_mtime_ns for path in RESULTS.rglob("*")}


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """A folder of its own, on a machine with two GPUs; the kept records are as they were."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RINGCOLL_CACHE_DIR", str(tmp_path / "cache"))
    for module in (
        bars,
        command,
        deterministic,
        gpu_nodes,
        gpu_timing_model,
        overlap,
        peers,
        session,
    ):
        monkeypatch.setattr(module, "require", lambda parser, **needs: 2)
    before = records()
    yield folder
    assert records() == before


def row(lib, nbytes=64 << 20, in_place=True):
    said = {"lib": lib, "algorithm": "chain S=1", "time_us": 1e6}
    return {**said, "bytes": nbytes, "in_place": in_place}


def no_collectives(patch):
    libs = ("ringcoll", "mpi")
    rows = [row(lib, bar.nbytes, bar.in_place) for bar in collectives.BARS for lib in libs]
    patch.setattr(collectives, "measured", lambda runs: [(run, rows) for run in runs])
    return collectives.main


def no_hosts(patch, module):
    rows = [row(lib) for lib in ("ringcoll", "mpi")]
    patch.setattr(nodes, "predicted", lambda *_: 1.0)
    patch.setattr(module, "missing", lambda: None)
    patch.setattr(module, "hosts", lambda *_, **__: contextlib.nullcontext())
    patch.setattr(module, "measured", lambda *_: rows)
    return module.main


def no_links(patch):
    fit = {"memory_bandwidth": 1e10, "core_bandwidth": 1e10, "alpha": 0.0}
    patch.setattr(timing_model, "free", lambda *_: {"fit": fit, "points": []})
    return lambda argv: timing_model.main(["--free", *argv])


def no_ranks(patch, module, runner=None):
    patch.setattr(runner or module, "run_ranks", lambda *_, **_how: "no ranks")
    return module.main


def no_nodes(patch):
    patch.setattr(gpu_nodes, "_run", lambda *_: "no ranks")
    return gpu_nodes.main


def no_bars(patch):
    """The part of rank 0, as a process of its own would run it."""

    def ended(status):
        raise SystemExit(status)

    patch.setattr(bars, "measure", lambda args: {"rows": []})
    patch.setattr(bars, "about", lambda *_: {})
    patch.setattr("os._exit", ended)

    def main(argv):
        with pytest.raises(SystemExit, match="0"):
            bars.main(["--rank", "0", "--ranks", "2", *argv])

    return main


def no_peers(patch):
    def main(argv):
        folder = Path(argv[argv.index("--out") + 1])
        folder.mkdir(exist_ok=True)
        (folder / "peers_2.json").write_text('{"rows": []}')
        return 0

    patch.setattr(bars, "main", main)
    return peers.main


def no_parts(patch):
    patch.setattr(session, "run_part", lambda part, out, log, seconds: "ok")
    return session.main


BENCHMARKS = {
    "collectives": (no_collectives, "collectives.json"),
    "nodes": (lambda patch: no_hosts(patch, nodes), "nodes.json"),
    "nodes_chain": (lambda patch: no_hosts(patch, nodes_chain), "nodes_chain.json"),
    "timing_model": (no_links, "timing_model_free.json"),
    "peers": (no_peers, "peers_2.json"),
    "gpu.bars": (no_bars, "gpu_bars_2.json"),
    "gpu.session": (no_parts, "session.log"),
    "gpu.timing_model": (
        lambda patch: no_ranks(patch, gpu_timing_model),
        "gpu_timing_model_2.json",
    ),
    "gpu.overlap": (lambda patch: no_ranks(patch, overlap), "gpu_overlap_2.json"),
    "gpu.buckets": (lambda patch: no_ranks(patch, buckets, command), "gpu_buckets_2.json"),
    "gpu.ddp_buckets": (
        lambda patch: no_ranks(patch, ddp_buckets, command),
        "gpu_ddp_buckets_2.json",
    ),
    "gpu.campaign": (lambda patch: no_ranks(patch, campaign), "gpu_campaign_2.json"),
    "gpu.first_calls": (
        lambda patch: no_ranks(patch, first_calls, command),
        "gpu_first_calls_2.json",
    ),
    "gpu.host_calls": (
        lambda patch: no_ranks(patch, host_calls, command),
        "gpu_host_calls_2.json",
    ),
    "gpu.deterministic": (lambda patch: no_ranks(patch, deterministic), ""),
    "gpu.nodes": (no_nodes, ""),
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_nothing_is_written_without_a_place(name, monkeypatch, elsewhere, capsys):
    make, _ = BENCHMARKS[name]
    make(monkeypatch)([])
    assert list(elsewhere.iterdir()) == []
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", BENCHMARKS)
def test_what_is_found_is_written_where_it_is_asked_for(name, monkeypatch, elsewhere):
    make, file = BENCHMARKS[name]
    make(monkeypatch)(["--out", "there"])
    written = elsewhere / "there" / file
    assert written.is_file()
    assert not file.endswith(".json") or isinstance(json.loads(written.read_text()), dict)


def test_ranks_of_the_bars_are_told_the_place(monkeypatch):
    lines = []

    def start(words):
        lines.append(words)
        return SimpleNamespace(wait=lambda: 0, poll=lambda: 0, kill=lambda: None)

    monkeypatch.setattr("subprocess.Popen", start)
    assert bars.main([]) == bars.main(["--out", "there"]) == 0
    assert [line.count("there") for line in lines] == [0, 0, 1, 1]
    assert all(("--out" in line) == ("there" in line) for line in lines)


def test_a_rank_that_fails_ends_the_others(monkeypatch):
    monkeypatch.setattr(bars, "GRACE", 0.1)
    programs = "import sys; sys.exit(3)", "import time; time.sleep(600)"
    processes = [subprocess.Popen([sys.executable, "-c", text]) for text in programs]
    assert bars.statuses_of(processes, 600.0) == [3, -signal.SIGKILL]
    late = [subprocess.Popen([sys.executable, "-c", programs[1]])]
    assert bars.statuses_of(late, 0.1) == [-signal.SIGKILL]


def test_a_part_that_fails_shows_the_end_of_its_log(monkeypatch, capsys):
    def run_part(part, out, log, seconds):
        log.write("".join(f"{part.name} {line}\n" for line in range(40)))
        log.flush()
        return "ok" if part.name == "links" else "exit 1"

    monkeypatch.setattr(session, "run_part", run_part)
    assert session.main(["--parts", "links,yardstick"]) == 1
    shown = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in shown if line.startswith("links ")] == ["links        ok after 0 s"]
    wanted = [f"yardstick {line}" for line in range(10, 40)]
    assert [line for line in shown if line.startswith("yardstick ")][1:] == wanted


@pytest.mark.parametrize(
    ("argv", "main", "said"),
    [
        (["--out", "file"], gpu_timing_model.main, "file is no folder that can be written to"),
        (["--out", "file/under"], gpu_timing_model.main, "file is no folder"),
        (["--out", "folder"], gpu_nodes.main, "folder is a folder; name the JSON file to write"),
        (["--out", "file/a.json"], gpu_nodes.main, "file is no folder"),
    ],
)
def test_a_place_that_cannot_be_is_refused_at_once(elsewhere, capsys, argv, main, said):
    (elsewhere / "file").touch()
    (elsewhere / "folder").mkdir()
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert said in capsys.readouterr().err


def test_a_record_says_where_it_lies(tmp_path, capsys):
    record.save(None, "a", {}, ranks=1)
    assert capsys.readouterr().out == ""
    record.save(tmp_path / "new", "a", {"rows": []}, ranks=1)
    path = tmp_path / "new" / "a.json"
    assert capsys.readouterr().out == f"{path}\n"
    assert {"name", "date", "command", "commit", "rows"} <= json.loads(path.read_text()).keys()


def test_a_report_without_a_file_keeps_its_rows(elsewhere):
    made = report.Report(None, "links")
    made.add({"name": "push"})
    made.note("seed", 1)
    assert (made.rows, made.extra) == ([{"name": "push"}], {"seed": 1})
    assert list(elsewhere.iterdir()) == []
