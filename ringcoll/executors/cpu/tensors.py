"""Torch's tensors of the CPU, read by the compiled part of the package, where it has been built.

Two CPU ranks on two cores, all_reduce of 256 bytes: of what a tensor took more than an array most
was the dozen of Python's calls that look at it, which a rank of another process drives out of the
caches.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringcoll.arguments.host_arrays import Reader
from ringcoll.dtypes import DTYPES
from ringcoll.executors.cpu import small_calls

_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
"""DLPack's, by numpy's letters."""

_BFLOAT = 4


def tensor_reader(torch: Any, otherwise: Reader) -> Reader:
    """A reader of tensors, which leaves to ``otherwise`` those that it does not take."""
    part = small_calls._small_calls
    table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if part is None or table is None:
        return otherwise
    codes = ((_code_of(row.numpy), row.numpy) for row in DTYPES)
    kinds = tuple((code, 8 * kind.itemsize, kind) for code, kind in codes if code is not None)
    try:
        reader: Reader = part.TensorReader(table, kinds, otherwise)
    except ValueError:  # another version of the table
        return otherwise
    return reader


def _code_of(kind: np.dtype[Any]) -> int | None:
    """DLPack's code of a type; None of one that Python reads."""
    return _BFLOAT if kind.name == "bfloat16" else _CODES.get(kind.kind)
