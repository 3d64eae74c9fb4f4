"""``ringcoll topo`` on the machine at hand."""

from __future__ import annotations

import json
import re

import pytest

from ringcoll.cli import main


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("RINGCOLL_CACHE_DIR", str(tmp_path))


def run(capsys, *words):
    assert main(["topo", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.gpu
def test_this_machine_is_printed_and_drawn(capsys, tmp_path):
    from cupy.cuda import runtime

    picture, document = tmp_path / "here.svg", tmp_path / "here.xml"
    out = run(capsys, "--picture", str(picture), "--xml", str(document))
    assert re.search(r"^GPU0 +X ", out, re.MULTILINE), out
    assert "GPU0" in picture.read_text(encoding="utf-8")
    found = json.loads(run(capsys, "--file", str(document), "--json", "-"))
    assert found == json.loads(run(capsys, "--json", "-"))
    assert len(found["gpus"]) >= runtime.getDeviceCount()


@pytest.mark.multi_gpu
def test_measured_rings_join_all_gpus(capsys):
    known = json.loads(run(capsys, "--json", "-"))
    measured = json.loads(run(capsys, "--measure", "--json", "-"))
    assert measured["gpus"] == known["gpus"]
    for found in (known, measured):
        count = len(found["gpus"])
        assert found["rings"] and found["total_bandwidth"] > 0
        assert all(sorted(ring["order"]) == list(range(count)) for ring in found["rings"])
