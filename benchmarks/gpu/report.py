"""Rows, the files that hold them, and the table that a person reads last."""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.record import now

__all__ = ["Report", "attempt", "best", "median_us", "print_table", "rows_of", "size_text"]

ROOT = Path(__file__).parents[2]
PACKAGES = ("numpy", "cupy-cuda13x", "torch", "nvidia-nccl-cu13", "nvidia-cuda-nvrtc")

Row = dict[str, Any]
"""``name, collective, dtype, bytes, ranks, us``, and what more the measurement knows."""


def _output(*words: str) -> str:
    """What a command prints, or an empty string if it cannot be run."""
    try:
        found = subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        for distribution in metadata.distributions(name=name):
            found.setdefault(name, distribution.version)
    return found


class Report:
    """A JSON file that is whole after every row, so that a killed part loses nothing.

    Args:
        path: what ``--out`` names; None writes nothing.
        name: of the benchmark.

    """

    def __init__(self, path: Path | None, name: str) -> None:
        self.path = path
        query = "--query-gpu=name,driver_version"
        self._head = {
            "name": name,
            "date": now(),
            "command": shlex.join(["python", "-m", f"benchmarks.gpu.{name}", *sys.argv[1:]]),
            "commit": _output("git", "rev-parse", "--short=12", "HEAD") or None,
            "gpus": _output("nvidia-smi", query, "--format=csv,noheader").splitlines(),
            "versions": _versions(),
        }
        self.rows: list[Row] = []
        self.errors: dict[str, str] = {}
        self.extra: dict[str, Any] = {}
        self._write()

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep a row."""
        self.rows.append(dict(row))
        self._write()

    def note(self, key: str, value: Any) -> None:
        """Keep a figure that is no row."""
        self.extra[key] = value
        self._write()

    def fail(self, part: str, reason: str | None) -> None:
        """Keep why a part failed; None means that it did not."""
        if reason is not None:
            print(f"{part}: {reason}", flush=True)
            self.errors[part] = reason
            self._write()

    def _write(self) -> None:
        if self.path is None:
            return
        whole = {**self._head, **self.extra, "errors": self.errors, "rows": self.rows}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_suffix(".part")
        aside.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        aside.replace(self.path)


def attempt(report: Report, part: str, work: Callable[[], None]) -> None:
    """Run a part; if it fails the report says why, and the other parts still have their turn."""
    try:
        work()
    except Exception as error:
        report.fail(part, f"{type(error).__name__}: {error}")


def median_us(times: Sequence[Sequence[float]], calls: int) -> dict[str, float]:
    """The time of one call from seconds of replays, by rank.

    Args:
        times: for each rank, seconds of each replay.
        calls: calls of a replay.

    Returns:
        ``us`` (the slowest rank's, median over replays), ``us_min`` and ``us_max``.

    """
    slowest = [max(replay) / calls * 1e6 for replay in zip(*times, strict=True)]
    return {
        "us": round(statistics.median(slowest), 3),
        "us_min": round(min(slowest), 3),
        "us_max": round(max(slowest), 3),
    }


def rows_of(folder: Path) -> list[Row]:
    """All rows of all files of a folder."""
    rows: list[Row] = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            rows += content.get("rows", [])
    return rows


def best(rows: Iterable[Row]) -> dict[tuple[Any, ...], Row]:
    """The fastest right row of each (collective, dtype, ranks, bytes, name)."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row.get("us") is None or row.get("wrong"):
            continue
        key = (row["collective"], row["dtype"], row["ranks"], row["bytes"], row["name"])
        if key not in found or row["us"] < found[key]["us"]:
            found[key] = row
    return found


def size_text(nbytes: int) -> str:
    """256, 4K, 1M."""
    for unit, power in (("G", 30), ("M", 20), ("K", 10)):
        if nbytes >= 1 << power and nbytes % (1 << power) == 0:
            return f"{nbytes >> power}{unit}"
    return str(nbytes)


def print_table(rows: Iterable[Row]) -> None:
    """One table for each (collective, dtype, ranks): a line a size, a column a name, in us."""
    rows = list(rows)
    fastest = best(rows)
    for group in sorted({key[:3] for key in fastest}):
        collective, dtype, ranks = group
        keys = [key for key in fastest if key[:3] == group]
        names = list(dict.fromkeys(key[4] for key in keys))
        print(f"\n{collective}, {dtype}, {ranks} ranks: us a call")
        widths = [max(8, len(name)) for name in names]
        columns = zip(names, widths, strict=True)
        print(f"{'bytes':>6}  " + "  ".join(f"{name:>{width}}" for name, width in columns))
        for nbytes in sorted({key[3] for key in keys}):
            cells = []
            for name, width in zip(names, widths, strict=True):
                row = fastest.get((*group, nbytes, name))
                cells.append(f"{row['us']:{width}.2f}" if row else " " * (width - 1) + "-")
            print(f"{size_text(nbytes):>6}  " + "  ".join(cells))
    wrong = [row for row in rows if row.get("wrong")]
    if wrong:
        print(f"\nWRONG RESULTS in {len(wrong)} rows, the first: {wrong[0]}")
