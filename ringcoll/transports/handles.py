"""Handles of device memory that ranks send each other, as bytes of fixed layout."""

from __future__ import annotations

import os
import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringcoll.errors import MachineError
from ringcoll.fabric.identity import boot_id

IPC_HANDLE_BYTES = 64
"""Length of CUDA's handle of an allocation for other processes."""

# boot id, process, pointer, bytes, offset in the allocation, ordinal, bus address, name, IPC handle
_LAYOUT = struct.Struct(f"<16sQQQQi16s48s{IPC_HANDLE_BYTES}s")
_NO_HANDLE = bytes(IPC_HANDLE_BYTES)
MEMORY_HANDLE_BYTES = _LAYOUT.size
"""Length of an encoded :class:`MemoryHandle`; of its text it is twice that."""
_LARGEST = 1 << 48  # bytes: beyond any device, and any address that one has


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """What other ranks need to map a rank's device memory.

    ``pointer`` and ``ordinal`` are that process's, ``pci`` is the same in all. ``offset`` is the
    first byte's in the allocation that ``ipc`` names: zeros where there is no handle for other
    processes.
    """

    boot: bytes
    pid: int
    pointer: int
    nbytes: int
    offset: int
    ordinal: int
    pci: str
    name: str
    ipc: bytes = _NO_HANDLE

    @property
    def process(self) -> tuple[bytes, int]:
        """What ranks of one process have in common."""
        return self.boot, self.pid

    @property
    def exported(self) -> bool:
        """Whether other processes can open it."""
        return self.ipc != _NO_HANDLE

    def __str__(self) -> str:
        return f"device {self.ordinal} ({self.name}, {self.pci}) of process {self.pid}"

    def encode(self) -> str:
        """The fixed layout in hexadecimal digits."""
        name = self.name.encode()[:48].decode(errors="ignore").encode()
        numbers = self.pid, self.pointer, self.nbytes, self.offset, self.ordinal
        return _LAYOUT.pack(self.boot, *numbers, self.pci.encode(), name, self.ipc).hex()

    @classmethod
    def decode(cls, text: object) -> MemoryHandle:
        """Decode what a peer has sent, checking every field."""
        try:
            if not isinstance(text, str):
                raise ValueError("no text")
            boot, pid, pointer, nbytes, offset, ordinal, pci, name, ipc = _LAYOUT.unpack(
                bytes.fromhex(text)
            )
            pci, name = pci.rstrip(b"\0").decode("ascii"), name.rstrip(b"\0").decode()
            found = cls(boot, pid, pointer, nbytes, offset, ordinal, pci, name, ipc)
        except (struct.error, ValueError) as error:
            raise MachineError(f"a rank sent a malformed memory handle: {error}") from error
        if (
            not 0 < pointer < _LARGEST << 8
            or not (nbytes < _LARGEST and offset < _LARGEST)
            or ordinal < 0
            or not 0 < pid < 1 << 31
        ):
            raise MachineError(f"a rank sent a memory handle out of bounds: {found}")
        return found


def decode_all(texts: Sequence[object]) -> list[MemoryHandle]:
    """The handles that all ranks have encoded, in rank order."""
    return [_decode(rank, text) for rank, text in enumerate(texts)]


def _decode(rank: int, text: object) -> MemoryHandle:
    try:
        return MemoryHandle.decode(text)
    except MachineError as error:
        raise MachineError(f"rank {rank}: {error}") from error


def handle_of(cuda: Any, ordinal: int, pointer: int, nbytes: int, offset: int = 0) -> MemoryHandle:
    """The handle of this process's own memory; ``offset`` is its place in the allocation."""
    boot = uuid.UUID(boot_id()).bytes
    name = cuda.getDeviceProperties(ordinal)["name"].decode(errors="replace")
    pci = cuda.deviceGetPCIBusId(ordinal).lower()
    return MemoryHandle(boot, os.getpid(), pointer, nbytes, offset, ordinal, pci, name)
