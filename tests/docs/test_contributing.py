"""CONTRIBUTING.md names files and what is in them: all of that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BEGIN, END = TEXT.index("## Where a change goes"), TEXT.index("## Style")
LINES = [
    re.sub(r"\s+", " ", item) for item in re.split(r"\n- |\n\n", TEXT[BEGIN:END]) if "`" in item
]
_CODE = re.compile(r"`([^`]+)`")
_PATH = re.compile(r"[\w./]*(?:/|\.py|\.cuh|\.md|\.txt)|scripts/\w+")
_NAME = re.compile(r"\w+")
GLOBAL = {"ringcoll", "tree", "split", "init", "f8e4m3", "Float8E4M3"}
"""Words of code that name nothing in the files beside them."""


def path_of(word: str) -> Path | None:
    """The file or folder that a word in code font means; None where it is no path."""
    if not _PATH.fullmatch(word):
        return None
    inside = ROOT / "ringcoll" / word
    return inside if inside.exists() else ROOT / word


def content(path: Path) -> str:
    files = sorted(path.rglob("*.*")) if path.is_dir() else [path]
    return "\n".join(
        f.read_text(encoding="utf-8") for f in files if f.suffix in (".py", ".cuh", ".md")
    )


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_files_and_names_exist(line):
    words = _CODE.findall(line)
    paths = [path for word in words if (path := path_of(word)) is not None]
    assert [str(path) for path in paths if not path.exists()] == []
    texts = "\n".join(map(content, paths))
    names = [word for word in words if _NAME.fullmatch(word) and word not in GLOBAL]
    assert [name for name in names if not re.search(rf"\b{name}\b", texts)] == []


def test_there_are_lines():
    assert len(LINES) > 40
