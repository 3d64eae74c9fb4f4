"""Pictures of rows: which lines there are, on which axes, from runs and from records."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.plots import draw
from benchmarks.tables import LIBRARIES, all_reduce, record
from ringcoll.bench.plot import draw_rows


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved."""
    from matplotlib.figure import Figure  # here: every worker collects this file, one runs it

    saved = []
    plain = Figure.savefig

    def savefig(self, *arguments, **keywords):
        saved.append(self)
        return plain(self, *arguments, **keywords)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


def row(lib: str, nbytes: int, seconds: float, *, in_place=False, algorithm="ring", **more):
    made = {"lib": lib, "collective": "all_reduce", "bytes": nbytes, "in_place": in_place}
    return {**made, "algorithm": algorithm, "time_us": seconds * 1e6, "busbw": 1.0, **more}


def lines_of(figure: Any) -> list[dict[str, tuple[list[float], list[float]]]]:
    """Of each panel the points of each line, by its label."""
    return [
        {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
        for axes in figure.axes
    ]


def test_latency_and_bandwidth_side_by_side(figures, tmp_path):
    rows = [row("ringcoll", 1 << 20, 2.0), row("ringcoll", 1 << 10, 1.0)]
    rows += [row("mpi", 1 << 10, 3.0), row("mpi", 1 << 20, 4.0)]
    draw_rows(rows, tmp_path / "rows.png")
    latency, bandwidth = figures[0].axes
    assert (latency.get_xscale(), latency.get_yscale()) == ("log", "log")
    assert (bandwidth.get_xscale(), bandwidth.get_yscale()) == ("log", "linear")
    times, bandwidths = lines_of(figures[0])
    assert times == {
        "ringcoll": ([1 << 10, 1 << 20], [1e6, 2e6]),
        "mpi": ([1 << 10, 1 << 20], [3e6, 4e6]),
    }
    assert bandwidths["mpi"] == ([1 << 10, 1 << 20], [1.0, 1.0])
    figures[0].draw_without_rendering()
    sizes = [tick.get_text() for tick in latency.get_xticklabels()]
    assert sizes[0] == "1 KiB"
    assert sizes[-1] == "1 MiB"


def test_a_library_has_one_line_though_its_algorithm_changes(figures, tmp_path):
    rows = [row("ringcoll", 64, 1.0, algorithm="one_shot"), row("ringcoll", 128, 2.0)]
    draw_rows(rows, tmp_path / "rows.png")
    assert list(lines_of(figures[0])[0]) == ["ringcoll"]


def test_algorithms_that_are_compared_have_a_line_each(figures, tmp_path):
    rows = [row("ringcoll", 64, 1.0, algorithm=name) for name in ("ring", "tree")]
    draw_rows(rows, tmp_path / "rows.png")
    assert list(lines_of(figures[0])[0]) == ["ringcoll ring", "ringcoll tree"]


def test_the_side_that_most_libraries_have(figures, tmp_path):
    rows = [row("ringcoll", 64, 1.0), row("ringcoll", 64, 2.0, in_place=True)]
    rows += [row("nccl", 64, 3.0, in_place=True), row("torch", 64, 4.0, in_place=True)]
    rows += [row("mpi", 64, 5.0)]
    draw_rows(rows, tmp_path / "rows.png")
    times = lines_of(figures[0])[0]
    assert {label: ys for label, (_, ys) in times.items()} == {
        "ringcoll": [2e6],
        "nccl": [3e6],
        "torch": [4e6],
        "mpi, out of place": [5e6],
    }


def test_a_prediction_is_dashed(figures, tmp_path):
    draw_rows([row("ringcoll", 64, 1.0, predicted_us=9e5)], tmp_path / "rows.png")
    assert lines_of(figures[0])[0]["ringcoll, predicted"] == ([64], [9e5])


def test_no_word_of_a_row_is_a_formula_or_hides_its_line(figures, tmp_path):
    rows = [row("_$x^{$ $", 64, 1.0), row("ringcoll", 64, 2.0)]
    draw_rows(rows, tmp_path / "rows.png", title="$\\frac{$")
    assert [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()] == [
        r" _\$x^{\$ \$",
        "ringcoll",
    ]


def test_a_chain_is_drawn_with_its_residuals(figures, tmp_path):
    assert draw("model_gpu", tmp_path) is not None
    found = record("gpu_timing_model_4_of_12_blocks")["rows"]
    residuals = lines_of(figures[0])[1]
    off = [100 * point["off"] for point in found if point["ranks"] == 2]
    assert next(iter(residuals.values()))[1] == pytest.approx(off)


def test_records_are_drawn_in_the_same_way(figures, tmp_path):
    assert draw("collectives_cpu", tmp_path) is None
    path = draw("all_reduce_2_gpus", tmp_path)
    assert path is not None
    times, bandwidths = lines_of(figures[0])
    *peers, by_hand = (name for lib, name in LIBRARIES.items() if lib != "mpi")
    assert list(times) == [*peers, f"{by_hand}, out of place"]
    mine = all_reduce(record("gpu_bars_2"))["ringcoll"]
    assert dict(zip(*times["ringcoll"], strict=True)) == mine
    # busbw of two ranks is algbw.
    most = max(mine)
    assert bandwidths["ringcoll"][1][-1] == pytest.approx(most / mine[most] / 1e3)
    date, gpus = record("gpu_bars_2")["date"][:10], record("gpu_bars_2")["machine"]["gpus"]
    assert figures[0].get_suptitle().startswith(f"all_reduce on {gpus}, {date}: ")
    once = path.read_bytes()
    draw("all_reduce_2_gpus", tmp_path)
    assert path.read_bytes() == once
