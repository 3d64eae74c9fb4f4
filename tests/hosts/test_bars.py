"""What the benchmarks between nodes make of their rows."""

from __future__ import annotations

import pytest

from benchmarks.nodes import PAYLOAD, judge, predicted, program, summary
from benchmarks.nodes_chain import points_of
from ringcoll.model.closed_form import chain_time

MIB = 1 << 20


def rows(*times):
    return [
        {
            "collective": "all_reduce",
            "algorithm": "hierarchical",
            "bytes": nbytes,
            "lib": lib,
            "in_place": side,
            "time_us": us,
        }
        for nbytes, lib, side, us in times
    ]


def test_the_faster_side_of_the_largest_size_counts():
    lines = summary(
        rows(
            (MIB, "ringcoll", False, 9e3),
            (64 * MIB, "ringcoll", False, 700e3),
            (64 * MIB, "ringcoll", True, 560e3),
            (64 * MIB, "mpi", False, 650e3),
        ),
        125e6,
    )
    assert [line["ms"] for line in lines] == [9.0, 560.0, 650.0]
    assert lines[1]["of_the_rate"] == pytest.approx(64 * MIB / 0.56 / 125e6, abs=1e-3)
    bars = judge(lines)
    assert [bar["met"] for bar in bars] == [True, True]
    assert [bar["seen"] for bar in bars] == [0.959, 1.161]
    slow = summary(rows((64 * MIB, "ringcoll", True, 600e3), (64 * MIB, "mpi", True, 590e3)), 125e6)
    assert [bar["met"] for bar in judge(slow)] == [False, False]
    assert judge(summary(rows((MIB, "mpi", False, 1.0)), 125e6)) == []


def test_the_model_of_two_hosts_is_the_floor_on_paper():
    line = {"collective": "all_reduce", "algorithm": "hierarchical", "bytes": 64 * MIB}
    floor = 64 * MIB / (125e6 * PAYLOAD) * 1e3
    assert 0.999 * floor < predicted(line, 2, 2, 125e6) < 1.01 * floor
    ring = predicted({**line, "algorithm": "ring S=4"}, 2, 2, 125e6)
    assert 1.499 * floor < ring < 1.51 * floor


def test_the_sweep_reaches_every_size(tmp_path):
    words = program("broadcast", (MIB, 8 * MIB, 64 * MIB), ["--peer", "mpi"], tmp_path / "rows")
    at = words.index("broadcast")
    swept = ["-b", str(MIB), "-e", str(64 * MIB), "-f", "8", "--peer", "mpi"]
    assert words[at + 1 :] == [*swept, "--json", str(tmp_path / "rows")]


def test_points_stand_beside_the_formula():
    found = [
        {"algorithm": "chain S=4", "bytes": 64 * MIB, "in_place": True, "time_us": 700e3},
        {"algorithm": "chain S=4", "bytes": 64 * MIB, "in_place": False, "time_us": 900e3},
    ]
    (point,) = points_of(found, 3, 120e6)
    assert point["slices"] == 4
    assert point["model"] == chain_time(3, 64 * MIB, 4, 120e6)
    assert point["off"] == pytest.approx(0.7 / point["model"] - 1)
