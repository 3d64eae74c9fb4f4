"""A peer's memory as this rank's device addresses it, or the reason why it cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ringcoll import log
from ringcoll.cuda.device import on
from ringcoll.errors import MachineError
from ringcoll.transports.handles import MemoryHandle

_log = log.logger()
# cudaErrorPeerAccessAlreadyEnabled and cudaErrorPeerAccessUnsupported, which CuPy does not name.
_ALREADY_ENABLED, _UNSUPPORTED = 704, 217


class NoPeerAccess(MachineError):
    """A device does not reach another's memory; both reach pinned host memory."""


def pointer_to(
    cuda: Any,
    handles: Sequence[MemoryHandle] | Mapping[int, MemoryHandle],
    rank: int,
    peer: int,
    opened: list[Callable[[], None]],
    what: str,
) -> int:
    """The address of a peer's memory for kernels of the current device, which is this rank's.

    ``opened`` gets what has to be given to :func:`unmap` at the end.
    """
    mine, theirs = handles[rank], handles[peer]
    inside = theirs.process == mine.process
    if not inside and mine.boot != theirs.boot:
        raise MachineError(f"{what}: ranks {rank} and {peer} are on different hosts")
    if mine.pci != theirs.pci:
        number = theirs.ordinal if inside else _ordinal_of(cuda, theirs.pci)
        # Of a device that this process does not see only an attempt can tell.
        if number is not None and not cuda.deviceCanAccessPeer(mine.ordinal, number):
            raise NoPeerAccess(
                f"{what}: {mine} (rank {rank}) has no peer access to {theirs} (rank {peer}): see "
                "`nvidia-smi topo -p2p r`; transport='host' needs none"
            )
        if inside:
            _enable(cuda, theirs.ordinal)
    if inside:
        return theirs.pointer
    if not theirs.exported:
        raise MachineError(f"{what}: rank {peer} is another process and sent no IPC handle")
    try:
        start: int = cuda.ipcOpenMemHandle(theirs.ipc)
    except RuntimeError as error:
        kind = NoPeerAccess if getattr(error, "status", None) == _UNSUPPORTED else MachineError
        raise kind(
            f"{what}: {mine} (rank {rank}) cannot map memory of {theirs} (rank {peer}): {error}; "
            "let every process see the same devices (CUDA_VISIBLE_DEVICES) in one container "
            "with one IPC namespace, run the ranks as threads of one process, or pass "
            "transport='host'"
        ) from error
    opened.append(partial(_close, cuda, start))
    return start + theirs.offset


def unmap(ordinal: int, opened: list[Callable[[], None]]) -> None:
    """Close what was opened for the kernels of a device, and forget it."""
    if not opened:
        return
    with on(ordinal):
        while opened:
            opened.pop()()


def _close(cuda: Any, start: int) -> None:
    try:
        cuda.ipcCloseMemHandle(start)
    except RuntimeError as error:  # of a device that has failed, with all that it had mapped
        _log.warning("cannot unmap memory of a peer: %s", error)


def _ordinal_of(cuda: Any, pci: str) -> int | None:
    """This process's number of a device; None if it does not see it."""
    try:
        number: int = cuda.deviceGetByPCIBusId(pci)
    except RuntimeError:
        return None
    return number


def _enable(cuda: Any, ordinal: int) -> None:
    """Let the current device's kernels use a peer's memory; once for a pair is enough."""
    try:
        cuda.deviceEnablePeerAccess(ordinal)
    except RuntimeError as error:
        if getattr(error, "status", None) != _ALREADY_ENABLED:
            raise
