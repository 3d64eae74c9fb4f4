"""The same on real devices: ranks as threads and as processes that share the devices there are."""

import pytest

from ringcoll.cuda import device
from ringcoll.cuda.arrays import device_array, from_pointer, stream_pointer
from ringcoll.cuda.memory import allocate, host_mapped
from ringcoll.errors import ArgumentError

pytestmark = pytest.mark.gpu


def test_kernels_reach_every_peer(scenario):
    assert scenario("shared", 3) == [[[1], [2], [3]]] * 3


def test_symmetric_arrays(scenario):
    assert scenario("symmetric", 2) == [[[0.0, 1.0], True, 12.0, 0]] * 2


def test_arrays_of_cupys_pool_are_registered(scenario):
    assert scenario("registered", 2) == [[True, [1, 2]]] * 2


def test_too_much_is_refused(scenario):
    zero, one = scenario("refused", 2)
    assert zero.startswith("OutOfMemory: empty needs 4.0 TiB")
    assert one.startswith("OutOfMemory: ")


@pytest.mark.alone
def test_nothing_is_left(scenario):
    assert scenario("repeated", 2) == [True, True]


@pytest.mark.multi_gpu
def test_ranks_of_two_devices(scenario):
    assert scenario("shared", 2) == [[[1], [2]]] * 2


@pytest.mark.multi_gpu
@pytest.mark.alone  # the copies of rows in the devices' queues would come late beside others
def test_plain_memory_that_calls_use_again_is_mapped(scenario):
    for seen in scenario("used_again", 2):
        assert seen.pop("wrong") == 0
        for name, programs in seen.items():
            if name.endswith("elsewhere"):
                assert programs == [0, 1], name  # rank 0 passes new memory, then the known
            else:
                assert programs[:2] == [0, 0] and programs[3:] == [1, 1, 1], (name, programs)


@pytest.mark.multi_gpu
@pytest.mark.alone  # the copies of rows in the devices' queues would come late beside others
def test_captured_calls_on_memory_that_was_mapped(scenario):
    assert scenario("used_again_in_graphs", 2) == [[1, 0, 0]] * 2


def test_devices():
    assert device.available() is None
    first = device.devices()[0]
    assert first.sms > 0
    assert first.pci.count(":") == 2


def test_host_memory_that_kernels_write():
    import cupy

    mapped = host_mapped(64, ordinal=0)
    block = cupy.cuda.UnownedMemory(mapped.device, 64, None, 0)
    seen = cupy.ndarray((64,), "uint8", cupy.cuda.MemoryPointer(block, 0))
    seen[3] = 7
    cupy.cuda.Device(0).synchronize()
    assert mapped.host[3] == 7
    del seen, block
    mapped.free()


def test_arrays_and_streams():
    import cupy

    x = cupy.arange(6, dtype="float32")
    stream = cupy.cuda.Stream(non_blocking=True)
    seen = device_array(x, argument="sendbuf", where="here")
    assert (seen.pointer, seen.count, seen.ordinal) == (x.data.ptr, 6, 0)
    assert stream_pointer(None, x, ordinal=0) == cupy.cuda.get_current_stream().ptr
    with stream:
        assert stream_pointer(None, x, ordinal=0) == stream.ptr
    assert stream_pointer(stream, ordinal=0) == stream.ptr

    class Protocol:
        __cuda_array_interface__ = x.__cuda_array_interface__

    class Capsule:
        __dlpack__, __dlpack_device__ = x.__dlpack__, x.__dlpack_device__

    for other in (Protocol(), Capsule(), from_pointer(x.data.ptr, 6, "float32")):
        again = device_array(other, argument="sendbuf", where="here", ordinal=0)
        assert (again.pointer, again.nbytes, again.dtype) == (seen.pointer, 24, seen.dtype)
    memory = allocate(0, 100)
    raw = cupy.asarray(from_pointer(memory.pointer, 100, "uint8"))
    assert int(raw.sum()) == 0
    del raw
    memory.free()
    pinned = host_mapped(64, ordinal=0)
    with pytest.raises(ArgumentError, match="in host memory"):
        Protocol.__cuda_array_interface__ = {
            **x.__cuda_array_interface__,
            "data": (pinned.device, False),
        }
        device_array(Protocol(), argument="sendbuf", where="here")
    pinned.free()


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    x = torch.ones(6, dtype=torch.bfloat16, device="cuda:0")
    seen = device_array(x, argument="sendbuf", where="here", ordinal=0)
    assert (seen.pointer, seen.nbytes, seen.dtype.name) == (x.data_ptr(), 12, "bfloat16")
    with torch.cuda.stream(torch.cuda.Stream()):
        assert stream_pointer(None, x) == torch.cuda.current_stream().cuda_stream
