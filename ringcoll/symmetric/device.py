"""Symmetric memory of devices: arrays of one size on every rank that every rank's kernels reach.

The counterpart of :mod:`ringcoll.symmetric.host`. Arrays are CuPy's; those of bfloat16 and
float8 have ml_dtypes' types, on which CuPy (from 14 on) stores and converts, though it computes
with few of them.

Device memory is mapped and freed only inside ``empty``, ``register`` and ``close``, never by a
finalizer: both wait for the device, on which a kernel may be waiting for this very thread.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ringcoll.cuda.arrays import DeviceArray
from ringcoll.cuda.device import on
from ringcoll.cuda.memory import allocate, whole_granules
from ringcoll.cuda.quarantine import sweep
from ringcoll.dtypes import DType, dtype_of
from ringcoll.errors import ArgumentError, ArgumentTypeError, MachineError, OutOfMemory
from ringcoll.fabric.base import Fabric
from ringcoll.symmetric.agreed import AgreedBlocks, Finish, extent_of
from ringcoll.symmetric.blocks import Block, Reader, Table
from ringcoll.transports.peers import PeerMemory, allocate_shared, expose, share

_lock = threading.RLock()  # of the tables' users and readers; a signal handler may close one


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a block; ``pointer`` is its first byte for this rank's device."""

    pointer: int
    memory: PeerMemory


class _Lease:
    """What all views of an array refer to, so that its end is theirs."""

    __slots__ = ("__weakref__",)


