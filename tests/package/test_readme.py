"""The README is short, its code runs as it stands, its figures are those of a record."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import tables
from benchmarks.plots import draw
from ringcoll.bootstrap.launcher import mpiexec
from tests.docs.blocks import blocks_of, run_page

ROOT = Path(__file__).parents[2]
PATH = ROOT / "README.md"
README = PATH.read_text(encoding="utf-8")
FIGURES = re.findall(
    r"<!-- python -m benchmarks\.tables (\w+) -->\n\n(.*?</small>)", README, re.DOTALL
)
LINKS = dict.fromkeys(re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README))


def test_a_reader_has_five_minutes():
    assert len(README.splitlines()) <= 180
    assert len(README.split()) <= 1500


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside the interpreter or on the path")
def test_every_block_runs(tmp_path):
    blocks = blocks_of(PATH)
    elsewhere = [block for block in blocks if block.need is not None]
    assert [block.text.split()[0] for block in elsewhere] == ["scripts/bench"]
    assert run_page(PATH, tmp_path, frozenset(), frozenset()) == len(blocks) - 1 >= 3


def test_the_example_of_the_readme_is_in_examples():
    (shown,) = (block.text for block in blocks_of(PATH) if block.marks.get("file"))
    example = (ROOT / "examples" / "ten_lines.py").read_text(encoding="utf-8")
    assert example.endswith(shown)


def test_figures_are_those_of_the_record():
    assert len(FIGURES) == 1
    for name, shown in FIGURES:
        assert shown.strip() == tables.table(name).strip()


def test_the_plot_is_that_of_the_record(tmp_path):
    kept = ROOT / "docs" / "images" / "all_reduce_2_gpus.svg"
    assert f"]({kept.relative_to(ROOT)})" in README
    drawn = draw(kept.stem, tmp_path)
    assert drawn is not None
    (texts, kept_lines), (wanted, lines) = drawing(kept), drawing(drawn)
    assert texts == wanted
    assert [len(line) for line in kept_lines] == [len(line) for line in lines]
    for line, other in zip(kept_lines, lines, strict=True):
        assert np.allclose(line, other, atol=1e-3)


def drawing(path: Path) -> tuple[list[str], list[np.ndarray]]:
    """Its texts and its lines, each line in parts of its panel: versions of matplotlib differ."""
    text = path.read_text(encoding="utf-8")
    panels: dict[str, list[np.ndarray]] = {}
    for points, panel in re.findall(r'<path d="([^"]*)"\s+clip-path="url\((\S+)\)"', text):
        found = [tuple(map(float, pair)) for pair in re.findall(r"([-\d.]+) ([-\d.]+)", points)]
        panels.setdefault(panel, []).append(np.array(found))
    lines = []
    for inside in panels.values():
        least, most = (edge(np.concatenate(inside), axis=0) for edge in (np.min, np.max))
        lines += [(points - least) / (most - least) for points in inside]
    return re.findall("<!-- (.*?) -->", text), lines


@pytest.mark.parametrize("target", LINKS)
def test_what_the_readme_links_to_exists(target):
    assert (ROOT / target).exists()
