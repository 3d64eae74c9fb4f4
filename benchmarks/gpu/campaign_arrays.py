"""Where the buffers of a campaign lie: bytes of numpy, CuPy or torch, with guards around them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.gpu.campaign_calls import Call, Side, buffers
from benchmarks.gpu.campaign_numbers import POISON, Array
from ringcoll.dtypes import dtype_of

__all__ = ["Held", "Machine", "held", "kinds_of"]

GUARD = 64
"""Bytes before a buffer and behind it."""
ROOM = 8 << 10
"""Bytes of a slab for offsets and gaps beside the largest buffer."""
SIDES: tuple[Side, ...] = ("send", "recv")


def kinds_of(device: str) -> tuple[tuple[str, ...], ...]:
    """The kinds of memory that there are, by library."""
    if device == "cpu":
        return (("symmetric", "numpy"),)
    try:
        import torch
    except ImportError:
        return (("symmetric", "cupy"),)
    with_torch = (("symmetric torch", "torch"),) if torch.cuda.is_available() else ()
    return (("symmetric", "cupy"), *with_torch)


@dataclass(frozen=True, slots=True)
class Machine:
    """A rank's communicators and memory.

    Attributes:
        comms: two of the same ranks.
        most: bytes of the largest buffer.
        stream: of GPU ranks.
        tensors: the same stream for torch, where torch is there.
        slabs: arrays that are kept, by kind and side.

    """

    comms: tuple[Any, Any]
    most: int
    stream: Any = None
    tensors: Any = None
    slabs: dict[tuple[str, Side], Any] = field(default_factory=dict)

    def settle(self) -> None:
        """Wait for everything that is enqueued, and raise what went wrong there."""
        for comm in self.comms:
            comm.synchronize()
        if self.stream is not None:
            import cupy

            cupy.cuda.runtime.deviceSynchronize()

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """The stream is CuPy's current one, and torch's."""
        with contextlib.ExitStack() as held:
            if self.stream is not None:
                held.enter_context(self.stream)
            if self.tensors is not None:
                import torch

                held.enter_context(torch.cuda.stream(self.tensors))
            yield

    def slab(self, kind: str, side: Side) -> Any:
        """The large array of that kind; its first use is collective."""
        if (kind, side) not in self.slabs:
            self.slabs[kind, side] = _bytes(self.comms[0], kind, self.most + ROOM)
        return self.slabs[kind, side]


@dataclass(frozen=True, slots=True)
class Held:
    """A buffer of a call.

    Attributes:
        raw: its bytes, with the guards.
        start: where it begins in them.
        nbytes: its own.

    """

    raw: Any
    start: int
    nbytes: int

    def image(self, inside: Array) -> Array:
        """All bytes, of which the buffer's are those of ``inside``."""
        whole = np.full(len(self.raw), POISON, np.uint8)
        whole[self.start : self.start + self.nbytes] = inside.view(np.uint8)
        return whole

    def fill(self, inside: Array) -> None:
        """Write the buffer, and poison around it."""
        image = self.image(inside)
        if isinstance(self.raw, np.ndarray):
            self.raw[:] = image
        elif _is_torch(self.raw):
            import torch

            self.raw.copy_(torch.from_numpy(image))
        else:
            self.raw.set(image)

    def read(self) -> Array:
        """A copy of all bytes."""
        if isinstance(self.raw, np.ndarray):
            return self.raw.copy()
        found: Array = self.raw.cpu().numpy() if _is_torch(self.raw) else self.raw.get()
        return found

    def view(self, dtype: str, part: slice | None = None) -> Any:
        """The buffer, or a part of it in elements, as a new array."""
        row = dtype_of(dtype)
        first, last = 0, self.nbytes
        if part is not None:
            first, last = part.start * row.itemsize, part.stop * row.itemsize
        inside = self.raw[self.start + first : self.start + last]
        if not _is_torch(self.raw):
            return inside.view(row.numpy)
        import torch

        return inside.view(getattr(torch, row.name))


def held(machine: Machine, call: Call, rank: int) -> dict[Side, Held]:
    """A rank's buffers of a call; symmetric memory is asked for on all ranks alike."""
    sizes = [buffers(call, peer) for peer in range(call.nranks)]
    item, guard = call.numpy.itemsize, 0 if call.made == "whole" else GUARD
    found = {}
    for side, kind, offset in zip(SIDES, call.kinds, call.offsets, strict=True):
        starts = [guard + (offset + peer * call.skew) * item for peer in range(call.nranks)]
        ends = [
            start + size[side] * item + guard
            for start, size in zip(starts, sizes, strict=True)
            if side in size
        ]
        if not ends:
            continue
        if call.made == "slab":
            raw = machine.slab(kind, side)[: max(ends)]
        else:
            raw = _bytes(machine.comms[call.second], kind, max(ends))
        if side in sizes[rank]:
            found[side] = Held(raw, starts[rank], sizes[rank][side] * item)
    return found


def _bytes(comm: Any, kind: str, nbytes: int) -> Any:
    if kind == "symmetric":
        return comm.empty(nbytes, "uint8")
    if kind == "symmetric torch":
        return comm.empty(nbytes, "uint8", like="torch")
    if kind == "torch":
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    if kind == "cupy":
        import cupy

        return cupy.empty(nbytes, "uint8")
    return np.empty(nbytes, np.uint8)


def _is_torch(array: Any) -> bool:
    return type(array).__module__.partition(".")[0] == "torch"
