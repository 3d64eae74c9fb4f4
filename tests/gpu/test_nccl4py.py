"""nccl4py's names on GPUs: its default stream, streams that are given, and its memory."""

from __future__ import annotations

import pytest

import ringcoll
import ringcoll.nccl4py as nccl
from ringcoll.cuda.device import devices
from tests.gpu.ranks import on

pytestmark = pytest.mark.gpu

NRANKS = [
    pytest.param(1, id="one"),
    pytest.param("each", id="each its own", marks=pytest.mark.multi_gpu),
]


@pytest.mark.parametrize("nranks", NRANKS)
def test_calls(nranks):
    n = min(8, len(devices())) if nranks == "each" else nranks

    def work(inner):
        comm, xp = nccl.Communicator._of(inner), inner.xp
        with on(inner):
            x = nccl.cupy.empty((3, 100), "float32")
            x[:] = comm.rank + 1
            y, part = xp.zeros(400, "float32"), xp.zeros(300 // n, "float32")
            window = comm.register_window(x)
            comm.allreduce(x, y, nccl.SUM)  # on the default stream, as the arithmetic before
            total = n * (n + 1) / 2
            assert y.get().tolist() == [total] * 300 + [0] * 100
            stream = xp.cuda.Stream(non_blocking=True)
            xp.cuda.Device().synchronize()
            comm.reduce_scatter(x, part, nccl.MAX, stream=stream)
            comm.broadcast(x, x, n - 1, stream=stream.ptr)
            stream.synchronize()
            assert {*part.get().tolist()} == {*x.get().ravel().tolist()} == {float(n)}
            raw = nccl.mem_alloc(16)
            raw[:] = 1
            comm.reduce(raw, raw, nccl.SUM, 0)
            assert raw.get().tolist() == [n if comm.rank == 0 else 1] * 16
            window.close()
            comm.finalize()
            assert comm.cuda_dev == xp.cuda.Device().id
            assert comm.get_async_error() == 0

    ringcoll.spawn(work, n, device="cuda", timeout=20)


def test_another_current_stream_is_not_taken():
    """Without ``stream`` it is the default stream, whatever CuPy's current one is."""
    import cupy

    [comm] = nccl.Communicator.init_all(1)
    with cupy.cuda.Stream(non_blocking=True):
        assert comm._how() == {"stream": 0}
    comm.destroy()


@pytest.mark.multi_gpu
def test_a_rank_lives_on_the_current_device():
    import cupy

    with cupy.cuda.Device(1):
        comm = nccl.Communicator.init(1, 0, nccl.get_unique_id())
        x = cupy.ones(3)
        comm.allreduce(x, x, nccl.SUM)
        assert comm.cuda_dev == 1
        assert x.get().tolist() == [1] * 3
    comm.destroy()
