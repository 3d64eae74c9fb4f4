"""Pinned host memory that all ranks' devices reach: for devices that do not reach each other.

Its pages are what CPU ranks share: of this process where ranks are threads, else of a descriptor
that every process has mapped. Each process pins what it uses and gets device addresses; kernels
then reach a peer's part over PCIe as they would reach it over a link between GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringcoll.cuda.device import on
from ringcoll.errors import MachineError, OutOfMemory
from ringcoll.fabric.base import Fabric
from ringcoll.fabric.mapping import outcome
from ringcoll.host.limits import size
from ringcoll.host.pages import whole_pages
from ringcoll.transports.handles import decode_all, handle_of
from ringcoll.transports.peers import PeerMemory

_PORTABLE, _MAPPED = 1, 2  # cudaHostRegister's flags: for all devices, and with their addresses
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


def allocate_hosted(fabric: Fabric, ordinal: int, nbytes: int, *, what: str) -> PeerMemory:
    """Zeroed, pinned host memory of every rank that all ranks' devices reach; collective.

    The ranks agree on ``nbytes``, which is rounded up to whole pages.
    """
    released = fabric.share(1, what=what)
    parts = fabric.share(nbytes, what=what)
    gather = fabric.texts(what)
    pinned = _Pinned(ordinal, parts)
    # Ranks of one process have the same pages, which can be pinned once only: each its own.
    others = fabric.nranks > 1 and not fabric.threads
    failure: MachineError | None = None
    text = ""
    whole, rank = whole_pages(nbytes), fabric.rank
    try:
        with on(ordinal) as cuda:
            pinned.pin(cuda, range(fabric.nranks) if others else (rank,))
            text = handle_of(cuda, ordinal, pinned.addresses[rank], whole).encode()
    except RuntimeError as error:
        failure = _refusal(error, nbytes, what)
    try:
        handles = decode_all(outcome(gather, text, failure))
        pointers: tuple[int, ...] = ()
        try:
            with on(ordinal) as cuda:  # once all parts are pinned
                pointers = pinned.pointers(cuda)
        except RuntimeError as error:
            failure = _refusal(error, nbytes, what)
        outcome(gather, True, failure)
    except BaseException:
        pinned.free()
        raise
    return PeerMemory(pointers, whole, ordinal, rank, handles, [], released, pinned.free)


class _Pinned:
    """The parts of all ranks, and which of them this rank has pinned."""

    def __init__(self, ordinal: int, parts: Sequence[memoryview]) -> None:
        self._ordinal = ordinal
        self._parts = [np.frombuffer(part, np.uint8) for part in parts]
        self._pinned: list[int] = []

    @property
    def addresses(self) -> list[int]:
        """Where this process has mapped each part."""
        return [part.ctypes.data for part in self._parts]

    def pin(self, cuda: Any, ranks: Sequence[int]) -> None:
        for rank in ranks:
            part = self._parts[rank]
            cuda.hostRegister(part.ctypes.data, whole_pages(part.nbytes), _PORTABLE | _MAPPED)
            self._pinned.append(part.ctypes.data)

    def pointers(self, cuda: Any) -> tuple[int, ...]:
        """The parts as the current device addresses them."""
        return tuple(cuda.pointerGetAttributes(at).devicePointer for at in self.addresses)

    def free(self) -> None:
        """Unpin all, even if CUDA refuses one, and let go of the pages; no kernel may use them."""
        pinned, self._pinned = self._pinned, []
        with on(self._ordinal) as cuda:
            errors = [error for address in pinned if (error := _unpin(cuda, address))]
        self._parts = []
        if errors:
            raise errors[0]


def _unpin(cuda: Any, address: int) -> RuntimeError | None:
    try:
        cuda.hostUnregister(address)
    except RuntimeError as error:
        return error
    return None


def _refusal(error: RuntimeError, nbytes: int, what: str) -> MachineError:
    kind = OutOfMemory if getattr(error, "status", None) == _OUT_OF_MEMORY else MachineError
    return kind(
        f"{what}: cannot pin {size(nbytes)} of host memory for each rank: {error}; raise the limit "
        "of locked memory (ulimit -l, the container's), or use device='cpu'"
    )
