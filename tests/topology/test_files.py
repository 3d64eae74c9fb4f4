"""Files are read with bounds, and the one that holds is found as users of NCCL expect."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringcoll.errors import ArgumentError
from ringcoll.topology import document, files
from ringcoll.topology.build import build
from ringcoll.topology.presets import preset_document
from tests.topology.real import FILES, MACHINES


@pytest.mark.parametrize("name", FILES)
def test_load(name):
    found = files.load(MACHINES / name)
    assert found == build(files.load_document(MACHINES / name), title=name.removesuffix(".xml"))
    assert found.nodes


def test_write_and_load(tmp_path):
    root = preset_document("dgx1-v100")
    (tmp_path / "topo.xml").write_text(document.write(root), encoding="utf-8")
    assert files.load_document(str(tmp_path / "topo.xml")) == root


@pytest.mark.parametrize("path", ["/nowhere/at/all.xml", "/", "nul\0byte"])
def test_what_cannot_be_read_is_named(path):
    with pytest.raises(ArgumentError, match="cannot be read"):
        files.load(path)


def test_no_more_is_read_than_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(document, "MAX_BYTES", 1000)
    monkeypatch.setattr(files, "MAX_BYTES", 1000)
    with pytest.raises(ArgumentError, match=r"^/dev/zero: 1001 bytes; at most 1000"):
        files.load("/dev/zero")


def test_errors_name_the_file_and_the_line(tmp_path):
    path = tmp_path / "bad.xml"
    path.write_text('<system>\n<cpu numaid="zero"/>\n</system>')
    with pytest.raises(ArgumentError) as refused:
        files.load(path)
    assert str(refused.value) == f"{path}, line 2: <cpu>: numaid='zero' is not an integer"


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    made = {name: tmp_path / f"{name}.xml" for name in ("setting", "ours", "nccl", "provided")}
    for path in made.values():
        path.write_text("<system/>")
    return made


def test_which_file_holds(places):
    environ: dict[str, str] = {}
    provided = places["provided"]
    missing = provided.parent / "missing.xml"
    assert files.find_file(environ=environ, provided=missing) is None
    assert files.find_file(environ=environ, provided=provided) == provided
    environ["NCCL_TOPO_FILE"] = str(places["nccl"])
    assert files.find_file(environ=environ, provided=provided) == places["nccl"]
    environ["RINGCOLL_TOPO_FILE"] = str(places["ours"])
    assert files.find_file(environ=environ, provided=provided) == places["ours"]
    setting = str(places["setting"])
    assert files.find_file(setting, environ=environ, provided=provided) == places["setting"]


def test_files_that_are_named_and_not_there(places, caplog):
    provided = places["provided"]
    environ = {"NCCL_TOPO_FILE": "/nowhere.xml", "RINGCOLL_TOPO_FILE": ""}
    assert files.find_file(environ=environ, provided=provided) == provided
    assert "NCCL_TOPO_FILE='/nowhere.xml'" in caplog.text
    with pytest.raises(ArgumentError, match=r"^topo_file='/nowhere\.xml': there is no such file"):
        files.find_file("/nowhere.xml", environ=environ, provided=provided)
    environ["RINGCOLL_TOPO_FILE"] = "/nowhere.xml"
    with pytest.raises(ArgumentError, match=r"^RINGCOLL_TOPO_FILE="):
        files.find_file(environ=environ, provided=provided)


def test_a_pipe_is_not_waited_for(places, tmp_path, caplog):
    os.mkfifo(tmp_path / "pipe")
    environ = {"NCCL_TOPO_FILE": str(tmp_path / "pipe")}
    assert files.find_file(environ=environ, provided=places["provided"]) == places["provided"]
    assert "there is no such file" in caplog.text


def test_the_process_environment_is_the_default(places, monkeypatch):
    for name in list(os.environ):
        if name.endswith("TOPO_FILE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("RINGCOLL_TOPO_FILE", str(places["ours"]))
    assert files.find_file() == places["ours"]
