"""Reaching the device memory of the other ranks on this host.

In one process a pointer serves all devices that have peer access to each other; between processes
CUDA makes a handle of an allocation, and opening it gives a pointer. Both are exchanged
collectively: if one rank fails then all raise.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ringcoll import log
from ringcoll.cuda import quarantine
from ringcoll.cuda.device import on
from ringcoll.cuda.driver import allocation_of
from ringcoll.cuda.memory import DeviceMemory, allocate
from ringcoll.cuda.virtual_memory import grant, pieces_of
from ringcoll.errors import MachineError
from ringcoll.fabric.base import Fabric
from ringcoll.fabric.mapping import outcome, together
from ringcoll.transports.handles import MemoryHandle, decode_all, handle_of
from ringcoll.transports.mapping import pointer_to, unmap
from ringcoll.transports.vmm import ExportedPieces, export_pieces, import_pieces

_log = log.logger()


@dataclass(slots=True, eq=False)
class PeerMemory:
    """One part of memory of every rank, mapped where this rank's kernels reach it.

    ``held`` is what the own part needs in this process while it lives, after :meth:`close` too.
    """

    pointers: tuple[int, ...]
    nbytes: int
    ordinal: int
    _rank: int
    _handles: Sequence[MemoryHandle]
    _opened: list[Callable[[], None]]  # what closes again what was opened for this rank
    _released: list[memoryview] | None  # a flag of every rank: it has unmapped all parts
    _free: Callable[[], None]  # frees this rank's own part
    held: weakref.ref[Any] | None = None

    def close(self) -> None:
        """Unmap the peers' parts; not collective, idempotent.

        No kernel of this rank may use any part afterwards. Its own part is freed when all others
        have unmapped it, or are dead.
        """
        released, self._released = self._released, None
        if released is None:
            return
        unmap(self.ordinal, self._opened)
        released[self._rank][0] = 1
        own, held = self._handles[self._rank].process, self.held
        others = [
            (flag, None if handle.process == own else handle.pid)
            for flag, handle in zip(released, self._handles, strict=True)
        ]

        def unreachable() -> bool:
            if held is not None and held() is not None:
                return False
            return all(flag[0] or (pid is not None and is_gone(pid)) for flag, pid in others)

        quarantine.add(unreachable, self._free)


def allocate_shared(fabric: Fabric, ordinal: int, nbytes: int, *, what: str) -> PeerMemory:
    """Zeroed memory of ``nbytes``, in whole granules, of every rank for all devices; collective."""
    memory = together(
        fabric.texts(what), lambda: allocate(ordinal, nbytes, what=what), undo=DeviceMemory.free
    )
    return share(fabric, memory, what=what)


def share(fabric: Fabric, memory: DeviceMemory, *, what: str) -> PeerMemory:
    """Map every rank's memory; collective. The result owns ``memory`` and frees it when closed."""
    failure: MachineError | None = None
    text = ""
    try:
        released = fabric.share(1, what=what)
        try:
            with on(memory.ordinal) as cuda:
                handle = handle_of(cuda, memory.ordinal, memory.pointer, memory.nbytes)
                if _across_processes(fabric):
                    handle = replace(handle, ipc=cuda.ipcGetMemHandle(memory.pointer))
                text = handle.encode()
        except RuntimeError as error:
            failure = MachineError(
                f"{what}: cannot export memory of device {memory.ordinal} to other processes: "
                f"{error}; run the ranks as threads of one process (ringcoll.init_all), on a "
                "system with CUDA IPC, or with transport='host'"
            )
        texts = outcome(fabric.texts(what), text, failure)
    except BaseException:
        memory.free()  # nobody has mapped it yet
        raise
    return _mapped(fabric, texts, released, memory.ordinal, memory.free, what)


