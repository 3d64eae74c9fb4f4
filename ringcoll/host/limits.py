"""What the machine has: memory, also of the groups that contain this process, threads, files, time.

Reserving shared memory beyond a control group's limit kills the process instead of raising an
error; so the limits are read first. What the kernel can reclaim at once (the page cache of files)
counts as available.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ringcoll.errors import MachineError, OutOfMemory

T = TypeVar("T")

# Left to the rest of the process: stacks, page tables, the interpreter itself.
_RESERVE = 32 << 20
# Control groups without a limit report 2**63 rounded down to pages; no machine has an exabyte.
_UNLIMITED = 1 << 60
_THREADS = 1 << 22  # of any Linux: the bound of its bound
_LONGEST = (1 << 31) / 1e3 - 1  # seconds; poll takes an int of milliseconds, a socket by way of it


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes that may still be allocated, and the limit's source."""

    nbytes: int
    source: str


def size(nbytes: int) -> str:
    """A number of bytes for people, in binary units."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def available(root: Path = Path("/")) -> Available:
    """The least that the machine and every control group around this process still allow.

    ``root`` has ``proc`` and ``sys``; a test passes a folder of its own.
    """
    rooms = [*_machine(root), *_groups(root)]
    if not rooms:
        return Available(_UNLIMITED, "no limit known")
    least = min(rooms, key=lambda room: room.nbytes)
    return Available(max(0, least.nbytes - _RESERVE), least.source)


def require(need: int, room: Available, what: str) -> None:
    """Raise :class:`OutOfMemory`, with both numbers, if ``need`` bytes exceed ``room``."""
    if need > room.nbytes:
        raise OutOfMemory(
            f"{what} needs {size(need)} ({need} bytes) of shared memory, but only "
            f"{size(room.nbytes)} ({room.nbytes} bytes) are available ({room.source}); "
            "use smaller arrays or fewer ranks, or raise that limit"
        )


def no_descriptor(error: BaseException, what: str) -> MachineError | None:
    """The error of a call that lacks a file descriptor for ``what``; None if it lacks none."""
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    remedy = "raise ulimit -n" if error.errno == errno.EMFILE else "end other processes"
    return MachineError(f"{what}: no file descriptor is left ({error}): {remedy}")


def waitable(seconds: float) -> float | None:
    """Seconds as sockets, polls and locks take them; None, for ever, beyond what all of them do."""
    return seconds if seconds < _LONGEST else None


def most_threads(root: Path = Path("/")) -> int:
    """Threads of all processes of this machine together, at most."""
    found = [_THREADS]
    for name in ("threads-max", "pid_max"):
        text = _read(root / "proc/sys/kernel" / name).strip()
        found += [int(text)] if text.isdecimal() else []
    return min(found)


def start(make: Callable[[], T], what: str) -> T:
    """Start a thread by ``make``; MachineError where none is left for ``what``."""
    try:
        return make()
    except RuntimeError as error:
        raise MachineError(
            f"{what} needs a thread, but no thread can be started: {error}; raise ulimit -u or the "
            f"control group's pids.max, or end other threads"
        ) from error


def _machine(root: Path) -> Iterator[Available]:
    text = _read(root / "proc/meminfo")
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            yield Available(int(line.split()[1]) << 10, "MemAvailable of /proc/meminfo")


def _groups(root: Path) -> Iterator[Available]:
    """Room in this process's memory control groups and in all that contain them."""
    folders = _folders(root, _read(root / "proc/self/cgroup"))
    if not folders:
        _folders.cache_clear()  # the file of mounts may be readable the next time
    for folder, limit, usage in folders:
        yield from _room(folder, limit, usage)


@functools.lru_cache(maxsize=1)
def _folders(root: Path, member_of: str) -> tuple[tuple[Path, str, str], ...]:
    """Where these groups and all around them tell their limit and usage, in files of these names.

    Kept for as long as the process stays in its groups: every allocation of shared memory asks.
    """
    found = []
    paths = {}
    for line in member_of.splitlines():
        _, controllers, path = line.split(":", 2)
        paths[controllers] = path
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        mounted, point = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup2" and "" in paths:
            path, limit, usage = paths[""], "memory.max", "memory.current"
        elif kind == "cgroup" and "memory" in options.split(","):
            path = next((p for c, p in paths.items() if "memory" in c.split(",")), "/")
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        top = root / point.lstrip("/")
        # Inside a container the group may be the mount's own root, or lie outside the mount.
        inside = path[len(mounted) :] if mounted != "/" and path.startswith(mounted) else path
        folder = top / inside.strip("/")
        if ".." in folder.parts or not folder.is_dir():
            folder = top
        while True:
            found.append((folder, limit, usage))
            if folder == top:
                break
            folder = folder.parent
    return tuple(found)


def _room(folder: Path, limit: str, usage: str) -> Iterator[Available]:
    most = _read(folder / limit).strip()
    if not most.isdigit() or int(most) >= _UNLIMITED:
        return
    used = _read(folder / usage).strip()
    if not used.isdigit():
        return
    stat = dict(line.split()[:2] for line in _read(folder / "memory.stat").splitlines() if line)
    cache = sum(
        int(stat.get(f"total_{name}", stat.get(name, "0")))
        for name in ("inactive_file", "active_file")
    )
    yield Available(int(most) - int(used) + cache, f"{limit} of the control group {folder}")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
