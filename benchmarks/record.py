"""Where a benchmark writes, and what each record says of itself: when, how, on what, which code."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringcoll.bench.environment import machine, now, versions

__all__ = ["add_out", "command_line", "commit", "now", "save"]

ROOT = Path(__file__).parents[1]


def add_out(parser: argparse.ArgumentParser, *, file: bool = False) -> None:
    """Add ``--out``, without which a benchmark only prints.

    Args:
        parser: the benchmark's.
        file: what is named is a JSON file, not a folder.

    """
    metavar, kind = ("FILE", "JSON file") if file else ("FOLDER", "folder")
    text = f"the {kind} to write what was found to; without it nothing is written"
    parser.add_argument("--out", type=_file if file else _folder, metavar=metavar, help=text)


def _folder(text: str) -> Path:
    """A folder that can be made, or written to: before anything is measured."""
    path = Path(text)
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: {there} is no folder that can be written to")
    return path


def _file(text: str) -> Path:
    """A file that can be written."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name the JSON file to write")
    _folder(str(path.absolute().parent))
    return path


def commit() -> str:
    """The commit that was measured, with a + where files of the library differ from it."""

    def git(*words: str) -> str:
        found = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return found.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "ringcoll")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def command_line() -> str:
    """The command that runs, from the root of the repository."""
    spec = sys.modules["__main__"].__spec__
    name = f"benchmarks.{Path(sys.argv[0]).stem}" if spec is None else spec.name
    return shlex.join(["python", "-m", name, *sys.argv[1:]])


def save(
    folder: Path | None, name: str, content: Mapping[str, Any], *, ranks: int, device: str = "cpu"
) -> None:
    """Write ``FOLDER/NAME.json`` and print its path; an older record of that name is replaced.

    Args:
        folder: what ``--out`` names; None writes nothing.
        name: what was measured.
        content: the figures.
        ranks: the most ranks that took part.
        device: kind of ranks.

    """
    if folder is None:
        return
    from ringcoll import __version__

    whole = {
        "name": name,
        "date": now(),
        "command": command_line(),
        "commit": commit(),
        "machine": machine(ranks, threads=False, device=device),
        "versions": versions(__version__),
        **content,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    text = json.dumps(whole, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    print(path)