def expose(
    fabric: Fabric, ordinal: int, pointer: int, nbytes: int, keep: object, *, what: str
) -> PeerMemory | None:
    """Map memory of every rank that exists already, such as a user's array; collective.

    ``keep`` is kept until no peer can reach the memory any more. None where a rank's memory cannot
    be mapped by the others: it comes from a stream-ordered pool, from virtual memory that cannot be
    exported by descriptors, or the driver refuses.
    """
    released = fabric.share(1, what=what)
    own: ExportedPieces | None = None
    text: str | None = None
    try:
        with on(ordinal) as cuda:
            handle = handle_of(cuda, ordinal, pointer, nbytes)
            if _across_processes(fabric):
                whole = allocation_of(pointer)
                if whole.exportable:
                    ipc = cuda.ipcGetMemHandle(whole.start)
                    handle = replace(handle, offset=pointer - whole.start, ipc=ipc)
                else:
                    own = export_pieces(pointer, nbytes)
                    handle = replace(handle, offset=own.offset)
            elif cuda.getDeviceCount() > 1 and not allocation_of(pointer).exportable:
                _grant_all(cuda, ordinal, pointer, nbytes)
            text = handle.encode()
    except (MachineError, RuntimeError, OSError) as error:
        _log.info("%s: cannot export memory of device %d: %s", what, ordinal, error)
    try:
        texts, exports = _split(outcome(fabric.texts(what), [text, own and own.encode()], None))
        if None in texts:
            return None
        opened: list[Callable[[], None]] = []
        imported: dict[int, int] | None = {}
        if any(export is not None for export in exports):
            pairs = list(zip(decode_all(texts), exports, strict=True))
            imported = import_pieces(fabric, pairs, own, ordinal, opened, what)
        if imported is None:
            return None
        return _mapped(
            fabric, texts, released, ordinal, [keep].clear, what, imported=imported, opened=opened
        )
    finally:
        if own is not None:
            own.close()


def _split(answers: Sequence[object]) -> tuple[list[object], list[object]]:
    """Every rank's memory handle, and its exported pieces; neither is decoded yet."""
    for rank, answer in enumerate(answers):
        if not (isinstance(answer, list) and len(answer) == 2):
            raise MachineError(f"rank {rank} sent a malformed answer: {str(answer)[:80]}")
    pairs = [answer for answer in answers if isinstance(answer, list)]
    return [text for text, _ in pairs], [export for _, export in pairs]


def _grant_all(cuda: Any, ordinal: int, pointer: int, nbytes: int) -> None:
    """Let all devices of this process that can use virtual memory of one; pools are refused."""
    others = [
        other
        for other in range(cuda.getDeviceCount())
        if other != ordinal and cuda.deviceCanAccessPeer(other, ordinal)
    ]
    pieces = pieces_of(pointer, nbytes)
    if others:
        grant(pieces, others)


def _across_processes(fabric: Fabric) -> bool:
    return fabric.nranks > 1 and not fabric.threads


def _mapped(
    fabric: Fabric,
    texts: Sequence[object],
    released: list[memoryview],
    ordinal: int,
    free: Callable[[], None],
    what: str,
    *,
    imported: Mapping[int, int] = MappingProxyType({}),
    opened: list[Callable[[], None]] | None = None,
) -> PeerMemory:
    """Map the memory of the ranks' encoded handles, and agree on whether all could.

    ``imported`` are addresses of ranks whose memory is mapped already, ``opened`` what undoes that.
    """
    opened = [] if opened is None else opened
    try:
        handles = decode_all(texts)
    except MachineError:
        free()  # all ranks have read the same: nobody maps anything
        raise
    pointers: list[int] = []
    failure: MachineError | None = None
    try:
        with on(ordinal) as cuda:
            for peer in range(fabric.nranks):
                found = imported.get(peer)
                if found is None:
                    found = pointer_to(cuda, handles, fabric.rank, peer, opened, what)
                pointers.append(found)
    except MachineError as error:
        failure = error
    except RuntimeError as error:
        failure = MachineError(f"{what}: device {ordinal} fails: {error}")
    nbytes = min(handle.nbytes for handle in handles)
    memory = PeerMemory(
        tuple(pointers), nbytes, ordinal, fabric.rank, handles, opened, released, free
    )
    try:
        outcome(fabric.texts(what), True, failure)
    except BaseException:
        memory.close()
        raise
    return memory


def is_gone(pid: int) -> bool:
    """Whether no process has this number any more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
