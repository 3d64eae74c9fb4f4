"""The code blocks of the pages in docs/, and how a test runs them.

A comment before a block says what a reader does with it:

- ``<!-- file: train.py -->``: the block is saved under that name; a later block, sh, runs it;
- ``<!-- continues -->``: it goes on where the page's last block of Python has ended;
- ``<!-- needs: gpu -->``: it runs only where that is at hand, one of :data:`NEEDS`;
- ``<!-- output varies -->``, ``<!-- any order -->``: what a block ``text`` after it shows is not
  compared, or has its lines in any order. Elsewhere it is compared; ``...`` stands for anything.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ringcoll.bootstrap.launcher import mpiexec
from tests.forks.client import RANKS, forked
from tests.launching import AS_MPICH

__all__ = ["NEEDS", "PAGES", "ROOT", "Block", "blocks_of", "run_page"]

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))

NEEDS = ("gpu", "torch", "jax", "cluster")
"""What a block may need beyond a checkout, MPI and matplotlib."""

_RUN = ("python", "sh")
_FORKED = ("algorithms", "explain", "model", "report", "topo", "verify")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!-- (file|continues|needs|output varies|any order)(?:: ([^>]*?))? -->")


@dataclass(frozen=True)
class Block:
    """One block of a page.

    Args:
        line: where it begins in its page.
        language: of its fence.
        text: its lines.
        marks: the comments before it.
        shown: what the page shows of its output; None: nothing.

    """

    line: int
    language: str
    text: str
    marks: dict[str, str]
    shown: str | None = None

    @property
    def need(self) -> str | None:
        return self.marks.get("needs")

    @property
    def starts_ranks(self) -> bool:
        return "mpiexec" in self.text or "ringcoll bench" in self.text


def blocks_of(page: Path) -> list[Block]:
    """The blocks that a reader runs, each with the output that the page shows."""
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    end = 0
    for match in _FENCE.finditer(text):
        before, end = text[end : match.start()], match.end()
        marks = {name: value or "" for name, value in _COMMENT.findall(before)}
        block = Block(text.count("\n", 0, match.start()) + 1, match[1], match[2], marks)
        if block.language in _RUN:
            found.append(block)
        elif block.language == "text" and found and not before.strip(" \n"):
            found[-1] = replace(found[-1], shown=block.text)
    return found


def run_page(page: Path, folder: Path, have: frozenset[str], only: frozenset[str]) -> int:
    """Run a page's blocks from the first to the last; returns how many were run.

    Args:
        page: in docs/.
        folder: an empty one, where the blocks run.
        have: which of :data:`NEEDS` are at hand.
        only: run only blocks with one of these needs; empty: all that can be run.

    """
    ran, program = 0, ""
    environment = _environment(folder)
    if "gpu" in only:
        del environment["RINGCOLL_DEVICE"]
    for block in blocks_of(page):
        if "file" in block.marks:
            (folder / block.marks["file"]).write_text(block.text, encoding="utf-8")
        if block.language == "python":
            program = program + block.text if "continues" in block.marks else block.text
        if (block.need is not None and block.need not in have) or (only and block.need not in only):
            continue
        ran += 1
        if "file" in block.marks:
            continue
        where, printed = f"{page.name}, line {block.line}", ""
        for result in _run(block, program, folder, environment):
            assert result.returncode == 0, (
                f"{where}: {result.stdout[-2000:]}\n{result.stderr[-4000:]}"
            )
            printed += result.stdout
        _compare(where, block, printed)
    return ran


def _run(
    block: Block, program: str, folder: Path, environment: dict[str, str]
) -> Iterator[subprocess.CompletedProcess[str]]:
    """Run a block as its reader does, or where that is the same, in forked processes."""
    modules = (*RANKS, *(f"ringcoll.cli.{name}" for name in _FORKED))
    commands = [[sys.executable, "-W", "error", "-c", program]]
    if block.language == "sh" and (simple := _simple_commands(block.text)):
        commands = [
            forked([sys.executable, "-m", "ringcoll", *words], *modules) for words in simple
        ]
    elif block.language == "sh":
        commands = [["sh", "-eu", "-c", block.text]]
    elif block.need is None:
        commands = [forked(words, *modules) for words in commands]
    for words in commands:
        yield subprocess.run(
            words,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=110,
        )


def _simple_commands(text: str) -> list[list[str]]:
    """The words of each line if all are commands of ringcoll that start no ranks; else none."""
    if re.search(r"[|<>&;$`*\"']", text):
        return []
    lines = text.replace("\\\n", " ").splitlines()
    found = [words for line in lines if (words := shlex.split(line, comments=True))]
    plain = all(words[0] == "ringcoll" and words[1] in _FORKED for words in found)
    return [words[1:] for words in found] if plain else []


def _compare(where: str, block: Block, printed: str) -> None:
    if block.shown is None or "output varies" in block.marks:
        return
    shown, seen = _lines(block.shown), _lines(printed)
    if "any order" in block.marks:
        # Ranks print at the same time: a newline may come after the next rank's line.
        rest = printed
        for line in shown:
            assert line in rest, f"{where}: {line!r} is not in\n{printed}"
            rest = rest.replace(line, "", 1)
        assert not rest.strip(), f"{where}: printed\n{printed}"
        return
    anything = {"...": "(?:.*\n)?"}  # a line of its own: any lines, or none
    wanted = [re.escape(line).replace(re.escape("..."), ".*") + "\n" for line in shown]
    pattern = "".join(anything.get(line, regex) for line, regex in zip(shown, wanted, strict=True))
    text = "".join(f"{line}\n" for line in seen)
    assert re.fullmatch(pattern, text, re.DOTALL), f"{where}: printed\n{printed}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def _environment(folder: Path) -> dict[str, str]:
    """As of a shell in which ringcoll is installed: its command, python and mpiexec are found."""
    commands = folder / ".commands"
    commands.mkdir()
    for name, words in _commands():
        path = commands / name
        path.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    # torch finds the backend by the metadata of an installed package, which a checkout has not.
    info = folder / ".installed" / "ringcoll-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ringcoll\nVersion: 0\n")
    entry = "[torch.backends]\nringcoll = ringcoll.torch_entry:register\n"
    (info / "entry_points.txt").write_text(entry)
    dropped = ("PMI_", "OMPI_", "SLURM_", "RINGCOLL_", "TORCHELASTIC_", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {
        **kept,
        **AS_MPICH,
        "COLUMNS": "100",
        "MPLBACKEND": "agg",
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join((str(commands), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(info.parent))),
        "RINGCOLL_CACHE_DIR": str(folder / ".cache"),
        "RINGCOLL_DEVICE": "cpu",
    }


def _commands() -> Iterator[tuple[str, str]]:
    python = f"'{sys.executable}'"
    yield "python", f"{python} -W error"
    yield "ringcoll", f"{python} -m ringcoll"
    yield "pytest", f"{python} -m pytest -p no:cacheprovider"
    yield "torchrun", f"{python} -m torch.distributed.run"
    launcher = mpiexec() or shutil.which("mpiexec")
    if launcher is not None:
        yield "mpiexec", f"'{launcher}'"
