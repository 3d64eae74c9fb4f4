"""Interruptions and deaths of ``ringcoll bench`` at random moments: the job ends, with one line.

``python -m tests.bench.interrupt_loop -n 200`` prints each trial that failed, and figures;
``--out FOLDER`` writes a record.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import add_out, save
from ringcoll.bootstrap.launcher import mpiexec

ROOT = Path(__file__).parents[2]
SECONDS = 5.0
SHORT = ("-b", "1K", "-e", "64K", "-f", "64", "-N", "0")
COMMANDS = {
    "mpi": ["all_reduce", *SHORT, "--ranks", "2", "--peer", "mpi"],
    "tour": ["--ranks", "2"],
    "processes": ["all_reduce", *SHORT, "--ranks", "3"],
    "sockets": ["all_reduce", *SHORT, "--ranks", "2"],
    "threads": ["all_reduce", *SHORT, "-g", "2"],
    "mpiexec": ["all_reduce", *SHORT],
}
BY_MPIEXEC = ("mpiexec",)
SOCKETS = ("sockets",)
WITHOUT_MPI = """
import importlib.util, sys
sys.modules["mpi4py"] = None
plain = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "mpi4py" else plain(name, *rest)
from ringcoll.cli import main
sys.exit(main())
"""
KINDS = ("SIGINT", "SIGTERM", "child", "SIGKILL")
"""What happens: a signal to the command, or SIGKILL to one of the processes below it."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial: the command's end, what it printed, and what is wrong with that."""

    name: str
    kind: str
    delay: float
    seconds: float
    status: int
    errors: str
    wrong: tuple[str, ...]
    unborn: bool
    """It was ended before it ran a line of ringcoll."""
    over: bool
    """The command had ended before."""
    victim: str
    """The command line of the process that a signal has gone to."""


def attempt(name: str, kind: str, delay: float, folder: Path, *, allowed: float = SECONDS) -> Trial:
    """Start the command, let it happen after ``delay`` seconds, allow so many for the end."""
    words = [sys.executable, "-m", "ringcoll", "bench", *COMMANDS[name]]
    if name in BY_MPIEXEC:
        words = [str(mpiexec()), "-n", "2", *words]
    mark = f"INTERRUPT_LOOP={os.getpid()}-{delay}"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **dict([mark.split("=")])}
    if name in SOCKETS:
        (folder / "ringcoll").write_text(WITHOUT_MPI)
        words[1:4] = [str(folder / "ringcoll"), "bench"]
    files = {stream: folder / f"{stream}.txt" for stream in ("out", "err")}
    with files["out"].open("wb") as out, files["err"].open("wb") as err:
        process = subprocess.Popen(words, env=environ, cwd=folder, stdout=out, stderr=err)
        time.sleep(delay)
        victim = process.pid
        if kind == "child":
            victim = random.choice([p for p in _marked(mark) if p != process.pid] or [victim])
        early, line = process.poll() is not None, ""
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{victim}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        begun = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(
                victim, signal.SIGKILL if kind in ("child", "SIGKILL") else signal.Signals[kind]
            )
        wrong = []
        try:
            process.wait(2 * allowed)
            while _marked(mark) and time.monotonic() - begun < 2 * allowed:
                time.sleep(0.02)
        except subprocess.TimeoutExpired:
            wrong.append("hangs")
        seconds = time.monotonic() - begun
        if seconds > allowed:
            wrong.append(f"ended after {seconds:.1f} s")
        for pid in _marked(mark):
            wrong.append(f"process {pid} is left")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    errors = files["err"].read_text(errors="replace")
    # Until the command's handlers are set, the interpreter and the kernel answer.
    frames = set(re.findall(r'File ".*/ringcoll/(.*)", line', errors))
    if "Traceback" in errors:
        unborn = frames <= {"__init__.py", "interrupts.py"}
    else:
        unborn = "ringcoll" not in errors and -process.returncode in (2, 15)
    if not early and not unborn:
        wrong += _judge(name, kind, victim == process.pid, errors)
    status = process.returncode
    return Trial(name, kind, delay, seconds, status, errors, tuple(wrong), unborn, early, line)


def _judge(name: str, kind: str, first: bool, errors: str) -> list[str]:
    """What is wrong with the standard error."""
    lines = [line for line in errors.splitlines() if line and not line.startswith("#")]
    if "Traceback" in errors:
        return ["a traceback"]
    if name in BY_MPIEXEC:
        return []  # the user's launcher has words of its own
    killed = kind in ("child", "SIGKILL") and first
    if len(lines) != (0 if killed else 1):
        return [f"{len(lines)} lines"]
    return []


def _marked(mark: str) -> list[int]:
    """The running processes with these bytes in their environment: those of this trial."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                state = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                if state not in "ZX":
                    found.append(int(path.name))
    return found


def main(argv: list[str] | None = None) -> int:
    """Try; 1 where a trial failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=200, help="trials")
    parser.add_argument("--most", type=float, default=6.0, help="latest moment, in seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=COMMANDS)
    parser.add_argument("--kind", choices=KINDS)
    add_out(parser)
    args = parser.parse_args(argv)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # which the commands would inherit
        signal.signal(signal.SIGINT, signal.default_int_handler)
    draw = random.Random(args.seed)
    trials = []
    for number in range(args.n):
        name = args.only or list(COMMANDS)[number % len(COMMANDS)]
        kind = args.kind or draw.choices(KINDS, (4, 3, 3, 1))[0]
        # Half of them while modules are loaded and ranks begin.
        delay = draw.uniform(0, args.most if draw.random() < 0.5 else args.most / 4)
        with tempfile.TemporaryDirectory() as folder:
            trial = attempt(name, kind, delay, Path(folder))
        trials.append(trial)
        if trial.wrong:
            print(f"{name} {kind} after {delay:.3f} s, status {trial.status}: {trial.wrong}")
            print(f"    the signal went to: {trial.victim}")
            print("".join(f"    {line}\n" for line in trial.errors.splitlines()[-12:]), end="")
            sys.stdout.flush()
    seconds = [trial.seconds for trial in trials]
    print(
        f"{len(trials)} trials, {sum(bool(trial.wrong) for trial in trials)} failed, "
        f"{sum(trial.unborn for trial in trials)} before the first line of ringcoll, "
        f"{sum(trial.over for trial in trials)} after the command's end; ended after "
        f"{statistics.median(seconds):.2f} s (median), {max(seconds):.2f} s (most)"
    )
    counts = Counter((trial.name, trial.kind) for trial in trials)
    print(counts)
    content = {
        "allowed_seconds": SECONDS,
        "trials": len(trials),
        "failed": [[t.name, t.kind, round(t.delay, 3), *t.wrong] for t in trials if t.wrong],
        "after_the_end_of_the_command": sum(trial.over for trial in trials),
        "before_the_first_line_of_ringcoll": sum(trial.unborn for trial in trials),
        "seconds": {"median": round(statistics.median(seconds), 3), "most": round(max(seconds), 3)},
        "by_command_and_kind": {" ".join(pair): count for pair, count in sorted(counts.items())},
        "load_per_minute": [round(load, 1) for load in os.getloadavg()],
    }
    save(args.out, "interrupts", content, ranks=3)
    return int(any(trial.wrong for trial in trials))


if __name__ == "__main__":
    sys.exit(main())
