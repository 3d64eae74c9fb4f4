"""The run without arguments, on ranks that are threads, and the paced measurement under it."""

from __future__ import annotations

import io
import json
import os

import pytest

from benchmarks.collectives import BARS, RUNS, Bar, judge
from ringcoll.bench import tour
from ringcoll.bench.cases import Section
from ringcoll.bench.environment import overcommitted
from ringcoll.bench.paced import measure_chain
from ringcoll.bench.report import Report, Row, verdict
from ringcoll.bench.session import measure
from ringcoll.bench.settings import Settings
from ringcoll.bench.table import Result
from ringcoll.bench.worlds import World
from ringcoll.dtypes import dtype_of
from ringcoll.model.closed_form import chain_time


def test_tour(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tour, "NBYTES", 1 << 16)
    monkeypatch.setattr(tour, "SLICES", (1, 4))
    monkeypatch.setattr(tour, "MAX_BYTES", 256)
    monkeypatch.setattr(tour, "PACE", (20e6, 1e-3))
    monkeypatch.delenv("PMI_SIZE", raising=False)
    settings = Settings(tour=True, threads=3, iterations=2)
    out = io.StringIO()
    report = Report(settings, out, io.StringIO())
    assert tour.tour(World(3), settings, report)
    report.end()
    text = out.getvalue()
    assert text.startswith("# 1. all_reduce of 16 bytes to 256 B among this machine's ranks\n# 2. ")
    assert text.count("# Out of bounds values : 0 OK") == 1
    assert "# MPI is not here to compare with" in text
    lines = text.splitlines()
    head = next(at for at, line in enumerate(lines) if "measured (ms)" in line)
    shown = [line.split() for line in lines[head + 1 : head + 3]]
    assert [words[0] for words in shown] == ["1", "4"]
    # Four ranks, however many are measured before, on however many cores.
    paper = [chain_time(4, 1 << 16, slices, *tour.PACE) * 1e3 for slices in (1, 4)]
    assert [words[1] for words in shown] == [f"{seconds:.1f}" for seconds in paper]
    assert shown[0][-1] == "#" * 40
    assert "# Best S: " in text
    folder = tmp_path / "bench-results"
    assert len(json.loads((folder / "all_reduce.json").read_text())["rows"]) == 6
    for name in ("all_reduce.json", "all_reduce.png", "pipeline.png"):
        assert f"# wrote {folder / name}" in text
    assert (folder / "all_reduce.png").stat().st_size > 5000
    assert (folder / "pipeline.png").stat().st_size > 5000
    assert text.splitlines()[-1].startswith("# Next: ")


def test_verdict_names_who_is_faster_where():
    section = Section("all_reduce", 2, dtype_of("float32"), "sum")
    times = {16: (4.0, 2.0), 1024: (4.0, 3.0), 65536: (10.0, 25.0)}
    rows = [
        Row(lib, "x", section.case(nbytes), Result(in_place, seconds))
        for nbytes, pair in times.items()
        for lib, seconds in zip(("ringcoll", "mpi"), pair, strict=True)
        for in_place in (False, True)
    ]
    assert verdict(rows, "mpi") == [
        "MPI is faster at 16 B to 1 KiB, by 1.33 to 2.00 times",
        "ringcoll is faster at 64 KiB, by 2.50 times",
    ]


def test_no_verdict_where_the_spread_makes_it_noise():
    section = Section("all_reduce", 2, dtype_of("float32"), "sum")
    # Medians, and the fastest and the slowest block.
    times = {
        16: ((3180.0, (11.0, 4000.0)), (20.0, (18.0, 30.0))),
        1024: ((4.0, (3.0, 6.0)), (5.0, (4.5, 7.0))),
        65536: ((10.0, (9.0, 12.0)), (25.0, (20.0, 31.0))),
    }
    rows = [
        Row(lib, "x", section.case(nbytes), Result(False, seconds, ends=ends))
        for nbytes, pair in times.items()
        for lib, (seconds, ends) in zip(("ringcoll", "mpi"), pair, strict=True)
    ]
    assert verdict(rows, "mpi") == [
        "no verdict at 16 B to 1 KiB: the times of the two overlap",
        "ringcoll is faster at 64 KiB, by 2.50 times",
    ]


@pytest.mark.parametrize(
    ("ranks", "load", "said"),
    [(2, 0.3, False), (4, 0.9, False), (4, 1.1, True), (2, 2.5, True), (5, 0.0, True)],
)
def test_ranks_that_wait_for_cores_are_remarked(ranks, load, said):
    remark = overcommitted(ranks, 4, load)
    assert (remark is not None) is said
    if remark is not None:
        assert f"{ranks} ranks on 4 cores, load average {load:.1f}" in remark
        assert remark.endswith("; use fewer ranks, or stop what else runs")


def test_a_rank_that_waits_for_a_core_cannot_be_fewer():
    remark = overcommitted(1, 2, 4.0)
    assert remark is not None and "1 rank on 2 cores" in remark
    assert remark.endswith("say little; stop what else runs")


def test_the_remark_stands_above_the_table(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 1.0, 1.0))
    for pace, times in ((None, 1), ((1e9, 0.0), 0)):
        settings = Settings(threads=2, iterations=1, max_bytes=32, pace=pace)
        out = io.StringIO()
        assert measure(World(2, "cpu"), settings, Report(settings, out, io.StringIO()))
        assert out.getvalue().count("# Warning: 2 ranks on ") == times


def test_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "bench-results").write_text("a file is in the way")
    monkeypatch.chdir(tmp_path)
    folder = tour.results_folder()
    assert folder.is_dir()
    assert folder.parent != tmp_path
    folder.rmdir()


def test_paced_chain_takes_no_less_than_the_model():
    pace = (2e6, 1e-3)
    points = list(measure_chain(World(3), 20_000, (1, 2), pace=pace))
    assert [(p.nranks, p.nbytes, p.slices) for p in points] == [(3, 20_000, 1), (3, 20_000, 2)]
    for point in points:
        # Slices end at whole lines of memory, so that one may be a little shorter.
        assert point.seconds >= 0.97 * chain_time(3, 20_000, point.slices, *pace)


def rows(own: float, mpi: float) -> list[dict]:
    base = {"bytes": 64 << 20, "in_place": True}
    return [
        {**base, "lib": "ringcoll", "time_us": own},
        {**base, "lib": "mpi", "time_us": mpi},
        {**base, "lib": "ringcoll", "time_us": 1.0, "in_place": False},
    ]


@pytest.mark.parametrize(
    ("bar", "seen", "met"),
    [
        (Bar("x", 64 << 20, in_place=True, least=4.0), 4.5, True),
        (Bar("x", 64 << 20, in_place=True, least=5.0), 4.5, False),
        (Bar("x", 64 << 20, in_place=True, most_us=20.0), 20.0, True),
        (Bar("x", 64 << 20, in_place=True, most_us=19.0), 20.0, False),
    ],
)
def test_bars_are_judged(bar, seen, met):
    found = judge(bar, rows(20.0, 90.0))
    assert (found["seen"], found["met"]) == (seen, met)


def test_every_bar_has_its_run():
    assert {bar.run for bar in BARS} == {run.name for run in RUNS}
    assert all((bar.least is None) != (bar.most_us is None) for bar in BARS)
