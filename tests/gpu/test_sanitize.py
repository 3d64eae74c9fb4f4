"""scripts/sanitize-gpu, with a compute-sanitizer that says what it is told to."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.dtypes import dtype_of, op_of
from ringcoll.launch import ALL_MAPPED
from tests.communicator.cases import SHAPES
from tests.gpu import sanitize
from tests.gpu.sanitized import parts
from tests.kernels.chosen import chosen

CLEAN = "echo 'ringcoll: 10 calls made'; echo '========= ERROR SUMMARY: 0 errors'"
RACES = "echo 'ringcoll: 10 calls made'; echo '========= RACECHECK SUMMARY: {} displayed'"


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """The exit status and the output of a run with the given compute-sanitizer."""

    def run(body, *tools):
        path = tmp_path / "compute-sanitizer"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setattr(sanitize, "has_device", lambda: True)
        status = sanitize.main(tools)
        return status, capsys.readouterr().out

    return run


def verdicts(out):
    rows = out.partition("verdict\n")[2].partition("\n\n")[0].splitlines()
    return {(row[:10].strip(), row[11:27].strip()): row[52:] for row in rows}


def test_nothing_is_found(said):
    status, out = said(CLEAN)
    assert status == 0
    assert verdicts(out) == {(t, p): "clean" for t in sanitize.TOOLS for p in parts()}
    assert "racecheck watches shared memory alone" in out


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        (
            "echo '========= Invalid write'; echo '========= ERROR SUMMARY: 3 errors'; exit 77",
            "FOUND",
        ),
        (RACES.format("2 hazards"), "FOUND"),
        (RACES.format("0 hazards") + "; exit 1", "FAILED (1)"),
        ("echo '========= ERROR SUMMARY: 0 errors'", "FAILED (0)"),
        ("echo 'ringcoll: 10 calls made'", "FAILED (0)"),
    ],
)
def test_whatever_is_not_clean_fails(said, body, verdict):
    status, out = said(body, "racecheck")
    assert status == 1
    assert set(verdicts(out).values()) == {verdict}
    assert "ring of 8:\n" in out


def test_every_tool_watches_every_part(said, tmp_path):
    log = tmp_path / "log"
    said(f'echo "$@" >>{log}; {CLEAN}', "synccheck")
    lines = log.read_text().splitlines()
    assert [line.partition("sanitized ")[2] for line in lines] == list(parts())
    assert all("--tool synccheck --error-exitcode 77 " in line for line in lines)
    assert all(f"{sys.executable} -m tests.gpu.sanitized" in line for line in lines)


def test_what_is_missing_is_said(said, monkeypatch, capsys):
    assert said(CLEAN, "memchecks")[0] == 2
    monkeypatch.setattr(sanitize, "has_device", lambda: False)
    assert sanitize.main([]) == 5
    assert "no GPU" in capsys.readouterr().out
    monkeypatch.setattr(sanitize, "sanitizer", lambda: None)
    assert sanitize.main([]) == 5
    assert "no GPU" in capsys.readouterr().out
    monkeypatch.setattr(sanitize, "has_device", lambda: True)
    assert sanitize.main([]) == 5
    assert "pip install" in capsys.readouterr().out


def test_the_wheel_has_one_too(tmp_path, monkeypatch):
    found = tmp_path / "nvidia" / "cu13" / "bin" / "compute-sanitizer"
    found.parent.mkdir(parents=True)
    found.write_text("#!/bin/sh\n")
    found.chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sanitize, "TOOLKIT", tmp_path)
    assert sanitize.sanitizer() is None
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
    assert sanitize.sanitizer() == str(found)


def test_the_calls_can_be_made():
    """None of them is refused, and every collective is among them by every protocol."""
    seen = set()
    for nranks, cases in parts().values():
        for case in cases:
            row, kind = dtype_of(case.dtype), COLLECTIVES[case.collective]
            wide = nranks if "n" in SHAPES[case.collective] else 1
            nbytes = case.count * row.itemsize * wide
            op = op_of(case.op) if kind.reduces else None
            call = Call(
                case.collective, 0, None, None, case.count, row, op, root=case.root, nbytes=nbytes
            )
            names = ("algorithm", "protocol", "slices")
            options: dict[str, Any] = {name: case.options.get(name) for name in names}
            mapped = ALL_MAPPED if case.symmetric else frozenset()
            found = chosen(call, nranks, 16, mapped=mapped, **options)
            seen.add((case.collective, found.launch.protocol))
    assert seen == {(name, how) for name in SHAPES for how in ("LL", "LL128", "Simple")}
