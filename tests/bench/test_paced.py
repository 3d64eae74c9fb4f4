"""What is printed of a prediction beside its measurement."""

from __future__ import annotations

import pytest

from ringcoll.bench.cases import Section
from ringcoll.bench.paced import Forecast, announce, forecast, measuring_seconds, roughly
from ringcoll.bench.settings import Settings
from ringcoll.bench.table import Result
from ringcoll.dtypes import dtype_of
from ringcoll.model.closed_form import Terms
from ringcoll.model.limits import Answer

ANSWER = Answer(4, 1, Terms(0.075, 0.0, 0.025, 0.0), 0.05, "every port")
RESULTS = [Result(False, 0.105), Result(True, 0.12)]


def test_lines_name_the_limits_and_what_costs_most():
    assert Forecast("ring", "switch", ANSWER).lines(RESULTS) == [
        "predicted over a switch: S = 1 takes 100 ms, 1.33 times its limit of 2(k-1)/k*N/B = "
        "75 ms, every port at full rate; N/B = 50 ms; most costs overhead (25%)",
        "measured +5.0 %, in place +20.0 %; 1.40 and 1.60 times the limit of ring, 2.10 and 2.40 "
        "times N/B",
    ]
    assert Forecast("ring", "switch", ANSWER).lines(RESULTS[1:])[1].startswith("measured +20.0 %;")


@pytest.mark.parametrize(("free", "warned"), [(0.0104, False), (0.0106, True)])
def test_cores_that_cannot_keep_up(free, warned):
    lines = Forecast("ring", "switch", ANSWER, free).lines(RESULTS)
    assert any("the cores cannot keep up" in line for line in lines) is warned
    if warned:
        assert "this call takes 10.6 ms, 10% of the paced time (4 ranks on" in lines[-1]


@pytest.mark.parametrize(("seconds", "warned"), [(0.109, False), (0.111, True)])
def test_ranks_that_wake_too_late(seconds, warned):
    lines = Forecast("ring", "pairs", ANSWER, 0.001).lines([Result(True, seconds)])
    assert lines[0].startswith("predicted over links of pairs: S = 1 takes 100 ms")
    assert any("the cores wake ranks too late" in line for line in lines) is warned


@pytest.mark.parametrize(
    ("algorithm", "links", "seconds"),
    [
        # 4 ranks, 1 MB, 1 MB/s: a piece takes 0.25 s, and α 0.1 s.
        ("ring", (), 6 * 0.35),
        ("two_shot", (), 6 * 0.35),
        ("two_shot", ("pairs",), 4 * 0.35),  # three pieces come side by side, then go one by one
        ("all_pairs", ("pairs",), 6 * 0.35),
    ],
)
def test_forecasts_are_those_of_the_model(algorithm, links, seconds):
    case = Section("all_reduce", 4, dtype_of("float32"), "sum").case(1_000_000)
    made = forecast(case, algorithm, (1e6, 0.1, *links))
    assert made is not None
    assert made.answer.seconds == pytest.approx(seconds)
    assert made.answer.wire == 1.0


def test_slow_links_say_first_how_long_a_table_takes():
    section = Section("all_reduce", 2, dtype_of("float32"), "sum")
    cases = [section.case(nbytes) for nbytes in (4000, 4_000_000)]

    def shares(pace, **settings):
        given = Settings(pace=pace, **settings)
        return [(case, measuring_seconds(case, "ring", given, 2)) for case in cases]

    # 40 s a call, out of place and in place: a first and a warm one, five blocks of one timed
    # call behind one that is not, and a check.
    found = shares((100.0, 0.0))
    assert [seconds for _, seconds in found] == [1040, 1_040_000]
    said = announce(found)
    assert said is not None
    assert "all_reduce takes about 12 days to measure over these links, 3.81 MiB alone 12" in said
    assert shares((100.0, 0.0), iterations=1, warmup=0, checks=0)[0][1] == 160
    assert announce(shares((1e9, 0.0))) is None
    assert [roughly(seconds) for seconds in (11.4, 119, 120, 7199, 7200)] == [
        *("11 s", "119 s", "2 minutes", "120 minutes", "2 hours")
    ]


@pytest.mark.parametrize(("collective", "nranks"), [("barrier", 4), ("sendrecv", 4), ("gather", 1)])
def test_nothing_is_forecast_where_no_plan_is_paced(collective, nranks):
    case = Section(collective, nranks, dtype_of("float32"), root=0).case(1_000)
    assert forecast(case, "one_shot", (1e6, 0.1)) is None
