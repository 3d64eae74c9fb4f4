"""Passing virtual memory between processes: who has it offers descriptors, the others map them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ringcoll.cuda.device import on
from ringcoll.cuda.virtual_memory import export, map_pieces, pieces_of, unmap_pieces
from ringcoll.errors import Error, MachineError
from ringcoll.fabric.base import Fabric
from ringcoll.fabric.mapping import Gather, outcome
from ringcoll.host.fd_passing import MOST, Door, receive
from ringcoll.transports.handles import Reach
from ringcoll.transports.mapping import unmap

__all__ = ["Offer", "fetch", "offer"]

_log = logging.getLogger("ringcoll")
_LARGEST = 1 << 48  # bytes


@dataclass(frozen=True, slots=True)
class Offer:
    """This rank's pieces, for peers that call at its door.

    Args:
        door: where they call.
        descriptors: of the pieces.
        sizes: bytes of each.
        offset: of the memory that is meant in the first one.

    """

    door: Door
    descriptors: tuple[int, ...]
    sizes: tuple[int, ...]
    offset: int

    def encode(self) -> tuple[str, list[int]]:
        """What peers must know, for JSON."""
        return self.door.name, list(self.sizes)

    def close(self) -> None:
        """Take it back; what was passed stays."""
        self.door.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


def offer(pointer: int, nbytes: int) -> Offer:
    """Offer virtual memory of the current device.

    Raises:
        MachineError: it is no virtual memory, or cannot be exported.

    """
    pieces = pieces_of(pointer, nbytes)
    descriptors: list[int] = []
    try:
        for piece in pieces:
            descriptors.append(export(piece))
        door = Door()
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    sizes = tuple(piece.nbytes for piece in pieces)
    return Offer(door, tuple(descriptors), sizes, pointer - pieces[0].start)


def fetch(
    fabric: Fabric,
    said: Sequence[tuple[Reach, object]],
    own: Offer | None,
    ordinal: int,
    opened: list[Callable[[], None]],
    gather: Gather,
    what: str,
) -> dict[int, int] | None:
    """Map what other ranks offer; collective.

    Args:
        fabric: what the ranks share.
        said: every rank's memory, and what it has encoded of its offer; None where it has none.
        own: this rank's.
        ordinal: this rank's device.
        opened: gets what undoes the mappings.
        gather: the exchange to speak over.
        what: the call, for messages.

    Returns:
        The address of the memory of each rank that offers; None if a rank fails to map some.

    """
    found: dict[int, int] = {}
    failure = ""
    try:
        offers = {
            peer: _decoded(reach, answer)
            for peer, (reach, answer) in enumerate(said)
            if answer is not None
        }
        offers.pop(fabric.rank, None)
        received = _received(fabric, [name for name, _ in offers.values()], own)
        try:
            with on(ordinal):
                for (peer, (_, sizes)), fds in zip(offers.items(), received, strict=True):
                    address = map_pieces(fds, sizes, ordinal)
                    opened.append(partial(unmap_pieces, address, sizes))
                    found[peer] = address + said[peer][0].offset
        finally:
            for fds in received:
                for descriptor in fds:
                    os.close(descriptor)
    except (Error, OSError, RuntimeError, ValueError) as error:
        failure = f"rank {fabric.rank}: {error}"
    failures = [text for text in outcome(gather, failure[:1000], None) if text]
    if failures:
        _log.info("%s: virtual memory cannot be mapped by peers: %s", what, failures[0])
        unmap(ordinal, opened)
        return None
    return found


def _received(fabric: Fabric, names: Sequence[str], own: Offer | None) -> list[tuple[int, ...]]:
    door = Door() if own is None else own.door
    try:
        descriptors = () if own is None else own.descriptors
        callers = 0 if own is None else fabric.nranks - 1
        return receive(names, fabric.deadline(), door, descriptors, callers)
    finally:
        door.close()


def _decoded(reach: Reach, answer: Any) -> tuple[str, list[int]]:
    """What a peer has encoded; nothing in it is believed before it was looked at.

    Raises:
        MachineError: it is no offer, or not of this memory.

    """
    try:
        name, sizes = answer
        legal = (
            isinstance(name, str)
            and 0 < len(sizes) <= MOST
            and all(type(nbytes) is int and 0 < nbytes < _LARGEST for nbytes in sizes)
            and reach.offset + reach.nbytes <= sum(sizes)
        )
    except (TypeError, ValueError):
        legal = False
    if not legal:
        raise MachineError(f"a rank sent a malformed offer of memory: {str(answer)[:80]}")
    return name, sizes
