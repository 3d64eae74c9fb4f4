"""Sparse matrices in the calls of cupyx: their sizes travel first, then their three arrays.

The matrix that receives takes its shape and its number of elements from the one that is sent, as in
CuPy, and its dtype too.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ringcoll.arguments.checks import checked_root
from ringcoll.communicator.group import current
from ringcoll.communicator.public import Communicator
from ringcoll.cuda.arrays import stream_pointer
from ringcoll.cupyx.matrices import (
    ARRAYS,
    FORMATS,
    HEADER_WORDS,
    Header,
    arrays_of,
    assign,
    made,
    split,
)
from ringcoll.dtypes import Op, dtype_of
from ringcoll.errors import ArgumentError, ArgumentTypeError, MismatchError


class SparseCalls:
    """The calls of one rank on sparse matrices; ``name`` and the rank begin each refusal."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._xp = comm, comm.xp

    @contextlib.contextmanager
    def on(self, name: str, stream: Any) -> Iterator[None]:
        """Let the rank's device and the call's stream be the current ones."""
        if current() is not None:
            raise self._refusal(
                name,
                "sparse matrices inside ringcoll.group(): the host waits for their sizes; "
                "make the call outside the group",
            )
        with contextlib.ExitStack() as stack:
            if self._xp is not np:
                ordinal = int(self._comm.device.partition(":")[2])
                stack.enter_context(self._xp.cuda.Device(ordinal))
                if stream is not None:
                    if not hasattr(stream, "__enter__"):  # a handle, or another library's stream
                        stream = self._xp.cuda.ExternalStream(stream_pointer(stream))
                    stack.enter_context(stream)
            elif stream is not None:
                raise self._refusal(name, "CPU ranks have no streams; leave stream out")
            yield

    # -- the calls --------------------------------------------------------------------------------

    def all_reduce(self, matrix: Any, out: Any, op: Op) -> None:
        """Reduce at rank 0 and broadcast, as CuPy does."""
        self.reduce(matrix, out, 0, op, name="all_reduce")
        self.broadcast(out, 0, name="all_reduce")

    def reduce(self, matrix: Any, out: Any, root: int, op: Op, *, name: str = "reduce") -> None:
        """Combine in CuPy's order: the root's matrix first, then the others' by rank."""
        combine = self._operator(name, op)
        mine = self._is_root(name, root)
        headers = self._headers(name, [matrix], out if mine else None, one_shape=True)
        parts = self._gathered(name, matrix, headers, root)
        if mine:
            first = parts.pop(root)
            self._combine(combine, [first, *parts], out)

    def broadcast(self, matrix: Any, root: int, *, name: str = "broadcast") -> None:
        """Give every rank the matrix of ``root``."""
        mine = self._is_root(name, root)
        header = self._headers(name, [matrix] if mine else [], matrix)[root][0]
        arrays = self._own(matrix) if mine else self._new(header)
        for array in arrays:
            self._comm.broadcast(array, None, root)
        if not mine:
            assign(matrix, arrays, header.shape)

    def reduce_scatter(self, matrices: Any, out: Any, op: Op) -> None:
        """Rank q combines the matrices at index q of all ranks, by rank."""
        combine = self._operator("reduce_scatter", op)
        columns = self._exchanged("reduce_scatter", matrices, out, one_shape=True)
        self._combine(combine, columns, out)

    def all_gather(self, matrix: Any, out: Any) -> None:
        """Append the matrices of all ranks to the list ``out``."""
        append = self._list("all_gather", out)
        append(self._gathered("all_gather", matrix, self._headers("all_gather", [matrix]), None))

    def gather(self, matrix: Any, out: Any, root: int) -> None:
        """Append the matrices of all ranks to the list ``out`` of ``root``."""
        mine = self._is_root("gather", root)
        append = self._list("gather", out) if mine else _discard
        append(self._gathered("gather", matrix, self._headers("gather", [matrix]), root))

    def scatter(self, matrices: Any, out: Any, root: int) -> None:
        """Rank q gets the matrix at index q of the list of ``root``."""
        mine = self._is_root("scatter", root)
        rows = self._listed("scatter", matrices) if mine else []
        headers = self._headers("scatter", rows, out, one_each=True)[root]
        received = self._new(headers[self._comm.rank])
        for k, array in enumerate(received):
            counts = [header.sizes[k] for header in headers]
            self._comm.scatter_v(self._joined(rows, k), array, counts, root=root)
        assign(out, received, headers[self._comm.rank].shape)

    def all_to_all(self, matrices: Any, out: Any) -> None:
        """Append to ``out`` what each rank has at this rank's index."""
        self._list("all_to_all", out)(self._exchanged("all_to_all", matrices, None))

    def send(self, matrix: Any, peer: int) -> None:
        """Send the sizes, then the arrays."""
        self._comm.send(self._array(self._words("send", [matrix])), peer)
        for array in self._own(matrix):
            self._comm.send(array, peer)

    def recv(self, out: Any, peer: int) -> None:
        """Receive the sizes, then the arrays."""
        self._check("recv", "out_array", out)
        words = self._xp.empty(HEADER_WORDS, np.int64)
        self._comm.recv(words, peer)
        header = self._arrived("recv", words)
        arrays = self._new(header)
        for array in arrays:
            self._comm.recv(array, peer)
        self._take("recv", out, arrays, header)

    def send_recv(self, matrix: Any, out: Any, peer: int) -> None:
        """Exchange matrices with ``peer``."""
        self._check("send_recv", "out_array", out)
        words = self._xp.empty(HEADER_WORDS, np.int64)
        sent = self._array(self._words("send_recv", [matrix]))
        self._comm.sendrecv(sent, peer, words, peer)
        header = self._arrived("send_recv", words)
        arrays = self._new(header)
        for own, array in zip(self._own(matrix), arrays, strict=True):
            self._comm.sendrecv(own, peer, array, peer)
        self._take("send_recv", out, arrays, header)

    # -- what they are made of --------------------------------------------------------------------

    def _headers(
        self,
        name: str,
        matrices: Sequence[Any],
        out: Any = None,
        *,
        one_each: bool = False,
        one_shape: bool = False,
    ) -> list[list[Header]]:
        """The headers of all ranks' matrices; what does not fit is refused on all ranks alike.

        A row has a header for each matrix, with ``one_each`` for each rank, and the format of the
        matrix that receives.
        """
        if out is not None:
            self._check(name, "out_array", out)
        width = HEADER_WORDS * (self._comm.nranks if one_each else 1) + 1
        rows = self._rows_of_all(name, self._words(name, matrices, width, out))
        found = [
            [
                header
                for at in range(0, width - 1, HEADER_WORDS)
                if (header := Header.of_words(row[at : at + HEADER_WORDS])) is not None
            ]
            for row in rows
        ]
        whole = next((headers for headers in found if headers), None)
        if whole is None:
            raise self._refusal(name, "no rank has passed a sparse matrix; make the same call")
        first = whole[0]
        for rank, headers in enumerate(found):
            for header, other in zip(headers, whole, strict=False):
                if header.kind() != first.kind():
                    raise self._refusal(
                        name,
                        f"the ranks' matrices are {first.kind()} and, on rank {rank}, "
                        f"{header.kind()}; pass matrices of one format and dtype",
                    )
                if one_shape and header.shape != other.shape:
                    raise self._refusal(
                        name,
                        f"the ranks' matrices have the shapes {other.shape} and, on rank "
                        f"{rank}, {header.shape}; pass matrices of one shape",
                    )
            if rows[rank][-1] not in (0, 1 + FORMATS.index(first.format)):
                raise self._refusal(
                    name,
                    f"the matrices are {first.format} and out_array of rank {rank} is "
                    f"{FORMATS[rows[rank][-1] - 1]}; pass out_array in the format {first.format}",
                )
        return found

    def _rows_of_all(self, name: str, row: list[int]) -> list[tuple[int, ...]]:
        """Every rank's row, over the control plane.

        A kernel that waits for them would hold up what another rank must still do on its device
        before it makes this call: CuPy allocates, frees and loads kernels to combine matrices.
        """
        state, layout = self._comm._state, struct.Struct(f"<{len(row)}q")
        state.yield_to_worker()
        own, what = layout.pack(*row), f"{name} of sparse matrices"
        parts = state.together(lambda: state.fabric.allgather(own, what=what))
        for rank, part in enumerate(parts):
            if len(part) != layout.size:
                raise MismatchError(
                    f"{what}: rank {rank} has sent {len(part)} bytes of sizes, rank "
                    f"{self._comm.rank} {layout.size}; use one version of ringcoll"
                )
        return [layout.unpack(part) for part in parts]

    def _words(
        self, name: str, matrices: Sequence[Any], width: int = HEADER_WORDS, out: Any = None
    ) -> list[int]:
        """The headers of matrices, and zeros up to ``width``, the format of ``out`` last."""
        words = [word for m in matrices for word in self._header(name, m).words()]
        words += [0] * (width - len(words))
        if out is not None:
            words[-1] = 1 + FORMATS.index(out.format)
        return words

    def _array(self, words: list[int]) -> Any:
        return self._xp.array(words, np.int64)

    def _header(self, name: str, matrix: Any) -> Header:
        self._check(name, "in_array", matrix)
        data, first, second = arrays_of(matrix)
        try:
            known = dtype_of(data.dtype), dtype_of(first.dtype)
        except ArgumentTypeError as error:
            raise self._refusal(name, f"in_array: {error}", ArgumentTypeError) from None
        if first.dtype != second.dtype:
            raise self._refusal(
                name, f"in_array has indices of {first.dtype} and {second.dtype}; pass one dtype"
            )
        rows, columns = matrix.shape
        kinds = known[0].numpy, known[1].numpy, known[1].numpy
        sizes = data.size, first.size, second.size
        return Header(matrix.format, kinds, (int(rows), int(columns)), sizes)

    def _check(self, name: str, argument: str, matrix: Any) -> None:
        found = getattr(matrix, "format", None)
        if found not in ARRAYS or len(matrix.shape) != 2:
            what = f"of format {found!r}" if hasattr(matrix, "nnz") else type(matrix).__name__
            raise self._refusal(
                name,
                f"{argument} is {what}, wanted a sparse matrix in csr, csc or coo with two "
                f"dimensions; pass {argument}.tocsr()",
                ArgumentTypeError,
            )

    def _gathered(
        self, name: str, matrix: Any, headers: list[list[Header]], root: int | None
    ) -> list[Any]:
        """The matrices of all ranks, at ``root`` alone or, for None, everywhere."""
        rows = [row[0] for row in headers]
        here = root in (None, self._comm.rank)
        moved = []
        for k, own in enumerate(self._own(matrix)):
            counts = [row.sizes[k] for row in rows]
            wide = self._xp.empty(sum(counts), own.dtype) if here else None
            if root is None:
                self._comm.all_gather_v(own, wide, counts)
            else:
                self._comm.gather_v(own, wide, counts, root=root)
            if here:
                moved.append(split(wide, counts))
        self._await()
        parts = zip(*moved, strict=True)
        return [made(matrix, part, h) for part, h in zip(parts, rows if here else [], strict=True)]

    def _exchanged(self, name: str, matrices: Any, out: Any, *, one_shape: bool = False) -> Any:
        """The matrices that all ranks have at this rank's index."""
        rows = self._listed(name, matrices)
        headers = self._headers(name, rows, out, one_each=True, one_shape=one_shape)
        sent = headers[self._comm.rank]
        received = [row[self._comm.rank] for row in headers]
        moved = []
        for k in range(3):
            own = self._joined(rows, k)
            counts = [header.sizes[k] for header in received]
            wide = self._xp.empty(sum(counts), own.dtype)
            self._comm.all_to_all_v(own, [header.sizes[k] for header in sent], wide, counts)
            moved.append(split(wide, counts))
        self._await()
        parts = zip(*moved, strict=True)
        return [made(rows[0], part, h) for part, h in zip(parts, received, strict=True)]

    def _await(self) -> None:
        """Wait for the data, and raise what failed, before CuPy computes with them.

        CuPy may wait for the device while it holds Python's lock, which the threads of other ranks
        need to make the same calls.
        """
        self._comm.synchronize()

    def _is_root(self, name: str, root: int) -> bool:
        return checked_root(name, self._comm.rank, self._comm.nranks, root) == self._comm.rank

    def _own(self, matrix: Any) -> list[Any]:
        return [self._xp.ascontiguousarray(array) for array in arrays_of(matrix)]

    def _new(self, header: Header) -> list[Any]:
        return [
            self._xp.empty(size, kind)
            for size, kind in zip(header.sizes, header.dtypes, strict=True)
        ]

    def _joined(self, matrices: Sequence[Any], k: int) -> Any:
        """One of the three arrays, of all matrices; None of none."""
        return self._xp.concatenate([arrays_of(m)[k] for m in matrices]) if matrices else None

    def _arrived(self, name: str, words: Any) -> Header:
        self._await()
        header = Header.of_words(words.tolist())
        if header is None:
            raise self._refusal(name, "the peer has sent no sparse matrix; make the same call")
        return header

    def _take(self, name: str, out: Any, arrays: list[Any], header: Header) -> None:
        if out.format != header.format:
            raise self._refusal(
                name,
                f"out_array is {out.format} and the matrix that has come {header.format}; "
                f"pass out_array in the format {header.format}",
            )
        assign(out, arrays, header.shape)

    def _listed(self, name: str, matrices: Any) -> Sequence[Any]:
        n = self._comm.nranks
        if not isinstance(matrices, (list, tuple)) or len(matrices) != n:
            found = len(matrices) if isinstance(matrices, (list, tuple)) else "no list of"
            raise self._refusal(
                name, f"in_array has {found} matrices, wanted a list of {n}, one for each rank"
            )
        return matrices

    def _list(self, name: str, out: Any) -> Callable[[list[Any]], None]:
        if not isinstance(out, list):
            raise self._refusal(
                name,
                f"out_array is a {type(out).__name__}, wanted a list, to which the matrices "
                f"of all ranks are appended",
                ArgumentTypeError,
            )
        return out.extend

    def _combine(self, combine: Callable[[Any, Any], Any], parts: Sequence[Any], out: Any) -> None:
        """Combine matrices in this order, and assign the result to ``out``."""
        result = functools.reduce(combine, parts).asformat(out.format)
        assign(out, arrays_of(result), result.shape)

    def _product(self, a: Any, b: Any) -> Any:
        """The product of two matrices, on the current stream.

        CuPy 14.2 does not tell cuSPARSE to make it there: it takes the stream that this thread's
        handle had before, the default one at first. On 4 H200 an all_reduce with "prod" on a
        stream of its own sent what lay in the product's memory before.
        """
        if self._xp is not np:
            from cupy_backends.cuda.libs import cusparse

            cuda = self._xp.cuda
            handle = cuda.device.get_cusparse_handle()
            cusparse.setStream(handle, cuda.get_current_stream().ptr)
        return a * b

    def _operator(self, name: str, op: Op) -> Callable[[Any, Any], Any]:
        if op not in ("sum", "prod"):
            raise self._refusal(name, f"op={op!r}: sparse matrices take 'sum' and 'prod'")
        return operator.add if op == "sum" else self._product

    def _refusal(
        self, name: str, why: str, kind: type[ArgumentError | ArgumentTypeError] = ArgumentError
    ) -> Exception:
        return kind(f"{name} on rank {self._comm.rank}: {why}")


def _discard(_matrices: list[Any]) -> None:
    """What a rank does with matrices that are gathered elsewhere."""
