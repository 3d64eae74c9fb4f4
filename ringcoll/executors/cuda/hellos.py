"""The ranks' hellos, read by the host.

The kernels of a rooted call end before all ranks have entered, so that no kernel may have compared
their hellos.
"""

from __future__ import annotations

from contextlib import suppress
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.cuda.device import on
from ringcoll.cuda.memory import host_mapped
from ringcoll.cuda.streams import outside_capture
from ringcoll.executors.cuda.reports import HELLO, MISMATCH, Report
from ringcoll.executors.cuda.workspace import HELLO_SLOTS, HELLO_STRIDE, HELLOS, Workspace


class Hellos:
    """Reads a rank's hellos while its kernels may run."""

    def __init__(self, workspace: Workspace, rank: int, ordinal: int, pointer: int) -> None:
        self._nranks, self._rank, self._ordinal = workspace.nranks, rank, ordinal
        self._source, self._nbytes = pointer + HELLOS, workspace.hello_bytes
        self._lock, self._asked = Lock(), False  # the watchdog reads them too
        # Made ahead: creating a stream or pinning memory may wait for a kernel that waits.
        self._copy = host_mapped(self._nbytes, ordinal=ordinal, what="a copy of the hellos")
        try:
            with on(ordinal) as cuda:
                self._stream = cuda.streamCreateWithFlags(cuda.streamNonBlocking)
        except BaseException:
            self._copy.free()
            raise

    def find_mismatch(self) -> Report | None:
        """The oldest known call that ranks make differently; None without any."""
        return find_mismatch(self._read(), self._nranks, self._rank)

    def newest(self) -> list[tuple[int, int]]:
        """By rank the last call that it is known to have entered, and the number of its record."""
        return newest(self._read(), self._nranks)

    def poll(self) -> Report | None:
        """What :meth:`find_mismatch` finds in the hellos that an earlier poll began to read.

        None too while they are being read, and of the first poll. It waits for nothing: the copy
        may lie in a hardware queue behind others that wait, and who reads them meanwhile, too.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            with on(self._ordinal) as cuda, outside_capture():
                if self._asked and cuda.streamQuery(self._stream) != 0:
                    return None
                data = bytes(self._copy.host) if self._asked else b""
                self._begin(cuda)
                self._asked = True
        finally:
            self._lock.release()
        return find_mismatch(data, self._nranks, self._rank) if data else None

    def _read(self) -> bytes:
        with self._lock, on(self._ordinal) as cuda, outside_capture():
            self._begin(cuda)
            cuda.streamSynchronize(self._stream)
            return bytes(self._copy.host)

    def _begin(self, cuda: Any) -> None:
        target, kind = np.frombuffer(self._copy.host, np.uint32), cuda.memcpyDeviceToHost
        cuda.memcpyAsync(target.ctypes.data, self._source, self._nbytes, kind, self._stream)

    def close(self) -> None:
        """Destroy the stream and free the memory; idempotent."""
        stream, self._stream = self._stream, 0
        if stream:
            with on(self._ordinal) as cuda:
                with suppress(cuda.CUDARuntimeError):
                    cuda.streamSynchronize(stream)  # a poll may have begun a copy
                cuda.streamDestroy(stream)
        self._copy.free()


def newest(data: bytes, nranks: int) -> list[tuple[int, int]]:
    """The newest whole line of each rank: epoch and launch; (0, 0) where none has come."""
    return [
        max((int(word[1]), int(word[2])) if word[1] == word[3] else (0, 0) for word in of_rank)
        for of_rank in _lines(data, nranks).swapaxes(0, 1)
    ]


def _lines(data: bytes, nranks: int) -> npt.NDArray[np.uint32]:
    """{signature, epoch, launch, epoch} by slot and rank."""
    return np.frombuffer(data, np.uint32).reshape(HELLO_SLOTS, nranks, HELLO_STRIDE, 4)[:, :, 0]


def find_mismatch(data: bytes, nranks: int, rank: int) -> Report | None:
    """The report of a kernel that compared these {signature, epoch, launch, epoch} lines."""
    lines = _lines(data, nranks)
    found: list[Report] = []
    for slot in lines:
        signature, epoch, launch, same = (int(word) for word in slot[rank])
        if not epoch or epoch != same:  # no hello of this rank, or one that is half written
            continue
        entered = (slot[:, 1] == epoch) & (slot[:, 3] == epoch)
        others = np.flatnonzero(entered & (slot[:, 0] != signature))
        if others.size:
            peer = int(others[0])
            theirs = int(slot[peer, 2])
            found.append(Report(MISMATCH, peer, epoch, HELLO, theirs, launch))
    return min(found, key=lambda report: report.epoch, default=None)
