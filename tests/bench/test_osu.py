"""The loop and the lines of the OSU Micro-Benchmarks."""

from __future__ import annotations

import argparse
import io
import json
from typing import Any

import pytest

from ringcoll.bench import osu
from ringcoll.bench.cases import Section
from ringcoll.bench.flags import add_arguments, read
from ringcoll.bench.report import Report
from ringcoll.bench.session import measure
from ringcoll.bench.settings import COLLECTIVES, Settings
from ringcoll.bench.table import Result
from ringcoll.bench.timing import OverRanks
from ringcoll.bench.worlds import World
from ringcoll.dtypes import dtype_of
from ringcoll.errors import ArgumentError

MIB = 1 << 20
SUM = Section("all_reduce", 4, dtype_of("float32"), "sum")
BYTES = Section("broadcast", 4, dtype_of("uint8"), None, 0)
GATHER = Section("all_gather", 4, dtype_of("float32"))


def settings(*words: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return read(parser.parse_args(["--format", "osu", *words]), given=True)


def test_what_omb_takes_where_nothing_is_said():
    made = settings()
    assert (made.min_bytes, made.max_bytes, made.step_factor) == (4, MIB, 2)
    assert (made.dtypes, made.warmup, made.iterations) == (("float",), None, None)
    made = settings("broadcast")
    assert (made.min_bytes, made.max_bytes, made.dtypes) == (1, MIB, ("uint8",))
    made = settings("-b", "128M", "-d", "double", "-f", "4", "-w", "3", "-n", "5")
    assert (made.min_bytes, made.max_bytes, made.step_factor) == (128 * MIB, 128 * MIB, 4)
    assert (made.dtypes, made.warmup, made.iterations) == (("double",), 3, 5)
    assert settings("-e", "2M").min_bytes == 4


@pytest.mark.parametrize("words", [("-I", "1"), ("-m", "2")])
def test_other_loops_are_refused(words):
    with pytest.raises(ArgumentError, match="OMB's loop"):
        settings(*words)


def test_small_messages_are_sent_more_often():
    plain = settings()
    assert osu.loop_of(SUM.case(8192), plain) == osu.Loop(100, 1000)
    assert osu.loop_of(SUM.case(8196), plain) == osu.Loop(10, 100)
    given = settings("-w", "0", "-n", "7")
    assert osu.loop_of(SUM.case(4), given) == osu.loop_of(SUM.case(MIB), given) == osu.Loop(0, 7)


def test_the_loop_times_each_call_and_no_barrier_and_no_warm_up():
    said, now = [], [0.0]

    def call():
        said.append("call")
        # The first two would spoil the mean.
        now[0] += 1000.0 if said.count("call") <= 2 else said.count("call")

    def barrier():
        said.append("barrier")
        now[0] += 100.0

    mean = osu.time_calls(call, barrier, osu.Loop(2, 3), lambda: now[0])
    assert mean == (3 + 4 + 5) / 3
    assert said == ["call", "barrier"] * 5


def test_the_columns_are_those_of_omb():
    head = osu.header(SUM).splitlines()
    assert head[-1] == (
        "# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations"
    )
    assert head[-2] == "# Datatype: float32."
    seconds, over = osu.over_ranks([136e-6, 99e-6, 165e-6, 104e-6], osu.Loop(100, 1000))
    assert over == OverRanks(99e-6, 165e-6, 1000)
    assert osu.row(SUM.case(4), [Result(False, seconds, over_ranks=over)]) == (
        "4                     126.00             99.00            165.00        1000"
    )
    assert osu.row(SUM.case(8), []).split() == ["8", "N/A", "N/A", "N/A", "N/A"]


def test_a_peers_line_is_a_comment():
    out = io.StringIO()
    report = Report(settings(), out, io.StringIO())
    case = SUM.case(1024)
    for lib, seconds in (("ringcoll", 2e-6), ("mpi", 5e-6)):
        mean, over = osu.over_ranks([seconds], osu.Loop(0, 3))
        report.add(case, lib, "ring", [Result(False, mean, over_ranks=over)])
    report.end()
    own, peer = out.getvalue().splitlines()
    assert own.split() == ["1024", "2.00", "2.00", "2.00", "3"]
    assert peer.split() == ["#", "1024", "5.00", "5.00", "5.00", "3", "mpi", "2.50x"]


def test_sizes_are_a_ranks_share_where_omb_says_so():
    for section, size, nbytes in ((SUM, 64, 64), (BYTES, 3, 3), (GATHER, 64, 256)):
        case = osu.case_of(section, size)
        assert (case.nbytes, osu.size_of(case)) == (nbytes, size)
    made = settings("all_gather", "-e", "1K")
    assert osu.most_bytes(made, 4) == 4096
    assert osu.most_bytes(settings("-e", "1K"), 4) == 1024


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_is_measured_and_checked(collective):
    quick: dict[str, Any] = {"layout": "osu", "iterations": 2, "warmup": 1, "threads": 2, "seed": 1}
    small: dict[str, Any] = {"min_bytes": 64, "max_bytes": 256, "step_factor": 4, "json": "-"}
    made = Settings(collective=collective, **quick, **small)
    out, err = io.StringIO(), io.StringIO()
    report = Report(made, out, err)
    assert measure(World(2), made, report)
    report.end()
    rows = json.loads(out.getvalue())["rows"]
    assert len(rows) == (1 if collective == "barrier" else 2)
    assert {row["in_place"] for row in rows} == {collective == "broadcast"}
    assert all(row["time_us"] > 0 and not row["wrong"] for row in rows)
    lines = [line.split() for line in err.getvalue().splitlines() if line[:1].isdigit()]
    assert [line[0] for line in lines] == (["0"] if collective == "barrier" else ["64", "256"])
    for size, mean, least, most, iterations in lines:
        assert size.isdecimal()
        assert float(least) <= float(mean) <= float(most)
        assert iterations == "2"
