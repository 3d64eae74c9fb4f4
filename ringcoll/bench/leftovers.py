"""The files that ranks remove as they end, found where ranks are killed before."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["LOCK", "STORE", "leftovers", "remove", "shared_memory"]

STORE, LOCK = "ringcoll-store-", ".lock"
"""How the name of torch's store begins; its ranks have the file with this ending open."""

_MPICH = re.compile(r"/dev/shm/mpich_shm_\w+$", re.MULTILINE)
_LOCK = re.compile(rf"/{STORE}\w+{re.escape(LOCK)}$")


def leftovers(pids: Iterable[int]) -> set[str]:
    """The files that would stay if these processes were all of a job and were killed now."""
    pids = [*pids]
    return shared_memory(pids) | _stores(pids)


def shared_memory(pids: Iterable[int]) -> set[str]:
    """The files of MPICH's shared memory that these processes map."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.update(_MPICH.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace")))
    return found


def remove(files: Iterable[str]) -> None:
    """Remove files, those that are there; processes that map them keep them."""
    for file in files:
        with contextlib.suppress(OSError):
            Path(file).unlink()


def _stores(pids: Iterable[int]) -> set[str]:
    """The stores of torch whose locks these processes hold, and the locks."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # ended meanwhile
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile
                    path = str(descriptor.readlink())
                    if _LOCK.search(path):
                        found |= {path, path.removesuffix(LOCK)}
    return found
