"""The description of a device array, and the errors for arrays that no call takes.

An error's text begins after the argument's name: the caller prefixes that, the call and the rank.
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
    """A contiguous array of ``count`` elements on a device; ``owner`` keeps its memory alive.

    ``pointer`` is arbitrary where ``nbytes`` is 0. Nobody assigns to the fields, but the class is
    not frozen: every call makes one or two, and a frozen one takes five times as long to make.
    """

    pointer: int
    count: int
    dtype: DType
    nbytes: int
    ordinal: int
    readonly: bool
    owner: Any


def row_of(kind: object) -> DType:
    """The row of an element type in the table of dtypes, the common spelling first."""
    try:
        return _ROWS[kind]  # type: ignore[index]
    except (KeyError, TypeError):
        pass
    try:
        return dtype_of(kind)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"has an unsupported dtype: {error}") from None


def strided(shape: tuple[int, ...], strides: tuple[int, ...], remedy: str) -> ArgumentError:
    """The error for an array with gaps or in another order; ``remedy`` is what to pass."""
    return ArgumentError(
        f"of shape {shape} with strides {strides} is not C-contiguous; pass {remedy}"
    )


def on_host(kind: str, remedy: str) -> ArgumentError:
    """The error for an array in host memory; ``remedy`` is what to pass."""
    return ArgumentError(
        f"is {kind}, but this communicator's ranks are GPUs; pass a device array (comm.xp is cupy "
        f"here; {remedy} makes a copy), or make the communicator with device='cpu'"
    )
