"""Pinned host memory that all ranks' devices reach: for devices that do not reach each other.

Its bytes are what CPU ranks share: of this process where ranks are threads, else memory of a
descriptor that every process has mapped. Each process pins what it uses and gets device addresses;
kernels then reach a peer's part over PCIe as they would reach it over a link between GPUs.
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
from ringcoll.transports.handles import describe, reaches_of
from ringcoll.transports.peers import PeerMemory, gathering

__all__ = ["allocate_hosted"]

_PORTABLE, _MAPPED = 1, 2  # cudaHostRegister's flags: for all devices, and with their addresses
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


def allocate_hosted(fabric: Fabric, ordinal: int, nbytes: int, *, what: str) -> PeerMemory:
    """Zeroed, pinned host memory of every rank that all ranks' devices reach; collective.

    Args:
        fabric: what the ranks share.
        ordinal: this rank's device.
        nbytes: of each rank, the same on all; rounded up to whole pages.
        what: the call that asks, the same text on every rank.

    Raises:
        OutOfMemory: need and available are named; on every rank.
        MachineError: CUDA refuses to pin the memory; on every rank.

    """
    words = fabric.share(1, what=what)
    parts = fabric.share(nbytes, what=what)
    gather = gathering(fabric, what)
    pinned = _Pinned(ordinal, parts)
    # Ranks of one process have the same pages, which can be pinned once only: each its own.
    others = fabric.nranks > 1 and not fabric.threads
    failure: MachineError | None = None
    text = ""
    try:
        with on(ordinal) as cuda:
            pinned.pin(cuda, range(fabric.nranks) if others else (fabric.rank,))
            own = describe(cuda, ordinal, pinned.addresses[fabric.rank], whole_pages(nbytes))
            text = own.encode()
    except RuntimeError as error:
        failure = _refusal(error, nbytes, what)
    try:
        said = outcome(gather, text, failure)
        reaches = reaches_of(said)
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
    whole, rank = whole_pages(nbytes), fabric.rank
    return PeerMemory(pointers, whole, ordinal, rank, reaches, [], words, pinned.free)


class _Pinned:
    """The parts of all ranks, and which of them this rank has pinned."""

    def __init__(self, ordinal: int, parts: Sequence[memoryview]) -> None:
        self._ordinal = ordinal
        self._parts = [np.frombuffer(part, np.uint8) for part in parts]
        self._pinned: list[int] = []

    @property
    def addresses(self) -> list[int]:
        """Where this process finds each part."""
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
        """Unpin, and let go of the pages; idempotent. No kernel may use them any more.

        Raises:
            RuntimeError: CUDA refuses; all others are unpinned all the same.

        """
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
        f"{what}: {size(nbytes)} of host memory a rank, which the devices share, cannot be pinned: "
        f"{error}; raise the limit of locked memory (ulimit -l, the container's), or use "
        "device='cpu'"
    )
