"""What is kept of compiled kernels serves the same sources and compiler alone, and stays small."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.kernels import stand_in
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
