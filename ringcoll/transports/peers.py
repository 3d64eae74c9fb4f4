"""Reaching the device memory of the other ranks on this host.

In one process a pointer serves all devices that have peer access to each other; between processes
CUDA makes a handle of an allocation, and opening it gives a pointer. Both are exchanged by the
ranks together, and if one of them fails then all raise.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ringcoll.cuda import quarantine
from ringcoll.cuda.device import on
from ringcoll.cuda.driver import allocation_of
from ringcoll.cuda.memory import DeviceMemory, allocate
from ringcoll.cuda.virtual_memory import grant, pieces_of
from ringcoll.errors import MachineError
from ringcoll.fabric.base import Fabric
from ringcoll.fabric.mapping import Gather, outcome
from ringcoll.transports.handles import Reach, describe, reaches_of
from ringcoll.transports.mapping import pointer_to, unmap
from ringcoll.transports.vmm_exchange import Offer, fetch, offer

__all__ = ["PeerMemory", "allocate_shared", "expose", "gathering", "share"]

_log = logging.getLogger("ringcoll")


@dataclass(slots=True, eq=False)
class PeerMemory:
    """One part of memory of every rank, mapped where this rank's kernels reach it.

    Args:
        pointers: every rank's first byte as this rank's device addresses it, in rank order.
        nbytes: size of each part.
        ordinal: this rank's device.
        held: what in this process needs the own part after :meth:`close` too, while it lives.

    """

    pointers: tuple[int, ...]
    nbytes: int
    ordinal: int
    _rank: int
    _reaches: Sequence[Reach]
    _opened: list[Callable[[], None]]  # what closes again what was opened for this rank
    _words: list[memoryview] | None  # of every rank: whether it has let go
    _free: Callable[[], None]  # frees this rank's own part
    held: weakref.ref[Any] | None = None

    def close(self) -> None:
        """Let go of the peers' parts; not collective, idempotent.

        No kernel of this rank may use any part afterwards. Its own part is freed when all others
        have let go of it, or are dead.
        """
        words, self._words = self._words, None
        if words is None:
            return
        unmap(self.ordinal, self._opened)
        words[self._rank][0] = 1
        own, held = self._reaches[self._rank].process, self.held
        others = [
            (word, None if reach.process == own else reach.pid)
            for word, reach in zip(words, self._reaches, strict=True)
        ]

        def unreachable() -> bool:
            if held is not None and held() is not None:
                return False
            return all(word[0] or (pid is not None and _gone(pid)) for word, pid in others)

        quarantine.add(unreachable, self._free)


def allocate_shared(fabric: Fabric, ordinal: int, nbytes: int, *, what: str) -> PeerMemory:
    """Zeroed memory on every rank's device that all ranks reach; collective.

    Args:
        fabric: what the ranks share.
        ordinal: this rank's device.
        nbytes: of each rank; rounded up to whole granules.
        what: the call that asks, the same text on every rank.

    Raises:
        OutOfMemory: need and available are named; on every rank.
        MachineError: a device cannot reach another, or CUDA refuses; on every rank.

    """
    memory: DeviceMemory | None = None
    failure: MachineError | None = None
    try:
        memory = allocate(ordinal, nbytes, what=what)
    except MachineError as error:
        failure = error
    try:
        outcome(gathering(fabric, what), True, failure)
        if memory is None:
            raise MachineError(f"{what}: no memory was made")
    except BaseException:
        if memory is not None:
            memory.free()
        raise
    return share(fabric, memory, what=what)


def share(fabric: Fabric, memory: DeviceMemory, *, what: str) -> PeerMemory:
    """Map every rank's memory; collective.

    Args:
        fabric: what the ranks share.
        memory: this rank's; from now on the result's, to be freed by its ``close``.
        what: the call that asks, the same text on every rank.

    Raises:
        MachineError: a device cannot reach another, or CUDA refuses; on every rank.

    """
    gather = gathering(fabric, what)
    failure: MachineError | None = None
    text = ""
    try:
        words = fabric.share(1, what=what)
        try:
            with on(memory.ordinal) as cuda:
                reach = describe(cuda, memory.ordinal, memory.pointer, memory.nbytes)
                if _foreign(fabric):
                    reach = replace(reach, handle=cuda.ipcGetMemHandle(memory.pointer))
                text = reach.encode()
        except RuntimeError as error:
            failure = MachineError(
                f"{what}: no handle of memory of device {memory.ordinal} for other processes: "
                f"{error}; run the ranks as threads of one process (ringcoll.init_all), on a "
                "system with CUDA IPC, or with transport='host'"
            )
        said = outcome(gather, text, failure)
    except BaseException:
        memory.free()  # nobody has mapped it yet
        raise
    return _mapped(fabric, said, words, memory.ordinal, memory.free, gather, what)


def expose(
    fabric: Fabric, ordinal: int, pointer: int, nbytes: int, keep: object, *, what: str
) -> PeerMemory | None:
    """Map memory of every rank that exists already, such as a user's array; collective.

    Args:
        fabric: what the ranks share.
        ordinal: this rank's device.
        pointer: the first byte, anywhere in an allocation.
        nbytes: at least 1.
        keep: is kept until no peer can reach the memory any more.
        what: the call that asks, the same text on every rank.

    Returns:
        None where a rank's memory cannot be mapped by the others: it comes from a stream-ordered
        pool, from virtual memory that cannot be exported by descriptors, or the driver refuses.

    Raises:
        MachineError: a device cannot reach another; on every rank.

    """
    words = fabric.share(1, what=what)
    own: Offer | None = None
    text: str | None = None
    try:
        with on(ordinal) as cuda:
            reach = describe(cuda, ordinal, pointer, nbytes)
            if _foreign(fabric):
                whole = allocation_of(pointer)
                if whole.exportable:
                    handle = cuda.ipcGetMemHandle(whole.start)
                    reach = replace(reach, offset=pointer - whole.start, handle=handle)
                else:
                    own = offer(pointer, nbytes)
                    reach = replace(reach, offset=own.offset)
            elif cuda.getDeviceCount() > 1 and not allocation_of(pointer).exportable:
                _grant_all(cuda, ordinal, pointer, nbytes)
            text = reach.encode()
    except (MachineError, RuntimeError, OSError) as error:
        _log.info("%s: memory of device %d cannot be exported: %s", what, ordinal, error)
    try:
        gather = gathering(fabric, what)
        said = outcome(gather, [text, own and own.encode()], None)
        texts, offered = _parted(said, what)
        if None in texts:
            return None
        opened: list[Callable[[], None]] = []
        passed: dict[int, int] | None = {}
        if any(each is not None for each in offered):
            offers = list(zip(reaches_of(texts), offered, strict=True))
            passed = fetch(fabric, offers, own, ordinal, opened, gather, what)
        if passed is None:
            return None
        return _mapped(
            fabric, texts, words, ordinal, [keep].clear, gather, what, passed=passed, opened=opened
        )
    finally:
        if own is not None:
            own.close()


def _parted(said: Sequence[object], what: str) -> tuple[list[object], list[object]]:
    """Every rank's description of its memory, and what it offers; neither is believed yet.

    Raises:
        MachineError: a rank has sent something else than two things; it is named.

    """
    texts: list[object] = []
    offered: list[object] = []
    for rank, answer in enumerate(said):
        if not (isinstance(answer, list) and len(answer) == 2):
            raise MachineError(f"{what}: rank {rank} sent a malformed answer: {str(answer)[:80]}")
        texts.append(answer[0])
        offered.append(answer[1])
    return texts, offered


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


def gathering(fabric: Fabric, what: str) -> Gather:
    """The fabric's exchange, of texts."""

    def gather(text: str) -> list[str]:
        return [part.decode() for part in fabric.allgather(text.encode(), what=what)]

    return gather


