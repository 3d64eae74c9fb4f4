"""Sparse matrices over numpy with the attributes of CuPy's and SciPy's."""

from __future__ import annotations

from typing import Any

import numpy as np


class Sparse:
    """What the three formats share; ``*`` is the product of matrices, as on CuPy's."""

    format = ""
    data: Any
    _shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def nnz(self) -> int:
        return int(self.data.size)

    def triples(self) -> tuple[Any, Any, Any]:
        """Elements, their rows and their columns."""
        raise NotImplementedError

    def todense(self) -> Any:
        data, row, col = self.triples()
        dense = np.zeros(self.shape, self.data.dtype)
        np.add.at(dense, (row, col), data)
        return dense

    def asformat(self, name: str) -> Any:
        return self if name == self.format else of_dense(self.todense(), name)

    def __add__(self, other: Sparse) -> Any:
        return of_dense(self.todense() + other.todense(), "csr")  # as CuPy's of coo does

    def __mul__(self, other: Sparse) -> Any:
        return of_dense(self.todense() @ other.todense(), "csr")


class Compressed(Sparse):
    axis = 0

    def __init__(self, arrays: Any, shape: tuple[int, int]) -> None:
        self.data, self.indices, self.indptr = arrays
        self._shape = tuple(shape)
        self._has_sorted_indices = True

    def triples(self) -> tuple[Any, Any, Any]:
        major = np.repeat(np.arange(self.indptr.size - 1), np.diff(self.indptr))
        pair = (major, self.indices)
        return self.data, pair[self.axis], pair[1 - self.axis]


class Csr(Compressed):
    format = "csr"


class Csc(Compressed):
    format, axis = "csc", 1


class Coo(Sparse):
    format = "coo"

    def __init__(self, arrays: Any, shape: tuple[int, int]) -> None:
        self.data, (self.row, self.col) = arrays
        self._shape = tuple(shape)
        self.has_canonical_format = True

    def triples(self) -> tuple[Any, Any, Any]:
        return self.data, self.row, self.col


def of_dense(dense: Any, name: str) -> Any:
    """A matrix of the elements that are not 0."""
    row, col = np.nonzero(dense)
    if name == "csc":
        col, row = np.nonzero(dense.T)
    data = dense[row, col]
    row, col = row.astype(np.int32), col.astype(np.int32)
    if name == "coo":
        return Coo((data, (row, col)), dense.shape)
    major, minor, size = (row, col, dense.shape[0]) if name == "csr" else (col, row, dense.shape[1])
    indptr = np.searchsorted(major, np.arange(size + 1)).astype(np.int32)
    return (Csr if name == "csr" else Csc)((data, minor, indptr), dense.shape)


def empty(dtype: Any, name: str) -> Any:
    """A matrix to receive into, as CuPy's own tests make it."""
    data, a, b = np.empty(1, dtype), np.empty(1, np.int32), np.empty(1, np.int32)
    return (
        Coo((data, (a, b)), (0, 0))
        if name == "coo"
        else {"csr": Csr, "csc": Csc}[name]((data, a, b), (0, 0))
    )
