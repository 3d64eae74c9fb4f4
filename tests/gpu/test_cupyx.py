"""cupyx.distributed's methods on CuPy's arrays, on its current stream and on one that is named."""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll.cuda.device import devices
from ringcoll.cupyx import RingcollBackend
from ringcoll.cupyx.sparse import SparseCalls
from ringcoll.errors import ArgumentError
from tests.gpu.ranks import on

pytestmark = pytest.mark.gpu

NRANKS = [
    pytest.param(1, id="one"),
    pytest.param("each", id="each its own", marks=pytest.mark.multi_gpu),
]


@pytest.mark.parametrize("nranks", NRANKS)
def test_methods(nranks):
    n = min(8, len(devices())) if nranks == "each" else nranks

    def work(comm):
        backend, xp, rank = RingcollBackend.from_communicator(comm), comm.xp, comm.rank
        with on(comm):
            stream = xp.cuda.Stream(non_blocking=True)
            x = xp.full((n, 300), rank + 1, "float32")
            y, mine, turned = xp.zeros_like(x), xp.zeros(300, "float32"), xp.zeros_like(x)
            xp.cuda.Device().synchronize()
            backend.all_reduce(x, y, stream=stream)
            backend.reduce_scatter(x, mine, 300, "max", stream=stream)
            backend.all_to_all(x, turned, stream=stream)
            stream.synchronize()
            gathered = xp.zeros_like(x)
            backend.all_gather(x[0], gathered, 300)
            backend.broadcast(x, n - 1)
            if n > 1:
                received = xp.zeros(3, "float32")
                backend.send_recv(xp.full(3, rank, "float32"), received, rank ^ 1)
                assert received.get().tolist() == [rank ^ 1] * 3
            backend.barrier()
            ranks = [float(r + 1) for r in range(n)]
            assert {*y.get().ravel().tolist()} == {sum(ranks)}
            assert {*mine.get().tolist()} == {float(n)}
            assert turned.get()[:, 7].tolist() == gathered.get()[:, 299].tolist() == ranks
            assert {*x.get().ravel().tolist()} == {float(n)}

    n -= n % 2 if n > 1 else 0  # each rank has a peer
    ringcoll.spawn(work, n, device="cuda", timeout=20)


@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
@pytest.mark.parametrize("nranks", NRANKS)
def test_sparse_matrices(nranks, kind):
    from cupyx.scipy import sparse

    n = min(8, len(devices())) if nranks == "each" else nranks
    n -= n % 2 if n > 1 else 0  # each rank has a peer

    def work(comm):
        backend, xp, rank = RingcollBackend.from_communicator(comm), comm.xp, comm.rank

        full = [np.random.default_rng(seed).integers(0, 5, (6, 6)) for seed in range(11 * n + 8)]
        full = [(one * (np.eye(6) + np.tri(6))).astype("float64") for one in full]

        def matrix(seed):
            return matrices[seed]

        def empty():
            return getattr(sparse, f"{kind}_matrix")((1, 1), dtype="float64")

        def check(found, wanted):
            comm.synchronize()  # what failed is an error, not wrong elements
            assert found.format == kind
            assert found.shape == (6, 6)
            assert (found.todense().get() == wanted).all()

        with on(comm):
            # Made before the calls: CuPy may wait for a device and hold Python's lock meanwhile,
            # which the other rank's thread needs to make the call that this device waits for.
            matrices = [getattr(sparse, f"{kind}_matrix")(xp.asarray(one)) for one in full]
            every = full[:n]
            out, part, mine, came = empty(), empty(), empty(), empty()
            gathered: list[Any] = []
            turned: list[Any] = []
            at_root: list[Any] = []
            backend.all_reduce(matrix(rank), out, "sum")
            check(out, sum(every))
            stream, factor = xp.cuda.Stream(non_blocking=True), matrix(rank)
            xp.cuda.Device().synchronize()
            backend.all_reduce(factor, out, "prod", stream)
            stream.synchronize()
            check(out, functools.reduce(operator.matmul, every))
            backend.reduce(matrix(rank), part, n - 1)
            if rank == n - 1:
                check(part, sum(every))
            sent = matrix(7) if rank == 0 else empty()
            comm.synchronize()
            backend.broadcast(sent)
            check(sent, full[7])
            backend.all_gather(matrix(rank), gathered, 1)
            backend.gather(matrix(rank), at_root, 0)
            backend.all_to_all([matrix(10 * rank + q) for q in range(n)], turned)
            backend.scatter([matrix(q) for q in range(n)], mine, 0)
            check(mine, every[rank])
            backend.reduce_scatter([matrix(q) for q in range(n)], mine, 1)
            check(mine, n * every[rank])
            for r in range(n):
                check(gathered[r], every[r])
                check(turned[r], full[10 * r + rank])
            assert len(at_root) == (n if rank == 0 else 0)
            if n > 1:
                backend.send_recv(matrix(rank), came, rank ^ 1)
                check(came, every[rank ^ 1])
                if rank % 2:
                    backend.recv(came, rank - 1)
                else:
                    backend.send(matrix(3), rank + 1)
                    came = matrix(3)
                check(came, full[3])

    ringcoll.spawn(work, n, device="cuda", timeout=20)


@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
def test_a_product_is_made_on_the_current_stream(kind, monkeypatch):
    """Whichever stream cuSPARSE was last given."""
    import cupy
    from cupy.cuda.device import get_cusparse_handle
    from cupyx import cusparse
    from cupyx.scipy import sparse

    library, seen = cusparse._cusparse, []

    class Watched:
        """The library, which notes the stream of each part of a product."""

        def __getattr__(self, name):
            found = getattr(library, name)
            if not name.startswith(("spGEMM_work", "spGEMM_compute", "spGEMM_copy")):
                return found

            def noted(handle, *rest):
                seen.append(library.getStream(handle))
                return found(handle, *rest)

            return noted

    def work(comm):
        with on(comm):
            factors = [getattr(sparse, f"{kind}_matrix")(cupy.eye(300) * (k + 1)) for k in range(3)]
            calls = SparseCalls(comm)
            out = getattr(sparse, f"{kind}_matrix")((1, 1), dtype="float64")
            cupy.cuda.Device().synchronize()
            other, stream = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
            library.setStream(get_cusparse_handle(), other.ptr)
            monkeypatch.setattr(cusparse, "_cusparse", Watched())
            with stream:
                calls._combine(calls._operator("all_reduce", "prod"), factors, out)
                found = out.data.copy()
            stream.synchronize()
            return found.get().tolist(), {*seen} == {stream.ptr}

    assert ringcoll.spawn(work, 1, device="cuda", timeout=20) == [([6.0] * 300, True)]


def test_host_arrays_are_refused():
    def work(comm):
        import numpy as np

        backend, x = RingcollBackend.from_communicator(comm), np.zeros(3)
        with pytest.raises(ArgumentError):
            backend.all_reduce(x, x)

    ringcoll.spawn(work, 1, device="cuda", timeout=20)


@pytest.mark.multi_gpu
def test_a_rank_lives_on_the_current_device():
    import cupy

    with cupy.cuda.Device(1):
        backend = RingcollBackend(1, 0)
        x = cupy.arange(3)
        backend.all_reduce(x, x)
        backend.barrier()
        backend.stop()
        assert backend.communicator.device == "cuda:1"
        assert x.get().tolist() == [0, 1, 2]
