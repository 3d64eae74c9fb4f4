"""What a rank tells its peers about a part of its device's memory, as bytes of fixed layout."""

from __future__ import annotations

import os
import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringcoll.errors import MachineError

__all__ = ["HANDLE_BYTES", "REACH_BYTES", "Reach", "describe", "reaches_of"]

HANDLE_BYTES = 64
"""Length of CUDA's handle for another process."""

# boot id, process, pointer, bytes, offset in the allocation, ordinal, bus address, name, handle
_LAYOUT = struct.Struct(f"<16sQQQQi16s48s{HANDLE_BYTES}s")
_NO_HANDLE = bytes(HANDLE_BYTES)
REACH_BYTES = _LAYOUT.size
"""Length of a :class:`Reach`; of its text it is twice that."""
_LARGEST = 1 << 48  # bytes: beyond any device, and any address that one has


@dataclass(frozen=True, slots=True)
class Reach:
    """One rank's memory, and where it lives.

    Args:
        boot: id of the host's boot.
        pid: the process.
        pointer: the first byte, as that process sees it.
        nbytes: how many.
        offset: of the first byte in the allocation that ``handle`` names.
        ordinal: of the device, as that process numbers it.
        pci: of the device, the same in all processes.
        name: of the device.
        handle: for other processes; zeros where none was made.

    """

    boot: bytes
    pid: int
    pointer: int
    nbytes: int
    offset: int
    ordinal: int
    pci: str
    name: str
    handle: bytes = _NO_HANDLE

    @property
    def process(self) -> tuple[bytes, int]:
        """What ranks of one process have in common."""
        return self.boot, self.pid

    @property
    def exported(self) -> bool:
        """Whether there is a handle for other processes."""
        return self.handle != _NO_HANDLE

    def __str__(self) -> str:
        return f"device {self.ordinal} ({self.name}, {self.pci}) of process {self.pid}"

    def encode(self) -> str:
        """The fixed layout in hexadecimal digits."""
        named = self.name.encode()[:48].decode(errors="ignore").encode()
        return _LAYOUT.pack(
            self.boot,
            self.pid,
            self.pointer,
            self.nbytes,
            self.offset,
            self.ordinal,
            self.pci.encode(),
            named,
            self.handle,
        ).hex()

    @classmethod
    def decode(cls, text: object) -> Reach:
        """What a peer has encoded; nothing in it is believed before it was looked at.

        Raises:
            MachineError: wrong length, text that is none, or numbers out of bounds.

        """
        try:
            if not isinstance(text, str):
                raise ValueError("no text")
            fields = _LAYOUT.unpack(bytes.fromhex(text))
            boot, pid, pointer, nbytes, offset, ordinal, pci, name, handle = fields
            said = cls(
                boot,
                pid,
                pointer,
                nbytes,
                offset,
                ordinal,
                pci.rstrip(b"\0").decode("ascii"),
                name.rstrip(b"\0").decode(),
                handle,
            )
        except (struct.error, ValueError) as error:
            raise MachineError(f"a rank sent a malformed description of memory: {error}") from error
        if (
            not 0 < pointer < _LARGEST << 8
            or not (nbytes < _LARGEST and offset < _LARGEST)
            or ordinal < 0
            or not 0 < pid < 1 << 31
        ):
            raise MachineError(f"a rank sent an impossible description of memory: {said}")
        return said


def reaches_of(said: Sequence[object]) -> list[Reach]:
    """What all ranks have encoded, in rank order.

    Raises:
        MachineError: a rank has sent something else; it is named.

    """
    return [_of(rank, text) for rank, text in enumerate(said)]


def _of(rank: int, text: object) -> Reach:
    try:
        return Reach.decode(text)
    except MachineError as error:
        raise MachineError(f"rank {rank}: {error}") from error


def describe(cuda: Any, ordinal: int, pointer: int, nbytes: int, offset: int = 0) -> Reach:
    """This process's own memory, without a handle yet.

    Args:
        cuda: the CUDA runtime.
        ordinal: of the device.
        pointer: the first byte.
        nbytes: how many.
        offset: of the first byte in its allocation.

    """
    boot = uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    name = cuda.getDeviceProperties(ordinal)["name"].decode(errors="replace")
    pci = cuda.deviceGetPCIBusId(ordinal).lower()
    return Reach(boot, os.getpid(), pointer, nbytes, offset, ordinal, pci, name)
