"""Rows, table and picture of the benchmark of training; torch is not needed for them."""

from __future__ import annotations

import pytest

from benchmarks.models.figures import ALONE, compare, repeated, rows_of, table, write_curves

CASES = [("resnet50", 4), ("gpt", 2)]
WAYS = ["peer", "ringcoll"]
UNITS = {"resnet50": ("images", 1), "gpt": ("tokens", 10)}


def said(ranks, seconds, curve, case=0, digests=None):
    """Messages of one case: two rounds, in the first of which rank 0 is twice as slow."""
    for way in WAYS:
        digest = digests or ["same"] * ranks
        yield {"case": case, "way": way, "curve": curve[way], "digest": digest}
    for factor in (2.0, 1.0, 1.0):
        for way in (*WAYS, ALONE):
            times = [seconds[way] * factor, *[seconds[way]] * (ranks - 1)]
            yield {"case": case, "way": way, "seconds": times}


def both():
    curve = {"peer": [4.0, 2.0], "ringcoll": [4.0, 2.5]}
    one = list(said(1, {"peer": 1.0, "ringcoll": 1.0, ALONE: 1.0}, curve))
    two = list(said(2, {"peer": 2.0, "ringcoll": 1.25, ALONE: 1.0}, curve))
    rows = rows_of(CASES, WAYS, 1, UNITS, one) + rows_of(CASES, WAYS, 2, UNITS, two)
    compare(rows, "peer")
    return rows


def test_rows():
    rows = both()
    assert [(row["model"], row["way"], row["ranks"]) for row in rows] == [
        ("resnet50", way, ranks) for ranks in (1, 2) for way in WAYS
    ]  # of gpt nothing was heard
    last = rows[-1]
    assert (last["step_ms"], last["step_ms_min"], last["step_ms_max"]) == (1250, 1250, 2500)
    assert last["not_hidden"] == pytest.approx(0.2)
    assert last["per_second"] == 6.4
    assert last["efficiency"] == 0.8
    assert last["of_peer"] == 0.625
    assert last["rounds_ms"] == [2500, 1250, 1250] and last["of_peer_error"] == 0
    assert last["loss_differs"] == 0.125
    assert last["replicas_equal"]


def test_rounds_are_compared_with_the_peers_own():
    """A host that is slow for a while delays both ways; only what differs in a round counts."""
    curve = {way: [1.0] for way in WAYS}
    heard = list(said(2, {"peer": 1.0, "ringcoll": 1.0, ALONE: 1.0}, curve))[:2]
    for peer, ours in ((1.0, 1.1), (3.0, 3.6), (2.0, 2.2), (4.0, 3.6)):
        for way, seconds in (("peer", peer), ("ringcoll", ours), (ALONE, 1.0)):
            heard.append({"case": 0, "way": way, "seconds": [seconds, 0.5]})
    rows = rows_of(CASES, WAYS, 2, UNITS, heard)
    compare(rows, "peer")
    assert rows[1]["of_peer"] == 1.1  # the medians of both are 2.9 and 2.5
    assert 0.03 < rows[1]["of_peer_error"] < 0.2
    assert "1.100" in table(rows)


def test_tokens_are_counted_and_replicas_that_differ_are_shown():
    curve = {way: [1.0] for way in WAYS}
    seconds = {"peer": 0.5, "ringcoll": 0.5, ALONE: 0.5}
    rows = rows_of(CASES, WAYS, 2, UNITS, list(said(2, seconds, curve, 1, ["one", "other"])))
    assert {row["per_second"] for row in rows} == {80.0}
    shown = table(rows).splitlines()
    assert len(shown) == 3
    assert all(line.endswith("REPLICAS DIFFER") for line in shown[1:])
    assert "80 tokens" in shown[1]


def test_runs_are_equal_only_if_all_of_them_came_and_are():
    def message(way, bucket, *digests):
        return {"case": 0, "way": way, "bucket": bucket, "curve": [1.0], "digest": list(digests)}

    runs = [message("peer", 25, "a", "a"), message("peer", 1, "a", "b")]
    runs += [message("ringcoll", 25, "c", "c"), message("ringcoll", 1, "c", "c")]
    rows = repeated(CASES[:1], WAYS, (25, 1), 2, runs)
    assert [row["equal"] for row in rows] == [False, True]
    assert [row["equal"] for row in repeated(CASES[:1], WAYS, (25, 1), 2, runs[:3])] == [False] * 2
    assert "equal to the bit" in table(rows).splitlines()[1]


def test_losses_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "curves.png"
    write_curves(both(), path)
    assert path.read_bytes().startswith(b"\x89PNG")
