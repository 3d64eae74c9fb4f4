"""The compiled part is built where it can be, and anew when one of its files has changed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ringcoll.executors.cpu import small_calls

ROOT = Path(__file__).parents[2]
COMPILER = any(map(shutil.which, ("gcc", "clang", "cc")))
HEADERS = Path(sysconfig.get_path("include"), "Python.h").exists()
can_build = pytest.mark.skipif(not (COMPILER and HEADERS), reason="no C compiler, or no Python.h")


@can_build
def test_the_part_is_there_where_it_can_be_built():
    assert small_calls._small_calls is not None, "run scripts/test, or pip install -e ."


@pytest.mark.slow
@can_build
def test_a_header_that_has_changed_is_compiled(tmp_path):
    pytest.importorskip("hatchling", reason="the group test of pyproject.toml has it")
    native = tmp_path / "ringcoll" / "executors" / "cpu" / "native"
    shutil.copytree(ROOT / "ringcoll" / "executors" / "cpu" / "native", native)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "build_hook.py", tmp_path / "scripts")
    assert built(tmp_path) == small_calls._INTERFACE
    header = native / "types.h"
    text = header.read_text()
    header.write_text(text.replace("#define INTERFACE ", "#define INTERFACE 1000 + "))
    assert built(tmp_path) == 1000 + small_calls._INTERFACE
    assert build(tmp_path) == ""  # nothing has changed


def built(checkout: Path) -> int:
    """The interface of what a checkout has after a build."""
    place = Path(build(checkout).strip())
    code = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('_small_calls', sys.argv[1])\n"
        "print(importlib.util.module_from_spec(spec).INTERFACE)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, place], capture_output=True, text=True, check=True
    )
    return int(said.stdout)


def build(checkout: Path) -> str:
    """What the program says: the file that it has built, or nothing."""
    command = [sys.executable, str(checkout / "scripts" / "build_hook.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    return done.stdout.splitlines()[-1] if done.stdout else ""