def _foreign(fabric: Fabric) -> bool:
    """Whether ranks live in other processes."""
    return fabric.nranks > 1 and not fabric.threads


def _mapped(
    fabric: Fabric,
    said: Sequence[object],
    words: list[memoryview],
    ordinal: int,
    free: Callable[[], None],
    gather: Gather,
    what: str,
    *,
    passed: Mapping[int, int] = MappingProxyType({}),
    opened: list[Callable[[], None]] | None = None,
) -> PeerMemory:
    """Map what the ranks have described, and agree on whether all could.

    ``passed`` are addresses of ranks whose memory is mapped already, ``opened`` what undoes that.
    """
    opened = [] if opened is None else opened
    try:
        reaches = reaches_of(said)
    except MachineError:
        free()  # all ranks have read the same: nobody maps anything
        raise
    pointers: list[int] = []
    failure: MachineError | None = None
    try:
        with on(ordinal) as cuda:
            for peer in range(fabric.nranks):
                found = passed.get(peer)
                if found is None:
                    found = pointer_to(cuda, reaches, fabric.rank, peer, opened, what)
                pointers.append(found)
    except MachineError as error:
        failure = error
    except RuntimeError as error:
        failure = MachineError(f"{what}: device {ordinal} fails: {error}")
    nbytes = min(reach.nbytes for reach in reaches)
    memory = PeerMemory(tuple(pointers), nbytes, ordinal, fabric.rank, reaches, opened, words, free)
    try:
        outcome(gather, True, failure)
    except BaseException:
        memory.close()
        raise
    return memory


def _gone(pid: int) -> bool:
    """Whether no process has this number any more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
