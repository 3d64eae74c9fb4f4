"""What a communicator refuses while its last call's stream is being captured in a CUDA graph."""

from __future__ import annotations

import pytest

import ringcoll
from ringcoll.errors import LaunchRefused
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from tests.cuda.fake_gpus import FakeBuffer, fake

pytestmark = needs_compiler


class Stream:
    """Kept by the call that it is given to."""

    def __cuda_stream__(self):
        return 0, 7


def test_neither_synchronize_nor_close_ends_a_capture(monkeypatch):
    gpus = fake(monkeypatch, 1, sms=24)
    (comm,) = ringcoll.init_all([0], device="cuda", timeout=20)
    x = FakeBuffer(comm, 100)
    comm.all_reduce(x.array, stream=Stream())
    monkeypatch.setattr(gpus, "streamIsCapturing", lambda stream: stream == 7)
    with pytest.raises(LaunchRefused, match=r"rank 0: .*synchronize .* captured"):
        comm.synchronize()
    with pytest.raises(LaunchRefused, match=r"rank 0: .*close .* captured"):
        comm.close()
    monkeypatch.setattr(gpus, "streamIsCapturing", lambda stream: False)
    comm.all_reduce(x.array, stream=Stream())
    comm.synchronize()
    comm.close()
    gpus.close()
