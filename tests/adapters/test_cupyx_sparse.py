"""Sparse matrices in cupyx.distributed's calls, in the cases of CuPy's own tests, on CPU ranks."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll.cupyx import RingcollBackend
from ringcoll.cupyx.sparse import SparseCalls
from ringcoll.errors import ArgumentError, ArgumentTypeError, Error
from tests.adapters.sparse import Csr, empty, of_dense

FORMATS = ["csr", "csc", "coo"]
DTYPES = ["float32", "float64", "complex64", "complex128", "bool"]


def among(nranks, work):
    """What ``work(backend)`` returns on each of the ranks, which are threads."""

    def rank(comm):
        return work(RingcollBackend.from_communicator(comm))

    return ringcoll.spawn(rank, nranks, device="cpu", timeout=20)


def dense(seed, shape=(5, 7), dtype="float32"):
    """A matrix with few elements; each seed has another number of them."""
    generator = np.random.default_rng(seed)
    full = generator.integers(-9, 10, shape)
    return np.where(generator.random(shape) < 0.15 * (1 + seed % 4), full, 0).astype(dtype)


def same(matrix, wanted):
    return bool(matrix.shape == wanted.shape and (matrix.todense() == wanted).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("root", [0, 1])
def test_broadcast(kind, dtype, root):
    wanted = dense(root, dtype=dtype)

    def work(backend):
        matrix = of_dense(wanted, kind) if backend.rank == root else empty(dtype, kind)
        backend.broadcast(matrix, root)
        return same(matrix, wanted), matrix.format, str(matrix.data.dtype)

    assert among(2, work) == [(True, kind, dtype)] * 2


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("root", [0, 2])
def test_reduce_and_all_reduce_sum(kind, root):
    wanted = sum(dense(rank) for rank in range(3))

    def work(backend):
        matrix, out, full = (
            of_dense(dense(backend.rank), kind),
            empty("f4", kind),
            empty("f4", kind),
        )
        backend.reduce(matrix, out, root)
        backend.all_reduce(matrix, full)
        untouched = same(matrix, dense(backend.rank))
        return (
            out.shape if backend.rank != root else same(out, wanted),
            same(full, wanted),
            untouched,
        )

    assert among(3, work) == [((True if rank == root else (0, 0)), True, True) for rank in range(3)]


@pytest.mark.parametrize("kind", FORMATS)
def test_prod_is_the_product_of_matrices_from_the_root_on(kind):
    a, b, c = (dense(seed, (4, 4), "float64") + np.eye(4) for seed in (5, 6, 7))

    def work(backend):
        matrix = of_dense([a, b, c][backend.rank], kind)
        out, full = empty("f8", kind), empty("f8", kind)
        backend.reduce(matrix, out, 1, "prod")
        backend.all_reduce(matrix, full, "prod")
        return backend.rank != 1 or same(out, b @ a @ c), same(full, a @ b @ c)

    assert among(3, work) == [(True, True)] * 3


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("op", ["sum", "prod"])
def test_reduce_scatter(kind, op):
    n = 3

    def parts(q):  # the shapes differ from index to index
        return [dense(3 * rank + q, (2 + q, 2 + q), "float64") for rank in range(n)]

    def work(backend):
        matrices = [of_dense(parts(q)[backend.rank], kind) for q in range(n)]
        out = empty("float64", kind)
        backend.reduce_scatter(matrices, out, 2, op)
        one, two, three = parts(backend.rank)
        return same(out, one + two + three if op == "sum" else one @ two @ three)

    assert among(n, work) == [True] * n


@pytest.mark.parametrize("kind", FORMATS)
def test_all_gather_and_gather(kind):
    def work(backend):
        matrix = of_dense(dense(backend.rank), kind)
        gathered: list[Any] = []
        all_of_them: list[Any] = []
        backend.gather(matrix, gathered, 1)
        backend.all_gather(matrix, all_of_them, 2)
        assert [type(m) for m in all_of_them] == [type(matrix)] * 3
        return [
            [same(m, dense(rank)) for rank, m in enumerate(found)]
            for found in (gathered, all_of_them)
        ]

    assert among(3, work) == [[[True] * 3 if rank == 1 else [], [True] * 3] for rank in range(3)]


@pytest.mark.parametrize("kind", FORMATS)
def test_scatter_and_all_to_all(kind):
    n = 3

    def work(backend):
        matrices = [of_dense(dense(10 * backend.rank + q, (q + 1, 6)), kind) for q in range(n)]
        out = empty("f4", kind)
        turned: list[Any] = []
        backend.scatter(matrices if backend.rank == 2 else None, out, 2)
        backend.all_to_all(tuple(matrices), turned)
        mine = backend.rank
        return same(out, dense(20 + mine, (mine + 1, 6))), [
            same(m, dense(10 * rank + mine, (mine + 1, 6))) for rank, m in enumerate(turned)
        ]

    assert among(n, work) == [(True, [True] * n)] * n


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FORMATS)
def test_messages(kind, dtype):
    def work(backend):
        mine, other = dense(backend.rank, dtype=dtype), dense(1 - backend.rank, dtype=dtype)
        out, again = empty(dtype, kind), empty(dtype, kind)
        backend.send_recv(of_dense(mine, kind), out, 1 - backend.rank)
        if backend.rank:
            backend.recv(again, 0)
        else:
            backend.send(of_dense(mine, kind), 1)
            again = out
        return same(out, other), same(again, other)

    assert among(2, work) == [(True, True)] * 2


def test_matrices_without_elements():
    def work(backend):
        matrix, out = of_dense(np.zeros((2, 3)), "csr"), empty("f8", "csr")
        all_of_them: list[Any] = []
        backend.all_reduce(matrix, out)
        backend.all_gather(matrix, all_of_them, 1)
        backend.send_recv(matrix, matrix, 1 - backend.rank)
        return out.nnz, [m.shape for m in all_of_them], matrix.nnz

    assert among(2, work) == [(0, [(2, 3)] * 2, 0)] * 2


def test_what_a_matrix_knew_of_its_old_arrays_is_forgotten():
    """SciPy and CuPy keep whether indices are sorted, and the new ones may not be."""

    def work(backend):
        matrix, triples = empty("f4", "csr"), empty("f4", "coo")
        backend.broadcast(of_dense(dense(1), "csr") if backend.rank == 0 else matrix)
        backend.broadcast(of_dense(dense(1), "coo") if backend.rank == 0 else triples)
        return hasattr(matrix, "_has_sorted_indices"), triples.has_canonical_format

    assert among(2, work)[1] == (False, False)


def refused(work, nranks=2):
    """The texts of what ``work`` raises on each rank, which carries on."""

    def rank(backend):
        with pytest.raises(RuntimeError) as caught:
            work(backend)
        assert isinstance(caught.value, Error)
        x = np.ones(2)
        backend.all_reduce(x, x)
        return type(caught.value).__name__, str(caught.value), x.tolist()

    found = among(nranks, rank)
    assert [x for *_, x in found] == [[nranks] * 2] * nranks
    return [(kind, text) for kind, text, _ in found]


def test_ranks_that_disagree_are_refused_alike():
    def formats(backend):
        matrix = of_dense(dense(0), FORMATS[backend.rank])
        backend.all_reduce(matrix, empty("f4", "csr"))

    def dtypes(backend):
        matrix = of_dense(dense(0, dtype=["f4", "f8"][backend.rank]), "csr")
        backend.gather(matrix, [])

    def shapes(backend):
        backend.reduce(of_dense(dense(0, (2 + backend.rank, 3)), "coo"), empty("f4", "coo"))

    def outs(backend):
        matrix = of_dense(dense(0), ["csr", "coo"][backend.rank])
        backend.scatter([of_dense(dense(q), "csr") for q in range(2)], matrix)

    for work, words in (
        (formats, "are csr of float32 with indices of int32 and, on rank 1, csc of float32"),
        (dtypes, "on rank 1, csr of float64"),
        (shapes, r"shapes (2, 3) and, on rank 1, (3, 3)"),
        (outs, "are csr and out_array of rank 1 is coo; pass out_array in the format csr"),
    ):
        (kind, one), (_, other) = refused(work)
        assert kind == "ArgumentError"
        assert words in one
        assert words in other


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda b, m: b.all_reduce(m, m, "max"), ArgumentError, "op='max': sparse matrices take"),
        (lambda b, m: b.all_reduce(m, np.ones(3)), ArgumentTypeError, "out_array is ndarray"),
        (lambda b, m: b.reduce(m, m, 3), ArgumentError, "root=3 is no rank"),
        (lambda b, m: b.scatter([m, m], m), ArgumentError, "has 2 matrices, wanted a list of 1"),
        (lambda b, m: b.reduce_scatter(m, m, 1), ArgumentError, "no list of matrices"),
        (lambda b, m: b.all_to_all([m], None), ArgumentTypeError, "wanted a list, to which"),
        (lambda b, m: b.gather(m, ()), ArgumentTypeError, "out_array is a tuple"),
        (lambda b, m: b.broadcast(m, 0, 3), ArgumentError, "CPU ranks have no streams"),
        (lambda b, m: b.send(m, 1), ArgumentError, "peer=1 is no rank"),
    ],
)
def test_wrong_arguments_are_refused(call, kind, words):
    with ringcoll.init_all(1, device="cpu")[0] as comm:
        backend = RingcollBackend.from_communicator(comm)
        with pytest.raises(kind) as caught:
            call(backend, of_dense(dense(1), "csr"))
    assert words in str(caught.value)
    assert "on rank 0" in str(caught.value)
    assert isinstance(caught.value, RuntimeError)


def test_other_formats_dimensions_and_dtypes_are_refused():
    class Diagonal(Csr):
        format = "dia"

    with ringcoll.init_all(1, device="cpu")[0] as comm:
        backend = RingcollBackend.from_communicator(comm)
        flat, odd = of_dense(dense(1), "csr"), of_dense(dense(1), "csr")
        flat._shape = (35,)
        odd.data = odd.data.astype("longdouble")
        for matrix, words in (
            (
                Diagonal((np.ones(1), 2, 3), (1, 1)),
                r"format 'dia', wanted .* pass in_array\.tocsr\(\)",
            ),
            (flat, "with two dimensions"),
            (odd, "longdouble|float128"),
        ):
            with pytest.raises(ArgumentTypeError, match=words):
                backend.all_gather(matrix, [], 1)


def test_a_group_is_refused():
    with ringcoll.init_all(1, device="cpu")[0] as comm:
        backend = RingcollBackend.from_communicator(comm)
        matrix = of_dense(dense(1), "csr")
        with pytest.raises(ArgumentError, match=r"inside ringcoll\.group"), ringcoll.group():
            backend.broadcast(matrix)


def test_a_message_into_another_format_is_refused_when_it_has_come():
    def work(backend):
        if backend.rank == 0:
            backend.send(of_dense(dense(1), "csr"), 1)
            return ""
        with pytest.raises(ArgumentError) as caught:
            backend.recv(empty("f4", "csc"), 0)
        return str(caught.value)

    assert "out_array is csc and the matrix that has come csr" in among(2, work)[1]


def test_a_product_is_made_on_the_current_stream(monkeypatch):
    steps: list[object] = []
    library = types.ModuleType("cusparse")
    library.setStream = lambda *given: steps.append(given)  # type: ignore[attr-defined]
    libs = types.ModuleType("libs")
    libs.cusparse = library  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy_backends", types.ModuleType("cupy_backends"))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", libs)
    cuda = types.SimpleNamespace(
        device=types.SimpleNamespace(get_cusparse_handle=lambda: 5),
        get_current_stream=lambda: types.SimpleNamespace(ptr=7),
    )
    comm: Any = types.SimpleNamespace(xp=types.SimpleNamespace(cuda=cuda))
    calls, out = SparseCalls(comm), empty("float64", "csr")

    class Factor:
        format = "csr"

        def __init__(self, matrix):
            self.matrix = matrix

        def __mul__(self, other):
            steps.append("product")
            return Factor(self.matrix * other.matrix)

        def asformat(self, kind):
            return self.matrix.asformat(kind)

    factors = [dense(seed, (4, 4), "float64") for seed in range(3)]
    product = calls._operator("all_reduce", "prod")
    calls._combine(product, [Factor(of_dense(factor, "csr")) for factor in factors], out)
    assert same(out, factors[0] @ factors[1] @ factors[2])
    assert steps == [(5, 7), "product"] * 2
