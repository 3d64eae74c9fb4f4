"""The timing model's measurement, small: every point is there and right, whatever its time."""

from __future__ import annotations

import json

import pytest

from benchmarks.gpu.timing_model import main

WORDS = ["--bytes", "1M", "--slices", "1,2,8,64", "--seconds", "60"]


def points(tmp_path, monkeypatch, name, *words):
    monkeypatch.setenv("RINGCOLL_CACHE_DIR", str(tmp_path / "cache"))
    assert main([*words, *WORDS, "--out", str(tmp_path)]) in (0, 1)  # by how well the model does
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert found["errors"] == {} and found["wrong"] == 0
    assert [row["slices"] for row in found["rows"]] == [1, 2, 8, 64] * (len(found["rows"]) // 4)
    assert all(row["seconds"] > 0 for row in found["rows"])
    return found


@pytest.mark.gpu
def test_ranks_on_one_gpu(tmp_path, monkeypatch):
    found = points(tmp_path, monkeypatch, "gpu_timing_model_one_gpu_3", "--one-gpu", "3")
    assert [row["ranks"] for row in found["rows"]] == [2] * 4 + [3] * 4
    assert "inside the memory of one GPU" in found["title"]
    assert not (tmp_path / "cache" / "figures").exists()  # these are no links between GPUs


@pytest.mark.multi_gpu
def test_a_gpu_for_each_rank(tmp_path, monkeypatch):
    found = points(tmp_path, monkeypatch, "gpu_timing_model_2", "--ranks", "2")
    assert [row["ranks"] for row in found["rows"]] == [2] * 4
    assert (tmp_path / "cache" / "figures").exists() == (found["fit"] is not None)


@pytest.mark.gpu
def test_what_an_engine_refuses_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGCOLL_CACHE_DIR", str(tmp_path / "cache"))
    words = ["--one-gpu", "2", "--engine", "host", *WORDS, "--out", str(tmp_path)]
    assert main(words) == 1
    found = json.loads((tmp_path / "gpu_timing_model_one_gpu_2_host.json").read_text())
    assert len(found["rows"]) == 1 and "engine='host'" in found["rows"][0]["refused"]
