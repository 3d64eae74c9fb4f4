"""A sparse matrix of CuPy or SciPy as three arrays and a header; nothing of either is imported.

A matrix is any object with their attributes: ``format``, ``shape``, ``data``, and ``indptr`` and
``indices``, or ``row`` and ``col``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringcoll.dtypes import DTYPES, dtype_of

ARRAYS = {
    "csr": ("data", "indptr", "indices"),
    "csc": ("data", "indptr", "indices"),
    "coo": ("data", "row", "col"),
}
FORMATS = list(ARRAYS)
HEADER_WORDS = 8
"""1 + format, dtype, dtype of the indices, rows, columns, sizes of the three arrays."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a rank must know of a matrix before it can receive it."""

    format: str
    dtypes: tuple[np.dtype[Any], np.dtype[Any], np.dtype[Any]]
    shape: tuple[int, int]
    sizes: tuple[int, int, int]

    def words(self) -> list[int]:
        """The header as integers."""
        rows = [DTYPES.index(dtype_of(kind)) for kind in self.dtypes[:2]]
        return [1 + FORMATS.index(self.format), *rows, *self.shape, *self.sizes]

    @staticmethod
    def of_words(words: Sequence[int]) -> Header | None:
        """The header that another rank has sent; None where it has no matrix."""
        number, data, index, rows, columns, *sizes = words
        if not 1 <= number <= len(FORMATS) or max(data, index) >= len(DTYPES) or min(words) < 0:
            return None
        kinds = DTYPES[data].numpy, DTYPES[index].numpy, DTYPES[index].numpy
        return Header(FORMATS[number - 1], kinds, (rows, columns), (sizes[0], sizes[1], sizes[2]))

    def kind(self) -> str:
        """Format and element types, which are the same on all ranks."""
        return f"{self.format} of {self.dtypes[0]} with indices of {self.dtypes[1]}"


def is_sparse(array: Any) -> bool:
    """Whether an array of a call is a sparse matrix, or a list that begins with one."""
    if isinstance(array, (list, tuple)) and array:
        return is_sparse(array[0])
    return hasattr(array, "nnz")


def arrays_of(matrix: Any) -> tuple[Any, Any, Any]:
    """The matrix's three arrays, in the order of ``ARRAYS``."""
    data, first, second = (getattr(matrix, name) for name in ARRAYS[matrix.format])
    return data, first, second


def split(wide: Any, counts: Sequence[int]) -> list[Any]:
    """Copies of the segments: cuSPARSE wants arrays that begin where an allocation does."""
    parts, at = [], 0
    for count in counts:
        parts.append(wide[at : at + count].copy())
        at += count
    return parts


def made(like: Any, arrays: Sequence[Any], header: Header) -> Any:
    """A matrix of the class of ``like``."""
    data, first, second = arrays
    inner = (data, (first, second)) if header.format == "coo" else (data, second, first)
    return type(like)(inner, shape=header.shape)


def assign(matrix: Any, arrays: Sequence[Any], shape: tuple[int, int]) -> None:
    """Give a matrix other arrays and another shape, as CuPy does."""
    for name, array in zip(ARRAYS[matrix.format], arrays, strict=True):
        setattr(matrix, name, array)
    matrix._shape = tuple(shape)
    for name in ("_has_sorted_indices", "_has_canonical_format"):  # what held of the old arrays
        vars(matrix).pop(name, None)
    if matrix.format == "coo":
        matrix.has_canonical_format = False
