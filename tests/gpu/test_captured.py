"""What a communicator refuses while its last call's stream is being captured in a CUDA graph."""

from __future__ import annotations

import ctypes

import pytest

import ringcoll
from ringcoll.errors import LaunchRefused
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from tests.gpu.fake_gpus import FakeBuffer, fake

pytestmark = needs_compiler

RELAXED = 2


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


class Refusal(RuntimeError):
    """What CUDA answers to a thread that would disturb a capture, which it ends."""

    status = 900


def test_close_beside_a_capture_of_another_thread_does_it_no_harm(monkeypatch):
    """Also one that begins where the last call went, once that has been waited for."""
    gpus = fake(monkeypatch, 1, sms=24)
    (comm,) = ringcoll.init_all([0], device="cuda", timeout=20)
    relaxed, freed = [False], list[str]()
    comm.all_reduce(FakeBuffer(comm, 100).array, stream=Stream())

    def exchange(mode) -> int:
        relaxed[0], before = mode._obj.value == RELAXED, relaxed[0]
        ctypes.pointer(mode._obj)[0] = RELAXED if before else 0
        return 0

    def guard(name: str) -> None:
        function = getattr(gpus, name)

        def guarded(*words):
            if not relaxed[0]:
                raise Refusal(name)
            freed.append(name)
            return function(*words)

        monkeypatch.setattr(gpus, name, guarded)

    wait = gpus.streamSynchronize

    def waits(stream) -> None:
        wait(stream)
        monkeypatch.setattr(gpus, "streamIsCapturing", lambda stream: stream == 7)

    monkeypatch.setattr(gpus, "streamSynchronize", waits)
    monkeypatch.setattr(gpus, "cuThreadExchangeStreamCaptureMode", exchange)
    for name in ("free", "freeHost", "streamDestroy"):
        guard(name)
    comm.close()
    assert {*freed} == {"free", "freeHost", "streamDestroy"}
    assert relaxed == [False]
    gpus.close()
