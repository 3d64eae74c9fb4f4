"""Processes of this host, and its processor."""

from __future__ import annotations

import platform
from pathlib import Path


def start_of_process(pid: int | str = "self") -> int:
    """When a process began, in ticks since the start of its host; an OSError if it has ended."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return int(text.rpartition(")")[2].split()[19])  # its name may hold spaces


def cpu_name() -> str:
    """The processor's model."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return " ".join(value.split())
    except OSError:
        pass
    return platform.processor() or platform.machine()
