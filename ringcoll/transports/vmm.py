"""Passing virtual memory between processes: its owner exports descriptors, the peers map them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ringcoll import log
from ringcoll.cuda.device import on
from ringcoll.cuda.virtual_memory import export, map_pieces, pieces_of, unmap_pieces
from ringcoll.errors import Error, MachineError
from ringcoll.fabric.base import Fabric
from ringcoll.fabric.mapping import outcome
from ringcoll.host.fd_passing import MOST, FdServer, receive
from ringcoll.transports.handles import MemoryHandle
from ringcoll.transports.mapping import unmap

_log = log.logger()
_LARGEST = 1 << 48  # bytes


@dataclass(frozen=True, slots=True)
class ExportedPieces:
    """This rank's exported pieces; the memory begins at ``offset`` in the first."""

    server: FdServer
    descriptors: tuple[int, ...]
    sizes: tuple[int, ...]
    offset: int

    def encode(self) -> tuple[str, list[int]]:
        """What peers must know, for JSON."""
        return self.server.name, list(self.sizes)

    def close(self) -> None:
        """Stop handing them out; what was passed stays mapped."""
        self.server.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


def export_pieces(pointer: int, nbytes: int) -> ExportedPieces:
    """Export virtual memory of the current device."""
    pieces = pieces_of(pointer, nbytes)
    descriptors: list[int] = []
    try:
        for piece in pieces:
            descriptors.append(export(piece))
        server = FdServer()
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    sizes = tuple(piece.nbytes for piece in pieces)
    return ExportedPieces(server, tuple(descriptors), sizes, pointer - pieces[0].start)


def import_pieces(
    fabric: Fabric,
    exports: Sequence[tuple[MemoryHandle, object]],
    own: ExportedPieces | None,
    ordinal: int,
    opened: list[Callable[[], None]],
    what: str,
) -> dict[int, int] | None:
    """Map what other ranks export, by rank; None if a rank fails to map some. Collective.

    ``exports`` has every rank's memory and its encoded pieces, None where it has none; ``opened``
    gets what undoes the mappings.
    """
    found: dict[int, int] = {}
    failure = ""
    try:
        pieces = {
            peer: _decoded(handle, answer)
            for peer, (handle, answer) in enumerate(exports)
            if answer is not None
        }
        pieces.pop(fabric.rank, None)
        received = _received(fabric, [name for name, _ in pieces.values()], own)
        try:
            with on(ordinal):
                for (peer, (_, sizes)), fds in zip(pieces.items(), received, strict=True):
                    address = map_pieces(fds, sizes, ordinal)
                    opened.append(partial(unmap_pieces, address, sizes))
                    found[peer] = address + exports[peer][0].offset
        finally:
            for fds in received:
                for descriptor in fds:
                    os.close(descriptor)
    except (Error, OSError, RuntimeError, ValueError) as error:
        failure = f"rank {fabric.rank}: {error}"
    failures = [text for text in outcome(fabric.texts(what), failure[:1000], None) if text]
    if failures:
        _log.info("%s: peers cannot map virtual memory: %s", what, failures[0])
        unmap(ordinal, opened)
        return None
    return found


def _received(
    fabric: Fabric, names: Sequence[str], own: ExportedPieces | None
) -> list[tuple[int, ...]]:
    server = FdServer() if own is None else own.server
    try:
        descriptors = () if own is None else own.descriptors
        callers = 0 if own is None else fabric.nranks - 1
        return receive(names, fabric.deadline(), server, descriptors, callers)
    finally:
        server.close()


def _decoded(handle: MemoryHandle, answer: Any) -> tuple[str, list[int]]:
    """The name of a peer's server and the sizes of its pieces, checked."""
    try:
        name, sizes = answer
        legal = (
            isinstance(name, str)
            and 0 < len(sizes) <= MOST
            and all(type(nbytes) is int and 0 < nbytes < _LARGEST for nbytes in sizes)
            and handle.offset + handle.nbytes <= sum(sizes)
        )
    except (TypeError, ValueError):
        legal = False
    if not legal:
        raise MachineError(f"a rank sent a malformed export of memory: {str(answer)[:80]}")
    return name, sizes
