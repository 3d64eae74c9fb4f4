"""The compiled parts are built where they can be, and anew when one of their files has changed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from ringcoll.executors.cpu import small_calls
from ringcoll.executors.cuda import launches

ROOT = Path(__file__).parents[2]
COMPILER = any(map(shutil.which, ("gcc", "clang", "cc")))
HEADERS = Path(sysconfig.get_path("include"), "Python.h").exists()
can_build = pytest.mark.skipif(not (COMPILER and HEADERS), reason="no C compiler, or no Python.h")


PARTS: dict[str, Any] = {"cpu/_small_calls": small_calls, "cuda/_launches": launches}


@can_build
def test_the_parts_are_there_where_they_can_be_built():
    missing = "run scripts/test, or pip install -e ."
    assert small_calls._small_calls is not None and launches._launches is not None, missing


@pytest.mark.slow
@can_build
def test_a_header_that_has_changed_is_compiled(tmp_path):
    pytest.importorskip("hatchling", reason="the group test of pyproject.toml has it")
    executors = tmp_path / "ringcoll" / "executors"
    for folder in ("native", "cpu/native", "cuda/native"):
        shutil.copytree(ROOT / "ringcoll" / "executors" / folder, executors / folder)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "build_hook.py", tmp_path / "scripts")
    interfaces = {name: part._INTERFACE for name, part in PARTS.items()}
    assert built(tmp_path) == interfaces
    for name in PARTS:
        header = executors / Path(name).parent / "native" / "types.h"
        text = header.read_text()
        header.write_text(text.replace("#define INTERFACE ", "#define INTERFACE 1000 + "))
        assert built(tmp_path) == {name: 1000 + interfaces[name]}
    assert built(tmp_path) == {}, "nothing has changed"
    (executors / "native" / "same.h").touch()
    assert {*built(tmp_path)} == {*PARTS}


def built(checkout: Path) -> dict[str, int]:
    """The parts that a build makes in a checkout, and their interfaces."""
    code = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location(*sys.argv[1:])\n"
        "print(importlib.util.module_from_spec(spec).INTERFACE)"
    )
    command = [sys.executable, str(checkout / "scripts" / "build_hook.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    found = {}
    for place in map(Path, done.stdout.splitlines()):
        if place.suffix == ".so" and place.exists():  # the compiler's commands stand between
            name = place.name.partition(".")[0]
            said = subprocess.run(
                [sys.executable, "-c", code, name, place],
                capture_output=True,
                text=True,
                check=True,
            )
            found[f"{place.parent.name}/{name}"] = int(said.stdout)
    return found
