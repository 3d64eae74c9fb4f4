"""Programs run as processes of their own that end as Python does, forked from one with torch.

Loading torch takes seconds: here once for all. Unlike children of multiprocessing these run
through the whole end of the interpreter, which is what is tested.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def serve():
    """In the process with torch: for every line fork a child that runs a program, then wait."""
    children: dict[int, int] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(children.pop(order["wait"]), 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        for module in order["loads"]:
            importlib.import_module(module)
        pid = os.fork()
        if not pid:
            for number, name in enumerate(("/dev/null", order["out"], order["err"])):
                os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
            sys.argv = ["program", *order["arguments"]]
            return order["code"]
        children[order["name"]] = pid
    return ""


class Programs:
    """Runs programs, each as several ranks at once."""

    def __init__(self) -> None:
        self.server: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-m", "tests.torch.programs"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, code: str, nranks: int, *arguments: object, loads: Sequence[str] = ()
    ) -> list[tuple[int, str, str]]:
        """Status, output and errors of each rank, which finds its number in sys.argv[1].

        ``loads``: modules that are loaded before the ranks are forked.
        """
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(nranks):
                self._order(
                    name=rank,
                    code=code,
                    loads=loads,
                    arguments=[str(rank), *map(str, arguments)],
                    out=f"{folder}/out{rank}",
                    err=f"{folder}/err{rank}",
                )
            ends = []
            for rank in range(nranks):
                self._order(wait=rank)
                status = int(self._stream("stdout").readline())
                said = [Path(folder, f"{kind}{rank}").read_text() for kind in ("out", "err")]
                ends.append((status, said[0], said[1]))
            return ends

    def _order(self, **order):
        self._stream("stdin").write(json.dumps(order) + "\n")
        self._stream("stdin").flush()

    def _stream(self, name):
        return getattr(self.server, name)

    def close(self) -> None:
        self._stream("stdin").close()
        self._stream("stdout").close()
        assert self.server.wait(20) == 0


if __name__ == "__main__":
    # What the programs need is loaded before they are forked.
    importlib.import_module("ringcoll.torch.composite")
    program = serve()
    # At the top of the file, so that an error in it is one of the process.
    exec(compile(program, "program", "exec"), {"__name__": "__main__"})  # noqa: S102
