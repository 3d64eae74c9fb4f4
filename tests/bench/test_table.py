"""The columns, character by character."""

from __future__ import annotations

import pytest

from ringcoll.bench import table
from ringcoll.bench.cases import Section
from ringcoll.bench.settings import Settings
from ringcoll.bench.table import Result
from ringcoll.bench.timing import Spread
from ringcoll.dtypes import dtype_of

FLOAT = dtype_of("float32")
SUM = Section("all_reduce", 4, FLOAT, "sum")

HEADER = (
    "#\n"
    "#                                                              "
    "out-of-place                       in-place          \n"
    "#       size         count      type   redop    root     "
    "time   algbw   busbw  #wrong     time   algbw   busbw  #wrong \n"
    "#        (B)    (elements)                               "
    "(us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)         "
)


def test_header():
    assert table.header(Settings()) == HEADER


def test_header_with_cpu_time_and_timestamps():
    lines = table.header(Settings(cpu_time=True, timestamps=True)).splitlines()
    assert lines[2].split()[6] == "cputime"
    assert lines[2].endswith("           timestamp")
    assert lines[3].endswith(" %Y-%m-%d %H:%M:%S")


def test_row():
    results = [Result(False, 123.456e-6, 0), Result(True, 1.5, 12)]
    assert table.row(SUM.case(1 << 20), results) == (
        "     1048576        262144     float     sum      -1"
        "   123.46    8.49   12.74       0  1500000    0.00    0.00      12"
    )


def test_row_without_one_side_and_without_a_check():
    ring = Section("sendrecv", 4, FLOAT)
    assert table.row(ring.case(64), [Result(False, 2e-6)]) == (
        "          64            16     float    none      -1"
        "     2.00    0.03    0.03     N/A      N/A     N/A     N/A     N/A"
    )


def test_columns_of_row_and_header_end_together():
    row = table.row(SUM.case(1024), [Result(False, 1e-3, 0), Result(True, 1e-3, 0)])
    names = HEADER.splitlines()[2].rstrip()
    assert len(row) == len(names)
    assert len(row.split()) == len(names.removeprefix("#").split()) == 13


def test_row_with_spread():
    found = Spread(1e-6, 2e-6, 2e-6, 12.5)
    row = table.row(SUM.case(8), [Result(False, 1e-6, 0, found)], spread=True)
    header = table.header(Settings(per_iteration=True)).splitlines()[2]
    assert len(row) == len(header.rstrip())
    assert row.split()[9:13] == ["1.00", "2.00", "2.00", "12.50"]
    assert row.split()[-4:] == ["N/A"] * 4


@pytest.mark.parametrize(
    ("value", "width", "text"),
    [
        (0.0, 7, "   0.00"),
        (1.005, 7, "   1.00"),
        (9999.994, 7, "9999.99"),
        (12345.67, 7, "12345.7"),
        (123456.7, 7, " 123457"),
        (1234567.8, 7, "1234568"),
        (12345678.9, 7, "1.2e+07"),
        (999.5, 6, "999.50"),
        (1234.5, 6, "1234.5"),
        (123456.0, 6, "123456"),
        (1234567.0, 6, " 1e+06"),
    ],
)
def test_numbers_keep_to_their_width(value, width, text):
    assert table.fixed(value, width) == text


def test_preamble():
    settings = Settings(min_bytes=8, max_bytes=64, step_factor=2, iterations=20, threads=2)
    assert table.preamble(settings, "1.2") == (
        "# ringcoll version 1.2\n"
        "# Collective test starting: all_reduce\n"
        "# nThread 1 nGpus 2 minBytes 8 maxBytes 64 step: 2(factor) warmup iters: 1 iters: 20 "
        "agg iters: 1 validation: 1 graph: 0 unalign: 0\n"
        "#\n"
        "# Using devices"
    )
    assert "step: 1048576(bytes)" in table.preamble(Settings(), "1.2")
    assert "Blocking Enabled" in table.preamble(Settings(blocking=1), "1.2")


def test_rank_line():
    assert table.rank_line(3, 42, "node", "some CPU") == (
        "#  Rank  3 Group  0 Pid     42 on       node device  0 [0000:00:00] some CPU"
    )


def test_footer():
    assert table.footer("reduce", 0, 1.25) == (
        "# Out of bounds values : 0 OK\n"
        "# Avg bus bandwidth    : 1.25 \n"
        "#\n"
        "# Collective test concluded: reduce"
    )
    assert "Out of bounds values : 2 FAILED" in table.footer("reduce", 2, 0.0)
