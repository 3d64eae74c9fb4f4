"""Detecting the machine that the tests run on: it must not contradict itself or CUDA."""

import ctypes

import pytest

from ringcoll.cuda.device import devices
from ringcoll.topology.build import build
from ringcoll.topology.busid import bus_id
from ringcoll.topology.detect import collect, detect, detection, measure
from ringcoll.topology.system import LinkKind, NvSwitch, Source

_SWITCH = 2


@pytest.fixture
def cuda():
    return pytest.importorskip("cupy").cuda.runtime


@pytest.fixture
def document(tmp_path):
    return detect(fresh=True, cache_dir=str(tmp_path))


def switch_links(system):
    """How many links each GPU has to a switch."""
    switches = {node.name for node in system.nodes if isinstance(node, NvSwitch)}
    return {link.src: link.count for link in system.links if link.dst in switches}


@pytest.mark.gpu
def test_every_cuda_device_is_found_once(cuda, document):
    system = build(document)
    busids = [gpu.busid for gpu in system.gpus]
    assert len(set(busids)) == len(busids)
    by_busid = {gpu.busid: gpu for gpu in system.gpus}
    for ordinal in range(cuda.getDeviceCount()):
        said = cuda.getDeviceProperties(ordinal)
        gpu = by_busid[bus_id(cuda.deviceGetPCIBusId(ordinal))]
        assert gpu.sm == said["major"] * 10 + said["minor"]
        assert any(link.kind is LinkKind.PCI for link in system.out[gpu.name])


@pytest.mark.gpu
def test_the_facts_agree_with_each_other(cuda):
    pytest.importorskip("pynvml")
    facts = collect()
    assert [gpu.index for gpu in facts.gpus] == list(range(len(facts.gpus)))
    busids = {gpu.busid for gpu in facts.gpus}
    for ordinal in range(cuda.getDeviceCount()):
        assert bus_id(cuda.deviceGetPCIBusId(ordinal)) in busids
    for gpu in facts.gpus:
        assert len(gpu.links or ()) <= 36
        assert all(link.speed is None or link.speed >= 0 for link in gpu.links or ())
    assert len(facts.pairs) == len(facts.gpus) * (len(facts.gpus) - 1)


@pytest.mark.gpu
def test_a_device_has_the_bus_address_that_nvml_has_for_its_uuid(cuda):
    """Alike GPUs differ in nothing else: here CUDA's number and the address come by two ways."""
    nvml = pytest.importorskip("pynvml")
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuInit(0) == 0
    assert [device.ordinal for device in devices()] == list(range(cuda.getDeviceCount()))
    nvml.nvmlInit()
    try:
        for device in devices():
            number, uuid = ctypes.c_int(), ctypes.create_string_buffer(16)
            assert driver.cuDeviceGet(ctypes.byref(number), device.ordinal) == 0
            assert driver.cuDeviceGetUuid(uuid, number) == 0  # of the GPU, also where it is shared
            handle = nvml.nvmlDeviceGetHandleByPciBusId(device.pci)
            found = nvml.nvmlDeviceGetUUID(handle)
            found = found if isinstance(found, str) else found.decode()
            assert found.removeprefix("GPU-").replace("-", "") == uuid.raw.hex()
    finally:
        nvml.nvmlShutdown()


@pytest.mark.gpu
def test_a_switch_is_recognised_where_nvml_names_one(cuda, document):
    pytest.importorskip("pynvml")
    facts = collect()
    wanted = {}
    for gpu in facts.gpus:
        up = [link for link in gpu.links or () if link.active and link.remote_type == _SWITCH]
        if up and not gpu.mig:
            wanted[gpu.busid] = len(up)
    joined = all(pair.nvlink == 0 for pair in facts.pairs.values())
    if not wanted or not joined:
        pytest.skip("no NVSwitch here, or not between all")
    system = build(document)
    names = {gpu.busid: gpu.name for gpu in system.gpus}
    assert switch_links(system) == {names[busid]: count for busid, count in wanted.items()}
    for link in system.links:
        if link.kind is LinkKind.NVLINK:
            assert link.nominal is None or link.bandwidth < link.nominal


@pytest.mark.gpu
def test_the_second_process_reads_nothing(document, tmp_path, monkeypatch):
    pytest.importorskip("pynvml")

    def read(_root):
        raise AssertionError("the machine is read again")

    monkeypatch.setattr(detection, "_detected", {})
    monkeypatch.setattr("ringcoll.topology.detect.detection.collect", read)
    assert detect(cache_dir=str(tmp_path)) == document


@pytest.mark.multi_gpu
@pytest.mark.alone
def test_links_are_measured(cuda, document):
    system = build(document)
    before = cuda.getDevice()
    free = cuda.memGetInfo()[0]
    found = measure(system)
    assert cuda.getDevice() == before
    # What contexts and peers' mappings keep is less than the buffers that are gone again.
    assert free - cuda.memGetInfo()[0] < 128 << 20
    assert [(x.src, x.dst, x.kind) for x in found.links] == [
        (x.src, x.dst, x.kind) for x in system.links
    ]
    for link, old in zip(found.links, system.links, strict=True):
        if link.source is not Source.MEASURED:
            assert link == old
        assert link.bandwidth > 0
        if link.kind is LinkKind.NVLINK and link.nominal is not None:
            assert link.bandwidth <= 1.05 * link.nominal
