"""cupyx.distributed's methods on CuPy's arrays, on its current stream and on one that is named."""

from __future__ import annotations

import pytest

import ringcoll
from ringcoll.cuda.device import devices
from ringcoll.cupyx import RingcollBackend
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
