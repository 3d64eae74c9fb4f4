"""torch.distributed's default group of a benchmark's ranks: made at its store, destroyed at exit.

torch has them meet in a file, and does not always remove it: two ranks that let go of it at once
may each leave that to the other, and a killed one never comes to it. Nor may anybody remove it
while another rank has its group, for torch looks into the store all the while, and waits as long
as the group's timeout for a file that is gone. So every rank holds a shared lock on a second file
until its group is destroyed; who then gets that lock for itself is the last, and removes both. The
kernel gives up what killed ranks hold; a command that kills the rest of its ranks removes both.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringcoll.bench.leftovers import LOCK, STORE
from ringcoll.bench.worlds import gather_bytes
from ringcoll.errors import MachineError

if TYPE_CHECKING:
    from ringcoll.communicator.public import Communicator

_CLOSING = 0.2  # seconds; the kernel may end a process's connections before it gives up its locks


def join(comm: Communicator, dist: Any, backend: str, **options: Any) -> None:
    """Make torch's default group of these ranks, which is destroyed at exit; collective."""
    files: list[str] = []
    trouble = ""
    if comm.rank == 0:
        files, trouble = _make()
        trouble = trouble or _hold(dist, files)
    files = json.loads(gather_bytes(comm, json.dumps(files).encode())[0])
    if comm.rank != 0 and files:
        trouble = _hold(dist, files)
    # Nobody leaves before all hold the lock.
    for rank, part in enumerate(gather_bytes(comm, json.dumps(trouble).encode())):
        if said := json.loads(part):
            _remove(files)  # there is no store yet
            raise MachineError(f"--peer {backend}: rank {rank}: no file for torch's store: {said}")
    store = dist.FileStore(files[0], comm.nranks)
    dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.nranks, **options)


def _make() -> tuple[list[str], str]:
    """The store, the lock and the error; no folder: torch aborts where one goes with its store."""
    made: list[str] = []
    try:
        file, path = tempfile.mkstemp("", STORE)
        os.close(file)
        made.append(path)
        os.close(os.open(path + LOCK, os.O_CREAT | os.O_EXCL, 0o600))
        made.append(path + LOCK)
    except OSError as error:
        _remove(made)
        return [], str(error)
    return made, ""


def _hold(dist: Any, files: Sequence[str]) -> str:
    """Hold the lock until this process ends; what went wrong."""
    try:
        lock = os.open(files[1], os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_SH)
    except OSError as error:
        return str(error)
    atexit.register(_leave, dist, lock, files)
    return ""


def _leave(dist: Any, lock: int, files: Sequence[str]) -> None:
    try:
        # Another rank may be gone already: then there is nothing left to close in order.
        with contextlib.suppress(RuntimeError, ValueError):
            if dist.is_initialized():
                dist.destroy_process_group()
    finally:
        # Both of two ranks that still shared it would be refused.
        fcntl.flock(lock, fcntl.LOCK_UN)
        if _is_last(lock):
            _remove(files)
        os.close(lock)


def _is_last(lock: int) -> bool:
    """Whether no other rank holds the lock, a killed one aside whose files are being closed."""
    late = time.monotonic() + _CLOSING
    while not (mine := _gets(lock)) and time.monotonic() < late:
        time.sleep(1e-3)
    return mine


def _gets(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(files: Sequence[str]) -> None:
    for file in files:
        Path(file).unlink(missing_ok=True)
