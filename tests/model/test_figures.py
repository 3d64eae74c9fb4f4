"""Measured figures: what keeps them, what takes them up, what is not believed."""

from __future__ import annotations

import json
import math
import os
import platform
from pathlib import Path

import pytest

from ringcoll.cli import main
from ringcoll.errors import ArgumentError
from ringcoll.model.closed_form import chain_time
from ringcoll.model.figures import keep_figures, measured_figures, read_figures

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FIT = {"bandwidth": 360e9, "alpha": 4e-6, "latency": 2e-5}
EARLY, LATE = "2026-11-21T03:12:47+00:00", "2026-11-21T08:12:47+00:00"


def run(capsys, words):
    status = main(words.split())
    printed = capsys.readouterr()
    return status, printed.out, printed.err


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGCOLL_CACHE_DIR", str(tmp_path / "mine"))
    return str(tmp_path / "mine")


def test_the_newest_of_this_machine_is_taken(folder):
    keep_figures("cpu", {**FIT, "bandwidth": 1e9}, date=EARLY, cache_dir=folder)
    path = keep_figures("gpu", FIT, date=LATE, cache_dir=folder)
    assert path is not None and platform.node() in path.name
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    found = measured_figures(folder)
    assert (found.bandwidth, found.alpha, found.latency) == (360e9, 4e-6, 2e-5)
    assert (found.date, found.source) == (LATE, str(path))
    # A machine that shares the folder has figures of its own.
    other = json.loads(path.read_text()) | {"host": "another", "date": "2027-01-01T00:00:00+00:00"}
    (path.parent / "another-gpu.json").write_text(json.dumps(other))
    assert measured_figures(folder).date == LATE
    keep_figures("cpu", {**FIT, "bandwidth": 2e9}, date=LATE + "z", cache_dir=folder)
    assert measured_figures(folder).bandwidth == 2e9


def test_what_cannot_be_trusted_is_left_out(folder, caplog):
    path = keep_figures("gpu", FIT, date=LATE, cache_dir=folder)
    assert path is not None
    path.chmod(0o666)
    with pytest.raises(ArgumentError, match=r"no figures .*benchmarks\.gpu\.timing_model"):
        measured_figures(folder)
    assert "others may write" in caplog.text
    path.chmod(0o600)
    for broken in (b"[" * 100_000, b"\xff", b"{}", path.read_bytes() + b" " * (1 << 20)):
        path.with_name("broken.json").write_bytes(broken)
        assert measured_figures(folder).bandwidth == 360e9
    path.with_name("link.json").symlink_to(path)
    os.mkfifo(path.with_name("pipe.json"))
    assert measured_figures(folder).source == str(path)


@pytest.mark.parametrize(
    "fit",
    [
        None,
        [],
        {},
        {"bandwidth": 1e9},
        {"bandwidth": "1e9", "alpha": 0},
        {"bandwidth": True, "alpha": 0},
        {"bandwidth": 0, "alpha": 0},
        {"bandwidth": math.inf, "alpha": 0},
        {"bandwidth": math.nan, "alpha": 0},
        {"bandwidth": 10**400, "alpha": 0},
        {"bandwidth": 1e9, "alpha": -1},
        {"bandwidth": 1e9, "alpha": 0, "latency": None},
        {"memory_bandwidth": 1e9, "alpha": 0},
    ],
)
def test_no_figures_are_no_figures(tmp_path, fit):
    path = tmp_path / "f.json"
    path.write_text(json.dumps({"date": LATE, "fit": fit}))
    with pytest.raises(ArgumentError, match=r"f\.json"):
        read_figures(str(path))


def test_the_recorded_results_can_be_named():
    paced = read_figures(str(RESULTS / "timing_model_paced.json"))
    assert paced.topology == "switch" and paced.bandwidth > 1e8
    free = read_figures(str(RESULTS / "timing_model_free.json"))
    assert free.topology == "memory" and free.local_bandwidth < free.bandwidth
    with pytest.raises(ArgumentError, match="it has no fit"):
        read_figures(str(RESULTS / "gpu_bars_4.json"))
    with pytest.raises(ArgumentError, match="No such file"):
        read_figures(str(RESULTS / "none.json"))


WORDS = "model broadcast --algorithm chain --ranks 4 --bytes 512M --slices 16 --window 99"


def test_the_model_takes_what_was_measured(folder, capsys, tmp_path):
    path = keep_figures("gpu", FIT, date=LATE, cache_dir=folder)
    status, out, _ = run(capsys, f"{WORDS} --bandwidth measured")
    assert status == 0
    assert "B = 360 GB/s, alpha = 4 us, L = 20 us" in out
    assert f"measured {LATE}, {path}" in out
    status, out, _ = run(capsys, f"{WORDS} --bandwidth measured --json -")
    (point,) = json.loads(out)["points"]
    assert point["seconds"] == pytest.approx(chain_time(4, 512 << 20, 16, 360e9, 4e-6, 2e-5))
    # What is given goes before what was measured.
    status, out, _ = run(capsys, f"{WORDS} --bandwidth measured --alpha 1us --links pairs")
    assert "pairs of B = 360 GB/s, alpha = 1 us, L = 20 us" in out
    named = tmp_path / "named.json"
    named.write_text(json.dumps({"date": EARLY, "fit": {**FIT, "bandwidth": 2e9}}))
    for words in ("--figures", "--bandwidth measured --figures"):
        status, out, _ = run(capsys, f"{WORDS} {words} {named}")
        assert status == 0 and "B = 2 GB/s" in out
    status, out, _ = run(capsys, f"explain broadcast --bandwidth measured --figures {named}")
    assert status == 0 and "B = 2 GB/s" in out


def test_without_a_measurement_the_command_that_makes_one_is_named(folder, capsys):
    status, out, err = run(capsys, f"{WORDS} --bandwidth measured")
    assert status == 2 and out == ""
    assert "python -m benchmarks.gpu.timing_model" in err and "--figures FILE" in err
    status, _, err = run(capsys, f"{WORDS} --bandwidth 5G --figures x.json")
    assert status == 2 and "leave one of them out" in err
    status, _, err = run(capsys, f"{WORDS} --figures {RESULTS}/none.json")
    assert status == 2 and "No such file" in err


def test_no_home_is_no_error_until_figures_are_asked_for(monkeypatch, caplog):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", _none)
    assert keep_figures("gpu", FIT, date=LATE) is None
    with pytest.raises(ArgumentError, match="no home"):
        measured_figures()


def _none():
    raise RuntimeError


def test_a_folder_that_cannot_be_written_is_logged(tmp_path, caplog):
    (tmp_path / "figures").write_text("")
    assert keep_figures("gpu", FIT, date=LATE, cache_dir=str(tmp_path)) is None
    assert "not kept" in caplog.text
