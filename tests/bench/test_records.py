"""What pages show comes from records of commits, by commands that today's benchmarks accept."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.tables import FIGURES, RESULTS, record, table
from ringcoll.cli import bench
from tests.torch import suite

ROOT = Path(__file__).parents[2]
COMMIT = re.compile(r"[0-9a-f]{7,40}")

ADMITTED = {
    "gpu_timing_model_4_of_12_blocks": "The option --blocks is gone",
}
"""Shown records that cannot be measured again as they were, and how the page says so."""

FIGURES_OF = {name: figure for figure, (_, names) in FIGURES.items() for name in names}


class ParsedError(Exception):
    """Raised in place of what a benchmark does once it has understood its command."""


def accepted(command: str) -> bool:
    """Whether a command's parser, which may be that of ``main`` alone, takes every word of it."""
    words = shlex.split(command)
    main: Callable[[list[str]], object]
    if words[0] == "scripts/torch_suite":
        main, argv = suite.main, words[1:]
    elif "ringcoll" in words:
        at = words.index("ringcoll")
        assert words[at - 1 : at + 2] == ["-m", "ringcoll", "bench"]
        parser, argv = argparse.ArgumentParser(), words[at + 2 :]
        bench.add_arguments(parser)
        main = parser.parse_args
    else:
        assert words[:2] == ["python", "-m"]
        main, argv = importlib.import_module(words[2]).main, words[3:]
    try:
        main(argv)
    except ParsedError:
        return True
    except SystemExit:
        return False
    raise AssertionError(f"{command}: nothing was parsed")


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    plain = argparse.ArgumentParser.parse_args

    def parse_args(self, argv=None, namespace=None):
        plain(self, argv, namespace)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", FIGURES_OF)
def test_what_is_shown_can_be_measured_again(name):
    found = record(name)
    for run in found.get("runs", [found]):
        again = bool(COMMIT.fullmatch(run["commit"])) and accepted(run["command"])
        assert again == (name not in ADMITTED), run["command"]
    if name in ADMITTED:
        assert ADMITTED[name] in table(FIGURES_OF[name])


def test_words_that_no_benchmark_takes_are_refused():
    assert not accepted("python -m benchmarks.peers --rank 4 --size 8M --unknown")
    assert not accepted("mpiexec -n 4 python -m ringcoll bench sendrecv --unknown 3")
    assert not accepted("scripts/torch_suite --everything")


def test_every_record_is_listed_with_what_it_backs():
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`([\w.]+)`", row)]
    assert sorted(listed) == sorted(path.name for path in RESULTS.iterdir() if path.suffix != ".md")


def rows_of(found):
    """The rows of a record that say how many elements were wrong, each with its list."""
    parts = found.values() if isinstance(found, dict) else found
    for part in parts if isinstance(found, (dict, list)) else ():
        if isinstance(found, list) and isinstance(part, dict) and part.get("wrong") == 0:
            yield found, part
        else:
            yield from rows_of(part)


@pytest.mark.parametrize(
    ("figure", "name"), [(figure, name) for figure, (_, of) in FIGURES.items() for name in of]
)
def test_no_table_shows_a_row_with_wrong_elements(figure, name, tmp_path, monkeypatch):
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    whole = (RESULTS / f"{name}.json").read_text("utf-8")

    def shown(change):
        found = json.loads(whole)
        change(found)
        (tmp_path / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")
        return table(figure)

    number = sum(1 for _ in rows_of(json.loads(whole)))
    for at in range(0, number, 1 + number // 20):  # of many rows some twenty

        def mark(found, at=at):
            list(rows_of(found))[at][1]["wrong"] = 3

        def remove(found, at=at):
            among, row = list(rows_of(found))[at]
            among.remove(row)

        assert shown(mark) == shown(remove)
