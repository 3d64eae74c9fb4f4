"""What is kept of compiled kernels serves the same sources and compiler alone, and stays small."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ringcoll.algorithms import build
from tests.kernels import stand_in
from tests.kernels.apart import run_apart
from tests.kernels.cases import STAGED, Case
from tests.kernels.stand_in import CPU, KERNELS, forget, needs_compiler


@needs_compiler
def test_a_kernel_is_named_by_all_that_it_is_made_of(tmp_path: Path) -> None:
    def name(folder: Path, text: str = "int x;", *flags: str) -> str:
        return stand_in._name(text, stand_in.includes(folder), flags)

    whole, changed, on_cpu = (tmp_path / part for part in ("whole", "changed", "on_cpu"))
    for folder in (whole, changed, on_cpu):
        shutil.copytree(KERNELS, folder)
        shutil.copytree(CPU, folder / "cpu")
    for path in (changed / "ll.cuh", on_cpu / "cpu" / "threads.hpp"):
        path.write_text(path.read_text() + "// another\n")
    assert name(whole) == name(KERNELS)  # wherever they lie
    others = [name(changed), name(on_cpu), name(whole, "int y;"), name(whole, "int x;", "-O1")]
    assert len({name(whole), *others}) == 5


def test_what_was_used_last_is_kept(tmp_path: Path) -> None:
    for age, letter in enumerate("abcd"):
        path = tmp_path / letter
        path.write_bytes(bytes(100))
        os.utime(path, (1e9 - age, 1e9 - age))
    forget(tmp_path, room=250)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


@needs_compiler
def test_a_compiler_that_checks_jumps_is_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ubuntu's defines the macro by itself; fibers jump from stack to stack."""
    words = (*(stand_in.compiler() or ()), "-D_FORTIFY_SOURCE=2")
    monkeypatch.setattr(stand_in, "compiler", lambda: words)
    monkeypatch.setattr(stand_in, "folder", lambda: tmp_path)
    outcome = run_apart(Case(build("all_reduce", "ring", 3), STAGED, 77), tmp_path)
    assert (outcome.verdict(), outcome.said) == ("right", "")
