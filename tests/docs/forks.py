"""Programs and commands of pages in processes that are forked: each its own, none starts anew.

An interpreter and the package take 0.3 s of a processor to start, and pages have dozens of such
blocks. One process has loaded both, has one thread and runs no block itself: it forks for each. Its
standard input has a line of JSON for each block, and its standard output the exit statuses.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
import types
import warnings
from pathlib import Path

__all__ = ["run_forked"]

LIMIT = 110
"""Seconds that a block may take."""

ROOT = Path(__file__).parents[2]


def run_forked(
    words: list[str] | str, folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command of ringcoll (its words) or a program of Python (its text) in a folder."""
    process = _forker()
    assert process.stdin is not None
    assert process.stdout is not None
    stdout, stderr = folder / ".stdout", folder / ".stderr"
    request = [words, str(folder), environment, str(stdout), str(stderr)]
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    assert answer, "the process that forks has ended"
    return subprocess.CompletedProcess(
        words, json.loads(answer), stdout.read_text("utf-8"), stderr.read_text("utf-8")
    )


@functools.cache
def _forker() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "tests.docs.forks"],
        cwd=ROOT,
        env={**os.environ, "MPLBACKEND": "agg", "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)  # at the end of its input it ends
    return process


def _serve() -> None:
    import numpy as np

    import ringcoll
    from ringcoll.cli import COMMANDS

    for name in ringcoll.__all__:
        getattr(ringcoll, name)
    for name in COMMANDS:
        importlib.import_module(f"ringcoll.cli.{name}")
    np.random.default_rng()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = _run(*json.loads(line))
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                traceback.print_exc()
            finally:
                try:
                    # As at an interpreter's end, which os._exit leaves out.
                    threading._shutdown()  # type: ignore[attr-defined]
                    atexit._run_exitfuncs()
                    sys.stdout.flush()
                    sys.stderr.flush()
                finally:
                    os._exit(status)
        _, ended = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(ended), flush=True)


def _run(
    words: list[str] | str, folder: str, environment: dict[str, str], stdout: str, stderr: str
) -> int:
    signal.alarm(LIMIT)
    for number, name in ((0, os.devnull), (1, stdout), (2, stderr)):
        opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0] = folder  # was the checkout, where the package comes from
    sys.path.insert(1, str(ROOT))
    if isinstance(words, list):
        from ringcoll.cli import main

        warnings.resetwarnings()
        sys.argv = ["ringcoll", *words]
        return main()
    sys.argv = ["-c"]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(words, "<string>", "exec"), module.__dict__)  # noqa: S102
    return 0


if __name__ == "__main__":
    _serve()
