"""Programs of tests in forks of a process that has loaded what they import.

An interpreter, numpy and the package take longer to start than most programs of tests run. One
process for each test process and set of modules has loaded them, see ``server.py``, and forks.
Ranks that are forks differ from others in this: their addresses, and the order of their sets of
strings, are the same on all ranks, and cores, limits, umask and the like are those of the process
that forks, not of who starts them. So each kind of program has plain starts beside these.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["RANKS", "forked"]

ROOT = Path(__file__).parents[2]
RANKS = (
    "numpy.random",
    "ringcoll.algorithms.pull",
    "ringcoll.bootstrap.joining",
    "ringcoll.communicator.group",
    "ringcoll.communicator.setup.start",
    "ringcoll.fabric.opening",
    "ringcoll.verifier.prover",
)
"""What ranks import, most of it when they begin."""

PROXY = str(Path(__file__).with_name("proxy.py"))
ROOM = "-" * 8192
"""For the words of forks, by which tests find what has outlived them."""
SERVER = "from tests.forks.server import main; main()"


def forked(argv: list[str], *modules: str) -> list[str]:
    """The words that run a program as a fork of a process which has loaded modules.

    Args:
        argv: this interpreter, ``-W error`` and a file or ``-c`` with a text, or ``-m ringcoll``;
            then the program's words. Of other words the program is started as they say.
        modules: what the program imports.

    """
    known = argv[1:3] in (["-W", "error"], ["-m", "ringcoll"])
    if argv[0] != sys.executable or not known or argv[3:4] == ["-O"]:
        return argv
    return [sys.executable, "-IS", PROXY, _address(modules), *argv[1:]]


@functools.cache
def _address(modules: tuple[str, ...]) -> str:
    """The socket of such a process; only this user may open its folder."""
    folder = tempfile.mkdtemp(prefix="ringcoll-forks-")
    path = f"{folder}/socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", SERVER, str(listener.fileno()), ROOM, *modules],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, dict.fromkeys(paths))),
                "OPENBLAS_NUM_THREADS": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(listener.fileno(),),
            start_new_session=True,
        )

    def end() -> None:
        process.communicate()  # at the end of its input it ends
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return path
