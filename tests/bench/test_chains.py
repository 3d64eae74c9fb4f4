"""The timing model's measurement on GPUs: everything of it that needs no GPU."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ringcoll
from benchmarks.chains import draw, halves, judged, rows_of
from benchmarks.gpu.chain import Setup, measure, measure_all, share_out
from benchmarks.gpu.report import Report
from benchmarks.gpu.timing_model import Series, main
from ringcoll.bootstrap import SingleBootstrap
from ringcoll.fabric import each
from ringcoll.model.closed_form import Point, chain_time
from ringcoll.model.figures import read_figures

N = 512 << 20
SLICES = tuple(1 << power for power in range(9))
FIGURES = 360e9, 4e-6, 20e-6


def points(figures=FIGURES, ranks=(2, 3, 4), slices=SLICES):
    return [Point(k, N, s, chain_time(k, N, s, *figures)) for k in ranks for s in slices]


def test_every_second_number_of_slices_is_judged_by_the_others():
    seen, rest = halves(points(), SLICES)
    assert {p.slices for p in seen} == {1, 4, 16, 64, 256}
    assert {p.slices for p in rest} == {2, 8, 32, 128}
    fit, words = judged(points(), SLICES)
    assert fit is not None
    assert (fit.bandwidth, fit.alpha, fit.latency) == pytest.approx(FIGURES, rel=1e-6)
    assert words["judged"] == 12 and words["near"] == 1.0 and words["met"]
    assert words["worst"] < 1e-9
    assert {one["longer"] for one in words["best_slices"].values()} == {0.0}


def test_what_does_not_follow_the_formula_is_told():
    far = [replace(p, seconds=p.seconds * (2 if p.slices == 8 else 1)) for p in points()]
    _, words = judged(far, SLICES)
    assert words["near"] == 0.75 and words["worst"] == pytest.approx(1.0, abs=0.1)
    assert not words["met"]
    # The formula's best S of 4 ranks is 16 or 32: it must show if that is slow.
    slow = [replace(p, seconds=p.seconds * (1.09 if p.slices >= 16 else 1)) for p in points()]
    _, words = judged(slow, SLICES)
    assert any(one["longer"] > 0.05 and not one["met"] for one in words["best_slices"].values())
    assert not words["met"]


def test_one_length_of_chain_tells_no_latency():
    fit, _ = judged(points(ranks=(2,)), SLICES)
    assert fit is not None
    assert fit.latency == 0.0
    assert fit.seconds(2, N, 8) == pytest.approx(chain_time(2, N, 8, *FIGURES), rel=1e-3)


def test_too_few_points_fit_nothing():
    fit, words = judged(points(ranks=(2,), slices=(1, 2)), SLICES)
    assert fit is None and "needs two" in words["why"]
    assert "model" not in rows_of(points(), SLICES, None)[0]


def test_the_time_is_shared_by_all_lengths():
    now = iter((0.0, 30.0, 90.0, 200.0))
    assert list(share_out(5, 120.0, lambda: next(now))) == [
        (2, 30.0),
        (3, 60.0),
        (4, 105.0),
        (5, 200.0),  # too late: nothing begins any more
    ]


class Fake:
    """A watch of CPU ranks that says a second."""

    def active(self):
        return contextlib.nullcontext()

    def repeated(self, call):
        return call

    def seconds(self, repeat):
        repeat()
        return 1.0


@pytest.fixture
def members():
    comms: list[Any] = list(ringcoll.init_all(3, device="cpu"))

    def empty(comm: Any) -> Any:
        return comm.empty(1000, "uint32")

    yield list(zip(comms, each(comms, empty), strict=True))
    for comm in comms:
        with contextlib.suppress(ringcoll.Error):
            comm.close()


def setup(**changes):
    return replace(Setup(3, 4000, (1, 4), "host", float("inf"), ""), **changes)


def test_a_point_is_timed_and_checked(members):
    point = measure(members, 3, 4, setup(), Fake(), SingleBootstrap())
    assert point == {"ranks": 3, "slices": 4, "bytes": 4000, "seconds": 1.0, "wrong": 0}
    assert len({bytes(array) for _, array in members}) == 1


def test_wrong_elements_are_counted(members):
    class Broken(Fake):
        def repeated(self, call):
            def repeat():
                call()
                members[2][1][::100] += np.uint32(1)

            return repeat

    assert measure(members, 3, 1, setup(), Broken(), SingleBootstrap())["wrong"] == 10


def test_who_is_outside_of_the_chain_only_meets():
    point = measure([], 2, 8, setup(), Fake(), SingleBootstrap())
    assert point["wrong"] == 0 and point["slices"] == 8


def test_what_is_refused_is_recorded_and_the_rest_goes_on(members):
    worlds = iter([(3, float("inf"), members), (4, float("inf"), []), (5, 0.0, members)])
    sent: list = []
    measure_all(worlds, setup(engine="sm"), Fake(), SingleBootstrap(), sent.append)
    assert [(p["ranks"], p["slices"], "refused" in p) for p in sent] == [
        (3, 1, True),
        (4, 1, False),
        (4, 4, False),
    ]
    assert "engine='sm'" in sent[0]["refused"]


def test_the_file_is_whole_after_every_point(tmp_path, capsys):
    path = tmp_path / "f.json"
    report, series = Report(path, "timing_model"), Series(SLICES, "a title")
    for key, value in (("title", "a title"), ("given", {"slices": SLICES})):
        report.note(key, value)
    series.add({"ranks": 5, "slices": 2, "bytes": N, "refused": "no"}, report)
    for number, p in enumerate(points(), 2):
        said = {"ranks": p.nranks, "bytes": N, "slices": p.slices, "seconds": p.seconds}
        series.add({**said, "wrong": 0}, report)
        assert len(json.loads(path.read_text())["rows"]) == number
    found = json.loads(path.read_text())
    assert found["met"] and "why" not in found and found["points"] == number - 1
    assert found["fit"]["bandwidth"] == pytest.approx(FIGURES[0])
    assert found["rows"][0] == {"ranks": 5, "slices": 2, "bytes": N, "refused": "no"}
    assert all(abs(row["off"]) < 1e-6 for row in found["rows"][1:])
    assert read_figures(str(path)).bandwidth == pytest.approx(FIGURES[0])
    pytest.importorskip("matplotlib")
    assert main(["--draw", str(path)]) == 0
    assert "B = 360.0 GB/s, o = 4 us, L = 20 us" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]
    assert main(["--draw", str(path), "--out", str(tmp_path / "drawn")]) == 0
    assert (tmp_path / "drawn" / "f.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_element_is_no_point(tmp_path):
    series = Series(SLICES, "a title")
    for p in points():
        said = {"ranks": p.nranks, "bytes": N, "slices": p.slices, "seconds": p.seconds}
        series.add({**said, "wrong": 3 * (p.slices == 8)}, Report(tmp_path / "f.json", "x"))
    _, words, rows = series.judge()
    assert words["wrong"] == 9 and not words["met"]
    assert [row["slices"] for row in rows if "model" not in row] == [8, 8, 8]


def test_a_picture_without_a_model(tmp_path):
    pytest.importorskip("matplotlib")
    draw(points(), None, "a title", tmp_path / "f.svg")
    assert "k = 4, model" not in (tmp_path / "f.svg").read_text()
