"""The pages of docs/: every block of code runs, and what they show is what is printed."""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections import Counter
from pathlib import Path

import pytest

from ringcoll.bootstrap.launcher import mpiexec
from tests.docs.blocks import NEEDS, PAGES, Block, blocks_of, run_page

NOT_RUN = {"cluster": 4, "gpu": 2, "jax": 1, "torch": 3}
"""How many blocks need what not every machine has; a new one is counted here on purpose."""

ALL = [(page, block) for page in PAGES for block in blocks_of(page)]


def cases() -> list:
    marks = {
        True: [pytest.mark.mpi, pytest.mark.timeout(500)],
        False: [pytest.mark.timeout(500)],
    }
    return [
        pytest.param(
            page,
            id=page.stem,
            marks=marks[any(block.starts_ranks and not block.need for block in blocks_of(page))],
        )
        for page in PAGES
        if any(block.need is None for block in blocks_of(page))
    ]


@pytest.mark.parametrize("page", cases())
def test_every_block_of_a_page_runs(page: Path, tmp_path: Path):
    if mpiexec() is None and any("mpiexec" in block.text for block in blocks_of(page)):
        pytest.skip("no mpiexec beside the interpreter or on the path")
    wanted = sum(block.need is None for block in blocks_of(page))
    assert run_page(page, tmp_path, frozenset(), frozenset()) == wanted


def test_what_is_not_run_is_counted():
    found = Counter(block.need for _, block in ALL if block.need is not None)
    assert set(found) <= set(NEEDS)
    assert found == NOT_RUN


def commands() -> list:
    """The commands of ringcoll in blocks that not every machine can run."""
    return [
        pytest.param(words, id=f"{page.stem}-{block.line}-{' '.join(words)[:40]}")
        for page, block in ALL
        if block.language == "sh" and block.need is not None
        for words in spoken(block)
    ]


def spoken(block: Block) -> list[list[str]]:
    lines = block.text.replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines]
    return [words[words.index("ringcoll") + 1 :] for words in found if "ringcoll" in words]


@pytest.mark.parametrize("words", commands())
def test_commands_that_are_not_run_are_understood(words: list[str]):
    parser = argparse.ArgumentParser(exit_on_error=False)
    importlib.import_module(f"ringcoll.cli.{words[0]}").add_arguments(parser)
    assert vars(parser.parse_args(words[1:]))


def test_what_is_saved_is_run():
    for page in PAGES:
        blocks = blocks_of(page)
        for number, block in enumerate(blocks):
            if "file" in block.marks:
                later = [b.text for b in blocks[number:] if b.language == "sh"]
                assert any(block.marks["file"] in text for text in later), (page, block.line)


def test_a_block_of_code_names_its_language():
    for page in PAGES:
        fences = [line for line in page.read_text("utf-8").splitlines() if line.startswith("```")]
        for opening, closing in zip(fences[::2], fences[1::2], strict=True):
            assert closing == "```", page.name
            name = opening.removeprefix("```")
            assert name in ("python", "sh", "text", "xml", "c") or name.startswith("{"), opening
