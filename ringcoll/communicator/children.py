"""The members of a communicator that split or shrink makes."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import numpy as np

from ringcoll.errors import ArgumentError, ArgumentTypeError

_COLOR = struct.Struct("<qq")
_NO_COLOR = -(1 << 63)
_LARGEST = (1 << 63) - 1


def pack_color(color: int | None, key: int, rank: int) -> bytes:
    """A rank's colour and key as bytes."""
    where = f"split on rank {rank}"
    if color is not None:
        color = _whole(where, "color", color, 0, _LARGEST)
    key = _whole(where, "key", key, -_LARGEST, _LARGEST)
    return _COLOR.pack(_NO_COLOR if color is None else color, key)


def ranks_of_color(colors: Sequence[bytes], rank: int) -> list[int]:
    """The ranks of the colour of ``rank``, by their keys and then by their old ranks."""
    rows = [_COLOR.unpack(part) for part in colors]
    members = (other for other, (color, _) in enumerate(rows) if color == rows[rank][0])
    return sorted(members, key=lambda other: (rows[other][1], other))


def remaining(exclude: Sequence[int], lost: set[int], rank: int, nranks: int) -> list[int]:
    """The ranks that are left without those that are ``lost`` or excluded."""
    where = f"shrink on rank {rank}"
    if not isinstance(exclude, Iterable):
        raise ArgumentTypeError(f"{where}: exclude={exclude!r}, wanted a list of ranks")
    out = lost.union(_whole(where, "exclude", other, 0, nranks - 1) for other in exclude)
    if rank in out:
        raise ArgumentError(f"{where}: exclude names this rank itself")
    return [other for other in range(nranks) if other not in out]


def _whole(where: str, argument: str, value: object, least: int, most: int) -> int:
    """An integer argument within its limits."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        if least <= value <= most:
            return int(value)
        raise ArgumentError(
            f"{where}: {argument}={value}, wanted an integer from {least} to {most}"
        )
    raise ArgumentTypeError(f"{where}: {argument}={value!r}, wanted an integer")
