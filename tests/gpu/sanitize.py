"""compute-sanitizer over the GPU kernels: ``python -m tests.gpu.sanitize [TOOL]...``.

Prints a table; the exit status is 0 if every tool ran every part and found nothing, 1 if not, and 5
where there is no GPU or no compute-sanitizer.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.sanitized import parts

TOOLS = ("memcheck", "racecheck")
OTHERS = ("synccheck", "initcheck")
TOOLKIT = Path("/usr/local/cuda/bin")
LIMIT = 1800
"""Seconds for one part under one tool."""
FOUND = 77
"""The exit status that compute-sanitizer is told to use where it has found something."""
SHOWN = 60
"""Lines of its findings that are repeated here."""

NOTE = """
racecheck watches shared memory alone. What ranks and blocks tell each other goes through global
memory, and it sees no race there: that is for ThreadSanitizer over the same source on a CPU,
tests/kernels/test_sanitizer.py. memcheck sees an access outside of all allocations, not one of
another rank's part of the arena; the calls' own guard bytes and results are checked beside it."""

MISSING = f"""ringcoll: there is no compute-sanitizer on the PATH, in {TOOLKIT} or in this Python's
packages; it comes with CUDA's toolkit, or with: pip install 'nvidia-cuda-sanitizer-api==13.*'"""


@dataclass(frozen=True)
class Outcome:
    """What a tool says of a part.

    Args:
        tool: of compute-sanitizer.
        part: by name.
        calls: that the part has made.
        found: errors and hazards; None if the tool did not come to its end.
        status: of the process.
        seconds: that it took.
        said: all of it.

    """

    tool: str
    part: str
    calls: int
    found: int | None
    status: int
    seconds: float
    said: str

    @property
    def verdict(self) -> str:
        if self.found:
            return "FOUND"
        if self.found is None or self.status or not self.calls:
            return f"FAILED ({self.status})"
        return "clean"


def sanitizer() -> str | None:
    """Where compute-sanitizer is: on the PATH, in CUDA's toolkit, in a wheel of this Python."""
    packages = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin")
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(TOOLKIT), str(packages)])
    return shutil.which("compute-sanitizer", path=path)


def findings(said: str) -> int | None:
    """Errors and hazards that the tool's last line counts; None if there is no such line."""
    found = re.findall(r"^=+ ERROR SUMMARY: (\d+) error", said, re.MULTILINE)
    found += re.findall(r"^=+ RACECHECK SUMMARY: (\d+) hazard", said, re.MULTILINE)
    return sum(map(int, found)) if found else None


def watch(command: str, tool: str, part: str) -> Outcome:
    """Run a part under a tool."""
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "10"]
    options += ["--target-processes", "application-only", "--launch-timeout", "120"]
    if tool == "memcheck":
        # CuPy asks for what may not be there; only what kernels do is of interest.
        options += ["--report-api-errors", "no"]
    program = [sys.executable, "-m", "tests.gpu.sanitized", part]
    began = time.monotonic()
    try:
        done = subprocess.run(
            [command, *options, *program],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIMIT,
            check=False,
        )
        status, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        status, said = 124, _text(error.stdout) + f"\nstopped after {LIMIT} s"
    calls = re.findall(r"^ringcoll: (\d+) calls made$", said, re.MULTILINE)
    taken = time.monotonic() - began
    return Outcome(tool, part, int(calls[-1]) if calls else 0, findings(said), status, taken, said)


def _text(said: bytes | str | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""


def has_device() -> bool:
    """Whether CuPy sees a GPU."""
    code = "import cupy; raise SystemExit(cupy.cuda.runtime.getDeviceCount() < 1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    return done.returncode == 0


def main(tools: Sequence[str]) -> int:
    """Run every part under every tool and print the table."""
    for tool in tools:
        if tool not in (*TOOLS, *OTHERS):
            print(f"ringcoll: {tool!r} is not one of {', '.join((*TOOLS, *OTHERS))}")
            return 2
    command = sanitizer() if has_device() else ""
    if not command:
        print(MISSING if command is None else "ringcoll: there is no GPU, or CuPy does not see it")
        return 5
    outcomes = []
    for tool in tools or TOOLS:
        for part in parts():
            outcome = watch(command, tool, part)
            if outcome.verdict != "clean":
                print(f"\n{tool}, {part}:", *outcome.said.splitlines()[-SHOWN:], sep="\n")
            outcomes.append(outcome)
    row = "{:<10} {:<16} {:>6} {:>6} {:>8}  {}".format
    print("\n" + row("tool", "part", "calls", "found", "seconds", "verdict"))
    for one in outcomes:
        found = "-" if one.found is None else one.found
        print(row(one.tool, one.part, one.calls, found, f"{one.seconds:.1f}", one.verdict))
    print(NOTE)
    return int(any(one.verdict != "clean" for one in outcomes))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
