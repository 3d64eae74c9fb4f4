"""Shared memory without a name: created by one process, opened by its peers through /proc.

A segment is a ``memfd`` whose pages are all reserved when it is made, so that no later access
can fail, and sealed, so that its owner cannot shrink it under a peer. It has no name: a kill −9
leaves nothing behind, and the size of /dev/shm does not matter. Its first page is a header with
random bytes that the owner also sends by other means, by which a peer detects that it has opened
something else (of a recycled process id).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from dataclasses import dataclass
from typing import Any

from ringcoll.errors import MachineError, OutOfMemory
from ringcoll.host.limits import available, no_descriptor, size
from ringcoll.host.pages import PAGE, map_private, map_shared, whole_pages

_MAGIC = b"ringcoll"
_NONCE = 24  # random bytes; with the magic 32 bytes at the start of the header page
_HEX = re.compile(f"[0-9a-f]{{{2 * _NONCE}}}")
# Reserved piece by piece: an interrupted posix_fallocate starts again from nothing.
_PIECE = 64 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class ProcAccessDenied(MachineError):
    """A peer's descriptor cannot be opened through /proc and has to be passed over a socket."""


@dataclass(frozen=True, slots=True)
class SegmentHandle:
    """What a peer needs to open a segment: process, descriptor, size of the body, nonce."""

    pid: int
    fd: int
    nbytes: int
    nonce: str

    def encode(self) -> str:
        """A line that :meth:`decode` reads."""
        return json.dumps([self.pid, self.fd, self.nbytes, self.nonce])

    @staticmethod
    def decode(text: str) -> SegmentHandle:
        """Decode what a peer has sent, checking every field."""
        try:
            pid, fd, nbytes, nonce = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise MachineError(f"a peer sent a malformed handle: {text[:80]!r}") from error
        numbers: tuple[Any, ...] = (pid, fd, nbytes)
        legal = all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)
        if not legal or not isinstance(nonce, str) or not _HEX.fullmatch(nonce):
            raise MachineError(f"a peer sent a malformed handle: {text[:80]!r}")
        return SegmentHandle(pid, fd, nbytes, nonce)


@dataclass(slots=True, eq=False)
class Segment:
    """Memory that this process owns; ``body`` starts at a page and is zeroed."""

    body: memoryview
    handle: SegmentHandle
    fd: int

    def seal(self) -> None:
        """Close the descriptor once every peer has opened it; the memory stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def create(nbytes: int, what: str) -> Segment:
    """A new zeroed segment of at least ``nbytes``, all of its pages reserved.

    Raises:
        OutOfMemory: the kernel could not reserve the pages; need and available are named.
        MachineError: the kernel has no memfd, or no descriptors are left.

    """
    total = PAGE + whole_pages(nbytes)
    fd = -1
    try:
        fd = os.memfd_create("ringcoll", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(fd, 0o600)
        for start in range(0, total, _PIECE):
            os.posix_fallocate(fd, start, min(_PIECE, total - start))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        memory = map_shared(fd, total)
    except (OSError, AttributeError) as error:
        if fd >= 0:
            os.close(fd)
        raise _explained(error, total, what) from error
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    nonce = os.urandom(_NONCE)
    memory[: len(_MAGIC) + _NONCE] = _MAGIC + nonce
    return Segment(memory[PAGE:], SegmentHandle(os.getpid(), fd, total - PAGE, nonce.hex()), fd)


def attach(handle: SegmentHandle, what: str, descriptor: int | None = None) -> memoryview:
    """The body of a peer's segment, mapped into this process.

    ``descriptor`` is the peer's where it was passed; else it is opened through /proc.

    Raises:
        ProcAccessDenied: /proc does not let this process open the descriptor.
        MachineError: what was opened is not the segment that the peer has made.

    """
    total = PAGE + handle.nbytes
    fd = descriptor
    try:
        if fd is None:
            try:
                fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    raise
                raise ProcAccessDenied(f"{what}: {error}") from error
        found = os.fstat(fd).st_size
        if found < total:
            raise MachineError(
                f"{what}: the memory of process {handle.pid} has {found} bytes, not {total}"
            )
        memory = map_shared(fd, total)
    except OSError as error:
        raise _explained(error, total, what) from error
    finally:
        if fd is not None:
            os.close(fd)
    if memory[: len(_MAGIC) + _NONCE] != _MAGIC + bytes.fromhex(handle.nonce):
        raise MachineError(
            f"{what}: the memory opened from process {handle.pid} does not start with the "
            "random bytes that its owner has sent: another process may have its id now"
        )
    return memory[PAGE:]


def private(nbytes: int, what: str) -> memoryview:
    """Zeroed, page-aligned memory of this process alone, for ranks that are threads."""
    total = max(PAGE, whole_pages(nbytes))
    try:
        return map_private(total)
    except (OSError, ValueError, OverflowError) as error:
        raise _explained(error, total, what) from error


def _explained(error: Exception, total: int, what: str) -> MachineError:
    code = getattr(error, "errno", None)
    if isinstance(error, AttributeError):
        return MachineError(f"{what}: CPU ranks in processes need Linux's memfd_create ({error})")
    if (lack := no_descriptor(error, what)) is not None:
        return lack
    if code in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG) or code is None:
        room = available()
        return OutOfMemory(
            f"{what} needs {size(total)} ({total} bytes) of memory, but the kernel refused "
            f"({error}); {size(room.nbytes)} ({room.nbytes} bytes) are available ({room.source})"
        )
    return MachineError(f"{what}: {error}")