class CudaSymmetricMemory(AgreedBlocks[Part]):
    """The device arrays of a communicator that its ranks reach without a copy.

    ``ranks`` are the parent's ranks of this communicator's. ``settle`` waits until nothing that
    this process has launched uses freed arrays any more; None waits for the device. Where devices
    are not ``reached`` by each other, arrays are plain ones of the rank's own device, and calls go
    through pinned host memory.
    """

    def __init__(
        self,
        fabric: Fabric,
        ordinal: int,
        parent: CudaSymmetricMemory | None = None,
        ranks: Sequence[int] = (),
        *,
        settle: Callable[[], None] | None = None,
        reached: bool = True,
    ) -> None:
        super().__init__(fabric, parent, ranks)
        self.ordinal = ordinal
        self._settle = settle
        self._reached = reached
        with _lock:
            for table in _chain(self._table):
                table.users += 1

    def empty(
        self, shape: Sequence[int] | int, dtype: object, lacks: MachineError | None = None
    ) -> Any:
        """A CuPy array whose memory every rank can reach; collective, same bytes on all ranks.

        ``lacks`` says why this rank cannot have the array, if so: all ranks raise it.
        """
        fabric = self._usable("empty")
        row = dtype_of(dtype)
        extent = extent_of(shape)
        _array(0, (0,), row, None, self.ordinal)  # refused before anybody takes memory
        nbytes = prod(extent) * row.itemsize
        if not self._reached:
            self._agree(fabric, "empty", nbytes, f"{extent} {row}", lacks=lacks)
            return _plain(extent, row, self.ordinal)
        block = self._take(fabric, nbytes, f"{extent} {row}", lacks)
        if block is None:
            return _array(0, extent, row, None, self.ordinal)
        self._inform()
        lease = _Lease()
        self._announce(lease, block)
        block.parts[fabric.rank].memory.held = weakref.ref(lease)
        return _array(block.start, extent, row, lease, self.ordinal)

    @property
    def reaches(self) -> bool:
        """Whether peers may reach an array."""
        return self._reached

    def promise(self, shape: Sequence[int] | int, dtype: object) -> tuple[Any, Finish]:
        """The same in a group: the array of this rank, and what lets peers reach it; collective."""
        fabric, row, extent = self._usable("empty"), dtype_of(dtype), extent_of(shape)
        _array(0, (0,), row, None, self.ordinal)
        nbytes = prod(extent) * row.itemsize
        about, lease = f"{extent} {row}", _Lease()
        if not (self._reached and nbytes):
            made = (
                _array(0, extent, row, None, self.ordinal)
                if self._reached
                else _plain(extent, row, self.ordinal)
            )

            def agree() -> None:
                self._agree(fabric, "empty", nbytes, about)

            return made, agree
        memory = allocate(self.ordinal, nbytes, what="empty")

        def finish() -> None:
            unused, _ = self._agree(fabric, "empty", nbytes, about)
            self._forget(fabric, "empty", unused)
            start = memory.pointer
            shared = share(fabric, memory, what="empty")
            shared.held = weakref.ref(lease)
            self._announce(lease, self._table.add(_parts(shared), start, memory.nbytes))
            self._inform()

        return _array(memory.pointer, extent, row, lease, self.ordinal), finish

    def register(self, array: DeviceArray) -> bool:
        """Let peers reach an existing array until :meth:`unregister`; collective, same bytes.

        False for memory of stream-ordered pools, virtual memory that was not made to be exported,
        and devices that do not reach each other.
        """
        fabric = self._usable("register")
        if array.ordinal != self.ordinal:
            raise ArgumentError(
                f"register: the array is on device {array.ordinal}, but this rank is on device "
                f"{self.ordinal}"
            )

        def parts() -> Sequence[Part] | None:
            if not self._reached:
                return None
            pointer, nbytes = array.pointer, array.nbytes
            memory = expose(fabric, self.ordinal, pointer, nbytes, array.owner, what="register")
            return None if memory is None else _parts(memory)

        about = f"{array.count} of {array.dtype}"
        found = self._register(fabric, array.pointer, array.nbytes, about, parts)
        self._inform()
        return found

    def unregister(self, array: DeviceArray) -> None:
        """Undo :meth:`register`; not collective, the peers are informed by the next call."""
        self._withdraw(array.pointer)

    def trim(self) -> None:
        """Release the blocks that every rank has freed; collective, no kernel may be running."""
        super().trim()
        sweep()

    def peer_pointer(self, rank: int, mapping: int, offset: int, nbytes: int = 0) -> int:
        """A rank's memory, in the block and at the offset that its ``lookup`` has found."""
        return self._part(rank, mapping, offset, nbytes).pointer + offset

    def pointers(self) -> dict[int, tuple[int, ...]]:
        """Every rank's first byte of every block as this rank's device addresses it, by number."""
        return {
            number: tuple(part.pointer for part in parts)
            for number, parts in self._table.all_parts().items()
        }

    def close(self) -> None:
        """Release all blocks that no open child sees; no kernel may be running. Not collective."""
        if self._fabric is None:
            return
        self._fabric = None
        tables = list(_chain(self._table))
        with _lock:
            for table in tables:
                table.users -= 1
            unseen = [table for table in tables if not table.users]
        for table in unseen:
            table.readers.clear()
            self._let_go(list(table.blocks.values()))
            table.remove(list(table.blocks))
        self._table = Table(self._table.rank, None, ())

    def _whole(self, nbytes: int) -> int:
        return whole_granules(nbytes)

    def _new(self, fabric: Fabric, nbytes: int) -> tuple[Sequence[Part], int]:
        parts = _parts(allocate_shared(fabric, self.ordinal, nbytes, what="empty"))
        return parts, parts[fabric.rank].pointer

    def _quiet(self) -> None:
        if self._settle is not None:
            self._settle()
        else:
            with on(self.ordinal) as cuda:
                cuda.deviceSynchronize()

    def read_by(self, reader: Reader) -> None:
        """Let ``reader`` copy the addresses whenever blocks of this or a parent's table change."""
        with _lock:
            for table in _chain(self._table):
                table.readers.add(reader)

    def _inform(self) -> None:
        """Let kernels that wait find new memory, and no freed memory under its number.

        Peers may name memory to a kernel that waits: this rank may launch none after it.
        """
        with _lock:
            readers = list(self._table.readers)
        for reader in readers:
            with contextlib.suppress(OutOfMemory):  # its own communicator's next call raises it
                reader.update()

    def _let_go(self, blocks: Sequence[Block[Part]]) -> None:
        self._inform()  # before all ranks have forgotten the numbers, which are then used again
        for block in blocks:
            block.parts[0].memory.close()


def _chain(table: Table[Part]) -> Iterator[Table[Part]]:
    """A table, its parent's, and so on."""
    above: Table[Part] | None = table
    while above is not None:
        yield above
        above = above.parent


def _parts(memory: PeerMemory) -> tuple[Part, ...]:
    return tuple(Part(pointer, memory) for pointer in memory.pointers)


def _plain(extent: tuple[int, ...], row: DType, ordinal: int) -> Any:
    """A CuPy array of CuPy's own memory."""
    import cupy

    with on(ordinal):
        return cupy.ndarray(extent, row.numpy)


def _array(pointer: int, extent: tuple[int, ...], row: DType, owner: object, ordinal: int) -> Any:
    """The CuPy array of this memory, which keeps ``owner`` alive."""
    import cupy

    memory = cupy.cuda.UnownedMemory(pointer, prod(extent) * row.itemsize, owner, ordinal)
    try:
        return cupy.ndarray(extent, row.numpy, cupy.cuda.MemoryPointer(memory, 0))
    except ValueError as error:
        raise ArgumentTypeError(
            f"empty: CuPy {cupy.__version__} has no arrays of {row}: {error}; CuPy 14 has, and "
            "so has torch"
        ) from error
