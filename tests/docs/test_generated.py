"""What the pages take from the code and from the records when they are built."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ringcoll
from benchmarks.tables import FIGURES, record, table
from docs import generate
from ringcoll.config import OPTIONS, SETTINGS

ROOT = Path(__file__).parents[2]


def test_every_option_has_a_row_with_a_meaning():
    rows = [line.strip("| ").split(" | ") for line in generate.options().splitlines()[2:]]
    assert [cells[1] for cells in rows] == [
        f"`RINGCOLL_{n.upper()}`" for n in (*OPTIONS, *SETTINGS)
    ]
    assert all(len(cells) == 4 and cells[3].endswith(".") for cells in rows)


@pytest.mark.parametrize(("name", "page"), [("options", "guide"), ("algorithms", "own-algorithm")])
def test_a_page_keeps_what_its_command_prints_in_any_folder(name, page, tmp_path):
    program = [sys.executable, str(ROOT / "docs" / "generate.py"), name]
    printed = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=True)
    kept = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    marked = f"<!-- python docs/generate.py {name} -->\n\n"
    assert kept.partition(marked)[2].startswith(printed.stdout.rstrip("\n"))
    assert printed.stdout == generate.KEPT[name]()


def test_without_matplotlib_nothing_is_made_and_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"pip install .*\[plot\]"):
        generate.main(tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", FIGURES)
def test_a_table_names_device_date_commit_and_command(name):
    text = table(name)
    header, rule, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows
    assert {line.count("|") for line in (header, rule, *rows)} == {header.count("|")}
    for found in (record(source) for source in FIGURES[name][1]):
        for run in found.get("runs", [found]):
            assert run["date"][:10] in text
            assert run["commit"] in text
            assert run["command"] in text


def test_pages_show_every_table_and_nothing_that_is_not_made(tmp_path):
    generate.main(tmp_path)
    made = {path.name for path in tmp_path.iterdir()}
    pages = "".join(path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md"))
    pages += (tmp_path / "machines.md").read_text("utf-8")
    shown = set(re.findall(r"_generated/([\w.-]+)", pages))
    assert shown <= made
    assert {f"{name}.md" for name in FIGURES} <= shown


def test_the_api_reference_has_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    listed = set(re.findall(r"^\.\. auto\w+:: ringcoll\.(\w+)(?:\(\))?$", text, re.MULTILINE))
    assert set(ringcoll.__all__) - {"__version__"} <= listed
