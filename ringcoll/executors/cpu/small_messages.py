"""Sends and receives that have come before, as the compiled part takes them.

A small message goes through the landing zone of its pair: what its two ends wait for and post there
depends on no count and on no address, see ``executors/point_to_point.py``. ``native/messages.h``
enters the messages of one call, moves those whose flags have come, and leaves the others to Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ringcoll.arguments.calls import Call
from ringcoll.executors.point_to_point import Pairs
from ringcoll.executors.rows import Signal, Wait
from ringcoll.views import start_of

MOST = 32
"""Messages of a call that the compiled part takes."""

_Piece = tuple[int, slice] | None


class Kept(Protocol):
    """What is asked of kept sends and receives."""

    calls: Sequence[tuple[Call, _Piece, _Piece]]
    later: bool
    taken: int


def parts_of(
    kept: Kept, buffers: tuple[Any, Any], pairs: Pairs, most: int
) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """The messages of a call and what the rank sends to itself; None: they are not known yet.

    Nothing of both: the compiled part takes none of them. ``most`` are the bytes of a message.
    """
    messages, copies = [], []
    numbers = {id(words): rank for rank, words in enumerate(pairs.shared_state.words)}
    for call, send, recv in kept.calls:
        pieces = [_bytes(piece, buffers) for piece in (send, recv) if piece is not None]
        if not pieces or not call.exact or pieces[0][2] > most:
            return (), ()
        if len(pieces) == 2:
            (source, at, nbytes), (destination, to, _) = pieces
            copies.append((source, at, destination, to, nbytes))
            continue
        sends = send is not None
        known = pairs.known(call, sends=sends)
        if known is None:
            return None
        prepared, landings = known
        hello = prepared.hello
        messages.append(
            (
                (call.peer, sends),
                *(prepared.own, prepared.other),
                (hello.signature, hello.record, hello.send, hello.recv),
                *pieces[0],
                tuple(
                    (
                        flags_of(landing.waits, numbers),
                        flags_of(landing.signals, numbers),
                        start_of(landing.zone),
                    )
                    for landing in landings
                ),
            )
        )
    if not messages or len(messages) > MOST or len(copies) > MOST:
        return (), ()
    return tuple(messages), tuple(copies)


def _bytes(piece: tuple[int, slice], buffers: tuple[Any, Any]) -> tuple[int, int, int]:
    """The argument in which a piece lies, where, and how many bytes it has."""
    number, part = piece
    size = buffers[number].itemsize
    return number, part.start * size, (part.stop - part.start) * size


def flags_of(
    flags: tuple[Wait, ...] | tuple[Signal, ...], numbers: dict[int, int]
) -> tuple[tuple[int, int, int], ...]:
    """The waits or the signals of a row: rank, index and count."""
    return tuple((numbers[id(flag[0])], flag[1], flag[2]) for flag in flags)
