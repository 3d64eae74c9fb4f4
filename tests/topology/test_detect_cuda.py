"""CUDA's numbers are its own: facts of CUDA and NVML meet by bus id."""

import sys
import types

import pytest

from ringcoll.topology.build import build
from ringcoll.topology.detect import collect, document_of
from ringcoll.topology.detect.cuda import read_cuda
from tests.topology.replay import vm_facts
from tests.topology.stand_in_nvml import Nvml, vm_answers

BUSIDS = [gpu.busid for gpu in vm_facts().gpus]


class Runtime:
    is_hip = False

    def __init__(self, busids, access=True):
        self.busids, self.access = busids, access

    def __getattr__(self, name):
        answers = {
            "getDeviceCount": lambda: len(self.busids),
            "deviceGetPCIBusId": lambda ordinal: self.busids[ordinal].upper(),
            "getDeviceProperties": lambda _ordinal: {"major": 9, "minor": 0},
            "deviceCanAccessPeer": lambda _a, _b: int(self.access),
        }
        if name not in answers:
            raise AttributeError(name)
        return answers[name]


@pytest.fixture
def cuda(monkeypatch):
    def make(busids, **options):
        modules = {name: types.ModuleType(name) for name in ("cupy", "cupy.cuda")}
        runtime = Runtime(busids, **options)
        modules["cupy.cuda"].runtime = runtime  # type: ignore[attr-defined]
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return runtime

    monkeypatch.setitem(sys.modules, "pynvml", Nvml(vm_answers()))
    return make


def test_visible_devices_in_another_order(cuda, tmp_path):
    cuda([BUSIDS[5], BUSIDS[2]])
    facts = collect(tmp_path)
    assert [gpu.busid for gpu in facts.gpus] == BUSIDS
    assert [gpu.index for gpu in facts.gpus] == list(range(8))
    assert facts.pair(BUSIDS[5], BUSIDS[2]).access is True
    assert facts.pair(BUSIDS[5], BUSIDS[2]).nvlink == 0
    assert facts.pair(BUSIDS[0], BUSIDS[2]).access is None
    devs = {gpu.busid: gpu.dev for gpu in build(document_of(facts)).gpus}
    assert devs == {busid: index for index, busid in enumerate(BUSIDS)}


def test_cuda_alone(cuda, monkeypatch, tmp_path):
    cuda([BUSIDS[5], BUSIDS[2]])
    monkeypatch.setitem(sys.modules, "pynvml", None)
    system = build(document_of(collect(tmp_path)))
    found = [(gpu.busid, gpu.dev, gpu.sm) for gpu in system.gpus]
    assert found == [(BUSIDS[2], 0, 90), (BUSIDS[5], 1, 90)]
    assert any("nvidia-ml-py" in note for note in system.notes)


def test_peers_that_cuda_denies(cuda, tmp_path):
    cuda(BUSIDS, access=False)
    system = build(document_of(collect(tmp_path)))
    assert not any(link.dst.startswith("NVS/") for link in system.links)
    assert any("but CUDA reports no peer access" in note for note in system.notes)
    assert any("and 53 more pairs" in note for note in system.notes)


def test_cuda_that_fails_is_a_note(cuda, monkeypatch):
    runtime = cuda(BUSIDS)

    def fail():
        raise RuntimeError("cudaErrorInsufficientDriver")

    monkeypatch.setattr(runtime, "getDeviceCount", fail, raising=False)
    said = read_cuda()
    assert said.devices == ()
    assert said.notes == ("cannot query CUDA devices: cudaErrorInsufficientDriver",)


def test_cupy_of_rocm_has_nothing_to_say(cuda, monkeypatch):
    monkeypatch.setattr(cuda(BUSIDS), "is_hip", True)
    assert read_cuda().devices == ()


def test_no_gpu_at_all(cuda, monkeypatch, tmp_path):
    cuda([])
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert collect(tmp_path).notes[0] == "this machine shows no NVIDIA GPU"
