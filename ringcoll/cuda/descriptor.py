"""What a call needs to know of a device array, and the refusals that all ways to one share.

A refusal begins after the argument's name: who calls puts that, the call and the rank before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringcoll.dtypes import DTYPES, DType, dtype_of
from ringcoll.errors import ArgumentError, ArgumentTypeError

__all__ = ["DeviceArray", "on_host", "row_of", "strided"]

_ROWS: Mapping[np.dtype[Any], DType] = {row.numpy: row for row in DTYPES}


@dataclass(slots=True, eq=False)
class DeviceArray:
    """A contiguous array on a device. Nobody writes to it.

    It is not frozen because every call makes one or two, and a frozen one takes five times as
    long to make.

    Args:
        pointer: the first byte; anything where ``nbytes`` is 0.
        count: elements.
        dtype: their type.
        nbytes: bytes of all.
        ordinal: of the device.
        readonly: the owner forbids writing.
        owner: keeps the memory alive.

    """

    pointer: int
    count: int
    dtype: DType
    nbytes: int
    ordinal: int
    readonly: bool
    owner: Any


def row_of(kind: object) -> DType:
    """The row of an element type, the common spelling first.

    Raises:
        ArgumentTypeError: no collective carries it.

    """
    try:
        return _ROWS[kind]  # type: ignore[index]
    except (KeyError, TypeError):
        pass
    try:
        return dtype_of(kind)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"cannot be carried: {error}") from None


def strided(shape: tuple[int, ...], strides: tuple[int, ...], remedy: str) -> ArgumentError:
    """The refusal of an array with gaps, or in another order; ``remedy`` is what to pass."""
    return ArgumentError(
        f"of shape {shape} with strides {strides} is not contiguous in C order; pass {remedy}"
    )


def on_host(kind: str, remedy: str) -> ArgumentError:
    """The refusal of an array in host memory; ``remedy`` is what to pass."""
    return ArgumentError(
        f"is {kind}: this communicator's ranks are GPUs, and nothing is copied unasked; pass a "
        f"device array (comm.xp is cupy here, or {remedy}), or make the communicator with "
        "device='cpu'"
    )
