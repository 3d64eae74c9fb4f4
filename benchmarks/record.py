"""What every recorded measurement says of itself: when, by which command, on what, which code."""

from __future__ import annotations

import datetime
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringcoll.bench.environment import machine, versions

__all__ = ["RESULTS", "command_line", "commit", "save"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


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
    name = Path(sys.argv[0]).stem
    return shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]])


def save(
    name: str,
    content: Mapping[str, Any],
    *,
    ranks: int,
    device: str = "cpu",
    folder: Path = RESULTS,
) -> Path:
    """Write ``benchmarks/results/NAME.json``; an older measurement of that name is replaced.

    Args:
        name: what was measured.
        content: the figures.
        ranks: the most ranks that took part.
        device: kind of ranks.
        folder: another folder.

    """
    from ringcoll import __version__

    whole = {
        "name": name,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
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
    return path
