"""Finding devices, and taking memory of them."""

import sys

import pytest

from ringcoll.cuda import device, quarantine
from ringcoll.cuda.memory import GRANULE, allocate, host_mapped, whole_granules
from ringcoll.errors import ArgumentError, MachineError, OutOfMemory
from tests.gpu.stand_in import CUDARuntimeError, read

pytest.importorskip("cupy")


def test_devices_are_listed(stand_in):
    stand_in(2)
    first, second = device.devices()
    assert str(second) == "device 1 (Stand-in 1, 0000:01:00.0)"
    assert (first.ordinal, first.major, first.sms) == (0, 9, 4)
    assert device.available() is None


def test_no_device_is_a_reason_and_not_an_error(stand_in, monkeypatch):
    runtime = stand_in(0)
    assert device.devices() == ()
    assert "CUDA_VISIBLE_DEVICES" in str(device.available())
    monkeypatch.setattr(runtime, "getDeviceCount", lambda: runtime.setDevice(-1))
    assert device.devices() == ()
    assert "cudaErrorInvalidDevice" in str(device.available())
    monkeypatch.setattr(runtime, "is_hip", True, raising=False)
    assert "ROCm" in str(device.available())


def test_without_cupy_there_are_no_devices(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    assert device.devices() == ()
    assert "[cu13]" in str(device.available())


def test_without_a_driver_cupy_is_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "cupy")
    monkeypatch.setattr(device, "_has_driver", lambda: False)
    monkeypatch.setattr(device, "runtime", lambda: pytest.fail("imported CuPy"))
    assert device.devices() == ()
    assert "no NVIDIA driver: libcuda.so.1" in str(device.available())


def test_old_devices_are_refused(stand_in, monkeypatch):
    runtime = stand_in(1)
    old = {**runtime.getDeviceProperties(0), "major": 6}
    monkeypatch.setattr(runtime, "getDeviceProperties", lambda _ordinal: old)
    assert len(device.devices()) == 1
    assert "need compute capability 7.0" in str(device.available())


def test_a_device_is_selected_for_a_while(stand_in):
    runtime = stand_in(2)
    with device.on(1) as cuda:
        assert cuda.getDevice() == 1
        with device.on(1):
            assert cuda.getDevice() == 1
        with pytest.raises(KeyError), device.on(0):
            raise KeyError
        assert cuda.getDevice() == 1
    assert runtime.getDevice() == 0


@pytest.mark.parametrize(("asked", "got"), [(0, 1), (1, 1), (GRANULE, 1), (GRANULE + 1, 2)])
def test_memory_is_zeroed_and_comes_in_whole_granules(stand_in, asked, got):
    runtime = stand_in(2)
    memory = allocate(1, asked)
    assert memory.nbytes == got * GRANULE == whole_granules(asked)
    assert read(memory.pointer, memory.nbytes) == bytes(memory.nbytes)
    assert runtime.memory[memory.pointer][2] == 1
    memory.free()
    memory.free()
    assert not runtime.memory


def test_too_much_names_need_and_room(stand_in, monkeypatch):
    stand_in(1, room=3 * GRANULE)
    freed = []

    class Pool:
        def free_all_blocks(self):
            freed.append(True)

    monkeypatch.setattr("cupy.get_default_memory_pool", Pool)
    kept = allocate(0, 1)
    with pytest.raises(
        OutOfMemory, match=r"empty needs 8\.0 MiB .* device 0, but only 4\.0 MiB .*6\.0"
    ):
        allocate(0, 4 * GRANULE, what="empty")
    assert freed
    assert kept.pointer
    with pytest.raises(ArgumentError):
        allocate(0, -1)


def test_another_failure_is_told_and_leaks_nothing(stand_in, monkeypatch):
    runtime = stand_in(1)

    def fails(*_args):
        raise CUDARuntimeError(700)

    monkeypatch.setattr(runtime, "memset", fails)
    with pytest.raises(MachineError, match="cudaErrorIllegalAddress"):
        allocate(0, 1)
    assert not runtime.memory
    monkeypatch.setattr(runtime, "malloc", fails)
    with pytest.raises(MachineError, match=r"cannot allocate 2\.0 MiB on device 0"):
        allocate(0, 1)


def test_memory_that_no_kernel_is_waited_for_is_neither_zeroed_nor_made_room_for(
    stand_in, monkeypatch
):
    """A kernel that runs may wait for the thread that allocates, and freeing waits for all."""
    runtime = stand_in(1, room=3 * GRANULE)

    def waits(*_args):
        raise AssertionError("waited")

    monkeypatch.setattr("ringcoll.cuda.memory.sweep", waits)
    monkeypatch.setattr("ringcoll.cuda.memory.on_own_stream", waits)
    monkeypatch.setattr("cupy.get_default_memory_pool", waits)
    kept = allocate(0, 5, waits=False)
    assert runtime.memory
    with pytest.raises(OutOfMemory):
        allocate(0, 4 * GRANULE, waits=False)
    kept.free()
    assert not runtime.memory


def test_host_memory_for_kernels(stand_in):
    runtime = stand_in(1)
    mapped = host_mapped(100, ordinal=0)
    assert (len(mapped.host), mapped.host.tobytes()) == (100, bytes(100))
    mapped.host[3] = 7
    assert read(mapped.device, 4) == b"\0\0\0\7"
    mapped.free()
    mapped.free()
    assert not runtime.host
    with pytest.raises(ArgumentError):
        host_mapped(0, ordinal=0)


def test_memory_waits_until_nobody_can_reach_it(caplog):
    state, freed = {"out": False}, []
    quarantine.add(lambda: state["out"], lambda: freed.append(1))
    quarantine.sweep()
    assert (freed, quarantine.waiting()) == ([], 1)
    state["out"] = True
    quarantine.sweep()
    quarantine.sweep()
    assert (freed, quarantine.waiting()) == ([1], 0)

    def fails():
        raise RuntimeError("lost")

    with caplog.at_level("WARNING", "ringcoll"):
        quarantine.add(lambda: True, fails)
    assert "cannot free quarantined memory of a GPU: lost" in caplog.text
