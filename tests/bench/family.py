"""A command and all that it has started, which a test ends whatever becomes of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

__all__ = ["ended"]


def ended(process: subprocess.Popen[str], limit: float, patience: float = 20) -> tuple[str, str]:
    """What a command has printed; of one that does not end, where each of its processes stands.

    None of them is left, also where this wait is interrupted.

    Args:
        process: the command, with pipes.
        limit: seconds that it may take.
        patience: seconds for its processes to say where they stand, once they are asked.

    Raises:
        AssertionError: it did not end.

    """
    family: dict[int, str] = {}
    try:
        return process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        family = found(process.pid)
        kill(family, signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=patience)
        kill(family, signal.SIGKILL)
        _, stderr = process.communicate(timeout=patience)
        raise AssertionError(
            f"{len(family)} processes did not end in {limit} s\n{stderr}"
        ) from None
    finally:
        if process.poll() is None:
            family |= found(process.pid)
        kill(family, signal.SIGKILL)
        process.wait(patience)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def found(first: int) -> dict[int, str]:
    """A process and its descendants, each with when it began; who ends meanwhile may be missing."""
    family = [first]
    for pid in family:  # grows
        with contextlib.suppress(OSError):
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    family += map(int, path.read_text().split())
    return {pid: began(pid) for pid in family}


def began(pid: int) -> str:
    """When a process began, which tells it from a later one of its number; empty without one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return fields[19]


def kill(family: dict[int, str], number: int) -> None:
    """Send each of them that still is there a signal, the ranks before who has started them."""
    for pid, when in reversed(family.items()):
        if when and began(pid) == when:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
