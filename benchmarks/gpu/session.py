"""One session on a GPU machine: all parts in order, each with a time of its own.

::

    python -m benchmarks.gpu.session [--parts links,yardstick] [--seconds 500] [--out FOLDER]

Each part is a process group that is killed when its time is over; its JSON file holds what it had
measured by then. What they print goes to ``session.log``, and one short table comes last. Files and
log stay where ``--out`` names a folder for them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from benchmarks.gpu.report import ROOT, print_table, rows_of
from benchmarks.needs import require
from benchmarks.record import add_out

__all__ = ["PARTS", "Part", "main", "run_part"]


@dataclass(frozen=True, slots=True)
class Part:
    """One program of a session.

    Attributes:
        name: its JSON file's name, and what ``--parts`` calls it.
        argv: what follows ``python -m``; ``{out}`` is the session's folder.
        seconds: after which it is killed.

    """

    name: str
    argv: tuple[str, ...]
    seconds: float


def _part(name: str, module: str, *more: str, seconds: float) -> Part:
    argv = (f"benchmarks.gpu.{module}", "--out", f"{{out}}/{name}.json", *more)
    return Part(name, argv, seconds)


PARTS = (
    _part("links", "links", seconds=60),
    _part("yardstick", "yardstick", "--seconds", "90", seconds=100),
    Part("bars", ("benchmarks.gpu.bars", "--out", "{out}", "--seconds", "120"), 185),
)


def run_part(part: Part, out: Path, log: TextIO, seconds: float) -> str:
    """Run a part and say in a word how it ended.

    Args:
        part: what to run.
        out: the session's folder.
        log: takes all that it prints.
        seconds: what is left of the session.

    """
    command = [sys.executable, "-m", *(word.replace("{out}", str(out)) for word in part.argv)]
    log.write(f"\n=== {part.name}: {shlex.join(command)}\n")
    log.flush()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        code = process.wait(min(part.seconds, seconds))
        return "ok" if code == 0 else f"exit {code}"
    except subprocess.TimeoutExpired:
        return "out of time"
    finally:
        # Also after a good end: a rank that outlived its parent must not disturb the next part.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def print_errors(out: Path) -> None:
    """The reasons that the parts wrote down, a line each."""
    for path in sorted(out.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            continue
        for part, reason in content.get("errors", {}).items():
            print(f"{path.stem}: {part}: {reason.strip().splitlines()[-1][:200]}")
        failed = [row for row in content.get("rows", []) if row.get("error")]
        for row in failed[:3]:
            print(f"{path.stem}: {row['name']} {row['bytes']}: {row['error'][:200]}")


def print_links(out: Path) -> None:
    """The rows that are bandwidths, and the cost of launching."""
    path = out / "links.json"
    if not path.exists():
        return
    content = json.loads(path.read_text(encoding="utf-8"))
    rates = [f"{row['name']} {row['bytes_per_s'] / 1e9:.0f}" for row in content["rows"]]
    print("GB/s: " + "; ".join(rates))
    launches = content.get("launches", {}).items()
    print("us: " + "; ".join(f"{name} {seconds * 1e6:.2f}" for name, seconds in launches))


def print_end(path: Path, begin: int) -> None:
    """The last lines of a part that failed: of the log from this byte on."""
    with path.open("rb") as log:
        log.seek(begin)
        lines = log.read().decode(errors="replace").splitlines()
    print("\n".join(f"    {line}" for line in lines[-30:]))


def run_parts(wanted: Sequence[str], out: Path, seconds: float) -> int:
    """Run the parts that are wanted and print what they found; 1 if one of them failed."""
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    ends = []
    with (out / "session.log").open("a", encoding="utf-8") as log:
        for part in PARTS:
            if part.name not in wanted:
                continue
            left = end - time.monotonic()
            begun, before = time.monotonic(), (out / "session.log").stat().st_size
            word = run_part(part, out, log, left) if left > 5 else "not started: no time left"
            ends.append(word)
            print(f"{part.name:<12} {word} after {time.monotonic() - begun:.0f} s", flush=True)
            if word != "ok":
                print_end(out / "session.log", before)
    print_errors(out)
    print_links(out)
    print_table(row for row in rows_of(out) if {"collective", "dtype"} <= row.keys())
    return int(any(word != "ok" for word in ends))


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="Run all measurements of a GPU machine.")
    parser.add_argument("--parts", default="", help="default: all of them, in order")
    parser.add_argument("--seconds", type=float, default=560, help="for all parts together")
    add_out(parser)
    options = parser.parse_args(argv)

    wanted = options.parts.split(",") if options.parts else [part.name for part in PARTS]
    unknown = set(wanted) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"no such parts: {sorted(unknown)}; there are {[p.name for p in PARTS]}")
    require(parser, torch="bars" in wanted)
    with tempfile.TemporaryDirectory() as aside:
        return run_parts(wanted, (options.out or Path(aside)).resolve(), options.seconds)


if __name__ == "__main__":
    raise SystemExit(main())
