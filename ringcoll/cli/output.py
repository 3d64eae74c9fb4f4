"""What commands write: files, their names, and how far a long work has come."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from ringcoll.errors import ArgumentError, PlanError
from ringcoll.plan import Plan

_TICK_SECONDS = 0.2


def check_target(option: str, target: str | None) -> None:
    """Refuse before a long work a file that could not be written after it."""
    if target in (None, "-"):
        return
    path = Path(str(target)).absolute()
    if path.is_dir() or not path.parent.is_dir():
        why = errno.EISDIR if path.is_dir() else errno.ENOENT
        raise ArgumentError(f"{option} {target}: {os.strerror(why)}")


def write_text(option: str, target: str | None, text: str) -> None:
    """Write to a file and name it on stderr, or write to stdout for ``-``; nothing for None.

    ``option`` names the file, such as "--json", for the message of an error.
    """
    if target == "-":
        sys.stdout.write(text)
    elif target is not None:
        try:
            Path(target).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ArgumentError(f"{option} {target}: {error.strerror or error}") from None
        say_written(target)


def write_json(target: str | None, value: Any) -> None:
    """Write ``value`` as JSON to what ``--json`` names; see :func:`write_text`."""
    write_text("--json", target, json.dumps(value, indent=1) + "\n")


def say_written(target: str | None) -> None:
    """Name a file that a command has written; nothing for None."""
    if target is not None:
        print(f"wrote {target}", file=sys.stderr)


def say_unproven(command: str, plan: Plan, show: Callable[..., None] = print) -> None:
    """Say on stderr what a user's plan gets wrong, if anything: it is drawn all the same."""
    from ringcoll.launch import Launch
    from ringcoll.verifier.prover import prove_launch

    try:
        prove_launch(plan, Launch())
    except PlanError as error:
        show(f"ringcoll {command}: no call runs this plan: {error}", file=sys.stderr)


def bold(text: str) -> str:
    """Text that stands out in a terminal, and is plain in a file or a pipe."""
    plain = (
        not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    )
    return text if plain else f"\x1b[1m{text}\x1b[0m"


@contextmanager
def progress(
    what: str, total: int = 0, done: Callable[[], int] | None = None
) -> Iterator[Progress]:
    """Show on stderr how far a long work has come; nothing where stderr is no terminal.

    >>> with progress("proving", 3) as shown:
    ...     for name in ("ring", "tree", "chain"):
    ...         shown.step(name)

    Args:
        what: is done.
        total: how many parts it has; 0 if nobody knows.
        done: counts the parts that are done; None: the steps that are told.

    """
    shown = Progress(what, total, done)
    if sys.stderr is None or not sys.stderr.isatty():
        yield shown
        return
    shown.live = True
    ticking = threading.Thread(target=shown.tick, name="ringcoll-progress", daemon=True)
    ticking.start()
    try:
        yield shown
    finally:
        shown.over.set()
        ticking.join()


class Progress:
    """How far a work has come."""

    def __init__(self, what: str, total: int, done: Callable[[], int] | None = None) -> None:
        self.what, self.total, self.part = what, total, ""
        self.live, self.over = False, threading.Event()
        self._steps = 0
        self._done = done or (lambda: self._steps)
        self._start = time.monotonic()
        self._lock = threading.Lock()

    def step(self, part: str = "") -> None:
        """One more part has come to its turn."""
        self._steps, self.part = self._steps + 1, part

    def print(self, *lines: str, file: TextIO | None = None) -> None:
        """Print lines, while the line of the progress is away."""
        with self._lock:
            self._write("")
            for line in lines:
                print(line, file=file or sys.stdout, flush=True)

    def line(self) -> str:
        """What is shown, such as ``proving 3/40, all_reduce by ring, 12 s``."""
        count = f" {self._done()}/{self.total}" if self.total else ""
        part = f", {self.part}" if self.part else ""
        return f"{self.what}{count}{part}, {time.monotonic() - self._start:.0f} s"

    def tick(self) -> None:
        """Show the line until the work is over."""
        while not self.over.wait(_TICK_SECONDS):
            with self._lock:
                self._write(self.line())
        self._write("")

    def _write(self, line: str) -> None:
        if self.live:
            # From the first column, and away with what is left of the last line.
            print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
