"""The command line against nccl-tests' flags."""

from __future__ import annotations

import argparse
import math

import pytest

from ringcoll.bench.flags import add_arguments, read
from ringcoll.bench.settings import Settings
from ringcoll.errors import ArgumentError

MIB = 1 << 20


def settings(*words: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return read(parser.parse_args(words), given=bool(words))


def test_nothing_given_is_a_tour():
    assert settings() == Settings(tour=True, dtypes=("float",))


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["all_gather"], "collective", "all_gather"),
        (["all_reduce_perf"], "collective", "all_reduce"),
        (["-b", "8", "-e", "128M"], "min_bytes", 8),
        (["--minbytes", "1K", "--maxbytes", "2G"], "max_bytes", 2 << 30),
        (["-e", "1M"], "min_bytes", MIB),
        (["-b", "64M"], "max_bytes", 64 * MIB),
        (["-i", "4K"], "step_bytes", 4096),
        (["-f", "2"], "step_factor", 2),
        (["-n", "7"], "iterations", 7),
        (["-w", "0"], "warmup", 0),
        (["-m", "3"], "aggregate", 3),
        (["-N", "0"], "cycles", 0),
        (["-c", "0"], "checks", 0),
        (["-o", "min,max"], "ops", ("min", "max")),
        (["-o", "all"], "ops", ("all",)),
        (["-d", "half"], "dtypes", ("half",)),
        (["-r", "2"], "roots", (2,)),
        (["-r", "all"], "roots", None),
        (["-z", "1"], "blocking", 1),
        (["-C", "1"], "cpu_time", True),
        (["-a", "1"], "average", 1),
        (["-R", "0"], "register", 0),
        (["-T", "5"], "timeout", 5.0),
        (["-T", "0"], "timeout", math.inf),
        (["-S", "1"], "timestamps", True),
        (["-J", "x.json"], "json", "x.json"),
        (["--json", "-"], "json", "-"),
        (["-u", "1"], "unalign", 1),
        (["-I", "1"], "per_iteration", True),
        (["-K", "2", "-n", "3"], "per_iteration_skip", 2),
        (["-t", "2", "-g", "3"], "threads", 6),
        (["--algorithm", "ring,two_shot"], "algorithms", ("ring", "two_shot")),
        (["--slices", "1,4-6"], "slices", (1, 4, 5, 6)),
        (["--pace", "1G"], "pace", (1e9, 0.0)),
        (["--pace", "2e8,1ms"], "pace", (2e8, 1e-3)),
        (["--pace", "2e8", "--links", "switch"], "pace", (2e8, 0.0)),
        (["--pace", "2e8", "--links", "pairs"], "pace", (2e8, 0.0, "pairs")),
        (["--peer", "mpi"], "peer", "mpi"),
        (["--format", "osu"], "layout", "osu"),
        (["--ranks", "3"], "ranks", 3),
    ],
)
def test_flag_sets_its_field(words, field, value):
    assert getattr(settings(*words), field) == value
    assert not settings(*words).tour


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-G", "1"], "no CUDA graphs"),
        (["-D", "1"], "no device API"),
        (["-b", "2M", "-e", "1M"], "is above -e"),
        (["-b", "1", "-e", "2", "-i", "0"], "-f 2"),
        (["--slices", "0"], "--slices '0': '0' is no range of numbers from 1"),
        (["--slices", "one"], "--slices 'one': write numbers from 1"),
        (["-r", "-1"], "-r '-1': write numbers from 0"),
        (["--algorithm", "ring,"], "write names with commas"),
        (["--ranks", "2", "-g", "2"], "--ranks starts processes"),
        (["-K", "3", "-n", "3"], "skips all -n 3 iterations"),
        (["--json", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["--plot", "/nowhere/x.png"], "there is no folder /nowhere"),
        (["--plot", "/tmp/x.bmp"], "ends in one of .png"),
        (["--plot", "-"], "ends in one of .png"),
        (["--json", "/tmp"], "cannot be written"),
        (["--pace", "0"], "bandwidth"),
        (["--links", "pairs"], "--links pairs says what --pace holds"),
    ],
)
def test_refusal_says_why(words, says):
    with pytest.raises(ArgumentError, match=says):
        settings(*words)


@pytest.mark.parametrize("words", [["-n", "0"], ["-z", "4"], ["-a", "x"], ["gather_all"]])
def test_parser_refuses(words, capsys):
    with pytest.raises(SystemExit) as left:
        settings(*words)
    assert left.value.code == 2
    assert "invalid" in capsys.readouterr().err


def test_flags_without_meaning_leave_a_note():
    notes = settings("-y", "1", "-p", "1", "-x", "2", "-V", "4", "-M", "1").notes
    assert len(notes) == 5
    assert all("is ignored" in note for note in notes)
    assert settings("-y", "0").notes == ()
