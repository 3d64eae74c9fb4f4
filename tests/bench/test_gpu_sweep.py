"""What the sweeps beside peers call and print; the times themselves need GPUs."""

from __future__ import annotations

import pytest

from benchmarks import peers
from benchmarks.gpu import bars
from ringcoll.errors import ArgumentError


def test_sizes_are_a_list_or_a_sweep():
    assert bars.sweep("256:64K:4") == (256, 1024, 4096, 16384, 65536)
    assert bars.sweep("1K:3K:2") == (1024, 2048, 3072)
    assert bars.sweep("8:8") == (8,)
    assert bars.sweep("4K,1M") == (4096, 1 << 20)
    for wrong in ("2K:1K", "0:1K", "1K:2K:1", "x"):
        with pytest.raises(ArgumentError):
            bars.sweep(wrong)


def test_the_bars_have_sizes_of_their_own():
    usual = list(bars.wanted_calls("", ""))
    assert usual[:1] == [("all_reduce", 256)]
    assert len(usual) == len(bars.ALL_REDUCE) + len(bars.COLLECTIVES) * len(bars.OTHERS)
    assert list(bars.wanted_calls("reduce,all_reduce", "1K,2K")) == [
        ("reduce", 1024),
        ("reduce", 2048),
        ("all_reduce", 1024),
        ("all_reduce", 2048),
    ]


def test_what_cannot_be_swept_is_refused_before_anything_starts(capsys):
    for words, said in (
        (["--sizes", "x"], "size 'x'"),
        (["--collectives", "allreduce"], "no such"),
    ):
        with pytest.raises(SystemExit):
            bars.main(words)
        assert said in capsys.readouterr().err


def test_a_sweep_is_one_of_the_bars_with_eager_calls(monkeypatch, tmp_path, capsys):
    given: list = []

    def run(words):
        given.extend(words)
        (tmp_path / "peers_2.json").write_text('{"rows": []}')
        return 0

    monkeypatch.setattr(bars, "main", run)
    monkeypatch.setattr(peers, "require", lambda parser, **needs: 2)
    assert peers.main(["--ranks", "2", "--sizes", "256:1K", "--out", str(tmp_path)]) == 0
    assert given[:6] == ["--ranks", "2", "--sizes", "256:1K", "--collectives", "all_reduce"]
    assert "--eager" in given and given[-4:] == ["--name", "peers", "--out", str(tmp_path)]
    assert "peers_2.json" in capsys.readouterr().out


def test_the_table_has_a_column_for_each_library():
    ours = {"lib": "ringcoll", "collective": "all_reduce", "bytes": 256, "wrong": 0}
    rows = [
        {**ours, "in_place": False, "us": 3.0, "host_us": 5.5, "device_us": 5.25},
        {**ours, "in_place": True, "us": 2.5, "host_us": 5.0, "device_us": 5.0},
        {"lib": "nccl", "collective": "all_reduce", "bytes": 256, "in_place": True, "us": 9.0},
        {"lib": "nccl", "collective": "all_reduce", "bytes": 1024, "us": None, "why": "no"},
        {
            **ours,
            "bytes": 4096,
            "collective": "all_gather",
            "in_place": False,
            "us": 4.0,
            "wrong": 2,
        },
    ]
    text = peers.table(rows)
    lines = text.splitlines()
    assert lines[2].split() == ["bytes", "ringcoll", "ringcoll,", "in", "place", "nccl"]
    cells = "256 3.0 / 5.5 / 5.2 2.5 / 5.0 / 5.0 9.0 / - / -"
    assert " ".join(lines[3].split()) == cells
    assert lines[4].split() == ["1K", "-", "-", "-"]
    assert "all_gather" in text and lines[-1] == "wrong elements: 2"
