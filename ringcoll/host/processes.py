"""Processes of this host."""

from __future__ import annotations

from pathlib import Path


def start_of_process(pid: int | str = "self") -> int:
    """When a process began, in ticks since the start of its host; an OSError if it has ended."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return int(text.rpartition(")")[2].split()[19])  # its name may hold spaces
