"""Probing, once, that what a rank writes to a peer's memory arrives there.

Some drivers and virtual machines report peer access and lose the data.
"""

from __future__ import annotations

import ctypes
import secrets
import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from ringcoll.cuda.device import on
from ringcoll.errors import MachineError
from ringcoll.fabric.base import Fabric
from ringcoll.fabric.mapping import outcome, ranks_of
from ringcoll.transports.mapping import NoPeerAccess
from ringcoll.transports.peers import PeerMemory

SLOT = 16
"""Bytes that each pair needs at the start of a rank's memory."""

_NONCE = 16
_PAIR = struct.Struct("<QQ")


def check_pairs(fabric: Fabric, memory: PeerMemory, ordinal: int, *, what: str = "init") -> None:
    """Write to every peer's memory from this rank's device, and read what has arrived; collective.

    ``memory`` has at least :data:`SLOT` bytes for each rank, which are zero afterwards.
    """
    gather = fabric.texts(what)
    rank, nranks = fabric.rank, fabric.nranks
    if memory.nbytes < SLOT * nranks:
        raise MachineError(f"{what}: {memory.nbytes} bytes are too few to check {nranks} ranks")
    nonces = [bytes.fromhex(text) for text in gather(secrets.token_bytes(_NONCE).hex())]
    if any(len(nonce) != _NONCE for nonce in nonces):
        raise MachineError(f"{what}: a rank sent random bytes of a wrong length")
    failure: MachineError | None = None
    try:
        with on(ordinal) as cuda:
            for reader in range(nranks):
                if reader != rank:
                    _write(cuda, memory, rank, reader, _pattern(nonces, rank, reader))
            cuda.deviceSynchronize()
    except RuntimeError as error:
        failure = MachineError(f"{what}: device {ordinal} fails to write to a peer: {error}")
    outcome(gather, True, failure)
    wrong: list[int] = []
    try:
        with on(ordinal) as cuda:
            found = _read(cuda, memory.pointers[rank], SLOT * nranks)
            # Before anybody goes on: what the peers write next must stay.
            cuda.memset(memory.pointers[rank], 0, SLOT * nranks)
            cuda.deviceSynchronize()
        slots = [found[SLOT * writer : SLOT * (writer + 1)] for writer in range(nranks)]
        wrong = [w for w in range(nranks) if w != rank and slots[w] != _pattern(nonces, w, rank)]
    except RuntimeError as error:
        failure = MachineError(f"{what}: device {ordinal} fails to read its own memory: {error}")
    missed = ranks_of(outcome(gather, wrong, failure), nranks)
    lost = [(w, reader) for reader, writers in enumerate(missed) for w in writers]
    if lost:
        pairs = ", ".join(f"from rank {writer} to rank {reader}" for writer, reader in lost)
        raise NoPeerAccess(
            f"{what}: devices report peer access, but writes to a peer do not arrive: {pairs}; "
            "virtual machines and an enabled IOMMU cause this: see `nvidia-smi topo -p2p w`; "
            "transport='host' needs no peer access"
        )


def _pattern(nonces: Sequence[bytes], writer: int, reader: int) -> bytes:
    """Bytes that no other pair writes, and no other run."""
    text = nonces[writer] + nonces[reader] + _PAIR.pack(writer, reader)
    return blake2b(text, digest_size=SLOT).digest()


def _write(cuda: Any, memory: PeerMemory, rank: int, reader: int, pattern: bytes) -> None:
    """Host to this rank's own slot, from there to the peer: over the link that kernels use."""
    staged = memory.pointers[rank] + SLOT * rank
    target = memory.pointers[reader] + SLOT * rank
    source = ctypes.create_string_buffer(pattern, SLOT)
    cuda.memcpy(staged, ctypes.addressof(source), SLOT, cuda.memcpyDefault)
    cuda.memcpy(target, staged, SLOT, cuda.memcpyDefault)
    cuda.deviceSynchronize()  # the staged bytes are used again


def _read(cuda: Any, pointer: int, nbytes: int) -> bytes:
    target = ctypes.create_string_buffer(nbytes)
    cuda.memcpy(ctypes.addressof(target), pointer, nbytes, cuda.memcpyDefault)
    return target.raw
