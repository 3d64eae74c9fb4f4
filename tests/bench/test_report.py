"""What is printed when, and the JSON that is left behind."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest

from ringcoll.bench.cases import Section
from ringcoll.bench.report import Report
from ringcoll.bench.settings import Settings
from ringcoll.bench.table import Result
from ringcoll.dtypes import dtype_of

SUM = Section("all_reduce", 4, dtype_of("half"), "sum")
ROW_KEYS: dict[str, Any] = {
    "lib": str,
    "collective": str,
    "algorithm": str,
    "bytes": int,
    "count": int,
    "dtype": str,
    "op": str,
    "root": int,
    "in_place": bool,
    "time_us": float,
    "algbw": float,
    "busbw": float,
    "wrong": (int, type(None)),
}


class Lines(io.StringIO):
    """Remembers how often it was flushed, and in what pieces it was written."""

    flushes = 0

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)

    def flush(self) -> None:
        self.flushes += 1


def report(**settings) -> Any:
    return Report(
        Settings(**settings), Lines(), Lines(), {"cores": 4, "ranks": 4}, {"ringcoll": "1.2"}
    )


def filled(**settings) -> Any:
    made = report(**settings)
    case = SUM.case(1024)
    made.begin_section(SUM)
    made.add(case, "ringcoll", "ring", [Result(False, 10e-6, 0), Result(True, 20e-6, 3)])
    made.add(case, "mpi", "mpi", [Result(False), Result(True, 50e-6, None)])
    return made


def test_json_has_exactly_its_keys():
    found = json.loads(filled().as_json())
    assert list(found) == ["rows", "date", "command", "machine", "versions"]
    assert found["machine"] == {"cores": 4, "ranks": 4}
    assert found["versions"] == {"ringcoll": "1.2"}
    # A side that could not be measured has no row.
    assert [(r["lib"], r["in_place"]) for r in found["rows"]] == [
        ("ringcoll", False),
        ("ringcoll", True),
        ("mpi", True),
    ]
    for row in found["rows"]:
        assert list(row) == list(ROW_KEYS)
        assert all(isinstance(row[key], kind) for key, kind in ROW_KEYS.items())
    first = found["rows"][0]
    assert (first["bytes"], first["count"], first["dtype"], first["op"]) == (
        1024,
        512,
        "float16",
        "sum",
    )
    assert first["time_us"] == pytest.approx(10.0)
    assert first["busbw"] == pytest.approx(1.5 * 0.1024)
    assert [row["wrong"] for row in found["rows"]] == [0, 3, None]


def test_empty_json():
    assert json.loads(report().as_json())["rows"] == []


def test_rows_are_flushed_one_by_one():
    made = report()
    case = SUM.case(8)
    for count in range(1, 4):
        made.add(case, "ringcoll", "ring", [Result(False, 1e-6, 0)])
        assert made.stdout.flushes == count
        assert len(made.stdout.getvalue().splitlines()) == count


def test_peer_is_a_comment_with_its_ratio():
    lines = filled().stdout.getvalue().splitlines()
    peer = lines[-1]
    assert peer.startswith("#")
    assert peer.split()[-3:] == ["mpi", "-", "2.50x"]
    columns = [line for line in lines if not line.startswith("#")]
    assert [len(line.split()) for line in columns] == [13]


def beside(made, sections):
    """Tables in which ringcoll and MPI take turns at being faster, and once their times overlap."""
    times = {16: ((4.0, 3.0, 5.0), (2.0, 1.0, 2.5)), 64: ((4.0, 3.0, 9.0), (5.0, 4.0, 6.0))}
    times[1024] = ((4.0, 3.0, 5.0), (9.0, 8.0, 9.5))
    for section in sections:
        made.begin_section(section)
        for nbytes, libraries in times.items():
            for lib, (seconds, *ends) in zip(("ringcoll", "mpi"), libraries, strict=True):
                result = Result(False, seconds, 0, ends=(ends[0], ends[1]))
                made.add(section.case(nbytes), lib, "x", [result])
    made.end()
    return [line for line in made.stdout.getvalue().splitlines() if "faster at" in line]


def test_the_footer_names_who_is_faster_at_which_sizes():
    made = report(peer="mpi")
    assert beside(made, [SUM]) == [
        "# MPI is faster at 16 B, by 2.00 times",
        "# ringcoll is faster at 1 KiB, by 2.25 times",
    ]
    lines = made.stdout.getvalue().splitlines()
    assert "# no verdict at 64 B: the times of the two overlap" in lines
    assert lines[-1] == "# ringcoll is faster at 1 KiB, by 2.25 times"


def test_verdicts_of_several_tables_name_theirs():
    most = replace(SUM, op="max", algorithm="ring", slices=4)
    made = report(peer="mpi")
    lines = beside(made, [SUM, most, Section("broadcast", 4, dtype_of("int8"), root=1)])
    assert [line.partition(": ")[0] for line in lines[::2]] == [
        "# all_reduce half sum",
        "# all_reduce half max ring S=4",
        "# broadcast int8 root 1",
    ]


def test_no_winner_and_no_factor_where_ranks_waited_for_cores():
    made = report(peer="mpi")
    made.crowded = True
    assert beside(made, [SUM, replace(SUM, op="max")]) == []
    after = made.stdout.getvalue().partition("# Collective test concluded")[2]
    (last,) = [line for line in after.splitlines() if "erdict" in line]
    assert last.startswith("# No verdict: ranks waited for cores")
    assert "times the" not in after
    assert "x ringcoll" not in after


def test_the_footer_names_the_fastest_of_several_algorithms():
    made = report()
    times = {"ring": (4.0, 2.0, 3.0), "mine.py:both_ways": (5.0, 2.1, 1.0)}
    for algorithm, seconds in times.items():
        section = replace(SUM, algorithm=algorithm)
        made.begin_section(section)
        for nbytes, middle in zip((16, 64, 1024), seconds, strict=True):
            result = Result(False, middle, 0, ends=(middle * 0.9, middle * 1.1))
            made.add(section.case(nbytes), "ringcoll", algorithm, [result])
    made.end()
    assert made.stdout.getvalue().splitlines()[-3:] == [
        "# all_reduce half sum, 16 B: ring is the fastest",
        "# all_reduce half sum, 64 B: no verdict: the times overlap",
        "# all_reduce half sum, 1 KiB: mine.py:both_ways is the fastest",
    ]


@pytest.mark.parametrize("settings", [{}, {"peer": "mpi", "layout": "osu"}])
def test_no_verdict_without_a_peer_or_without_spreads(settings):
    made = report(**settings)
    made.crowded = True
    made.add(SUM.case(16), "ringcoll", "x", [Result(False, 1e-6, 0)])
    made.end()
    assert "faster at" not in made.stdout.getvalue()
    assert "Ranks waited" not in made.stdout.getvalue()


def test_failures_and_mean_are_ringcolls():
    made = filled()
    assert made.failures == 1
    made.end()
    text = made.stdout.getvalue()
    assert "# Out of bounds values : 1 FAILED" in text
    mean = (1.5 * 0.1024 + 0.75 * 0.1024) / 2
    assert f"# Avg bus bandwidth    : {mean:g} " in text


def test_json_on_standard_output_is_alone_there():
    made = filled(json="-")
    made.end()
    assert json.loads(made.stdout.getvalue())["rows"]
    assert "out-of-place" in made.stderr.getvalue()


def test_end_comes_once_and_is_the_last_word(tmp_path):
    file = tmp_path / "rows.json"
    made = filled(json=str(file))
    made.end()
    length = len(made.stdout.getvalue())
    made.end()
    made.say("too late")
    assert len(made.stdout.getvalue()) == length
    assert len(json.loads(file.read_text())["rows"]) == 3


def test_plot(tmp_path):
    made = filled(plot=str(tmp_path / "rows.svg"))
    made.end()
    picture = (tmp_path / "rows.svg").read_text()
    assert "<svg" in picture
    assert (tmp_path / "rows.svg").stat().st_size > 5000


def test_no_other_rank_writes_between_a_line_and_its_end():
    for made in (filled(), filled(json="-")):
        pieces = made.stdout.pieces + made.stderr.pieces
        assert pieces
        assert all(piece.endswith("\n") for piece in pieces if piece)


def test_what_the_stream_cannot_encode_is_escaped():
    """Such as the name of a host that is no UTF-8."""
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    made = Report(Settings(), stream, stream)
    made.say("# host \udcff, 3 µs")
    assert stream.buffer.getvalue() == b"# host \\udcff, 3 \\xb5s\n"
