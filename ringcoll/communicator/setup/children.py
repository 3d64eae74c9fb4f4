"""The members of a communicator that split or shrink makes."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import numpy as np

from ringcoll.config import Config
from ringcoll.errors import ArgumentError, ArgumentTypeError, MismatchError

_COLOR = struct.Struct("<qq")
_NO_COLOR = -(1 << 63)
_LARGEST = (1 << 63) - 1


def pack_color(color: int | None, key: int, rank: int, config: Config) -> bytes:
    """A rank's colour, key, and the options that the ranks of a colour share, as bytes."""
    where = f"split on rank {rank}"
    if color is not None:
        color = _whole(where, "color", color, 0, _LARGEST)
    key = _whole(where, "key", key, -_LARGEST, _LARGEST)
    return _COLOR.pack(_NO_COLOR if color is None else color, key) + config.agreed()


def ranks_of_color(colors: Sequence[bytes], rank: int) -> list[int]:
    """The ranks of the colour of ``rank``, by their keys and then by their old ranks."""
    rows = [_COLOR.unpack_from(part) for part in colors]
    members = [other for other, (color, _) in enumerate(rows) if color == rows[rank][0]]
    options = [colors[other][_COLOR.size :].decode(errors="replace") for other in members]
    for other, given in zip(members, options, strict=True):
        if given != options[0]:
            raise MismatchError(
                f"split, color {rows[rank][0]}: rank {members[0]} was given {options[0]} and rank "
                f"{other} {given}; pass the same config on every rank of a color"
            )
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
