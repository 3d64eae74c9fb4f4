"""Reading NVML through nvidia-ml-py, whatever it refuses."""

import sys
import types

import pytest

from ringcoll.topology.detect.facts import LinkFacts
from ringcoll.topology.detect.nvml import read_nvml
from tests.topology.replay import vm_facts
from tests.topology.stand_in_nvml import Nvml, NVMLError, value, vm_answers


@pytest.fixture
def nvml(monkeypatch):
    def make(**changes):
        answers = {**vm_answers(), **changes}
        stand_in = Nvml({name: answer for name, answer in answers.items() if answer is not None})
        monkeypatch.setitem(sys.modules, "pynvml", stand_in)
        return stand_in

    return make


def links(gpu=0):
    found = read_nvml().gpus[gpu].links
    assert found is not None
    return found


def refuse(code):
    return lambda *_: NVMLError(code)


def test_what_the_virtual_machine_answers(nvml):
    stand_in = nvml()
    said = read_nvml()
    wanted = vm_facts()
    for gpu, same in zip(said.gpus, wanted.gpus, strict=True):
        for name in ("busid", "index", "sm", "links", "generation_max", "width_max", "fabric"):
            assert getattr(gpu, name) == getattr(same, name)
        assert gpu.mig is False
    for pair, told in wanted.pairs.items():
        assert (said.pairs[pair].nvlink, said.pairs[pair].ancestor) == (told.nvlink, told.ancestor)
    assert said.driver == "580.95.05"
    assert said.notes == ()
    assert stand_in.asked[-1] == ("nvmlShutdown",)
    assert max(args[1] for name, *args in stand_in.asked if name.endswith("LinkState")) == 18


def test_without_nvidia_ml_py(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    said = read_nvml()
    assert said.gpus == ()
    assert "pip install nvidia-ml-py" in said.notes[0]


def test_without_a_driver(nvml):
    nvml(nvmlInit=refuse(12))
    said = read_nvml()
    assert said.gpus == ()
    assert said.notes == ("cannot initialise NVML, so NVLinks are unknown: code 12",)


def test_everything_may_be_refused(nvml):
    kept = {"nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"}
    kept.add("nvmlDeviceGetPciInfo")
    stand_in = nvml(**{name: refuse(999) for name in vm_answers() if name not in kept})
    said = read_nvml()
    assert [gpu.busid for gpu in said.gpus] == [gpu.busid for gpu in vm_facts().gpus]
    gpu = said.gpus[0]
    assert (gpu.sm, gpu.links, gpu.fabric, gpu.mig, gpu.c2c) == (None,) * 5
    assert all(pair.nvlink is None for pair in said.pairs.values())
    assert said.driver is None
    asked = {args[1] for name, *args in stand_in.asked if name.endswith("LinkState")}
    assert asked == set(range(36))


def test_an_old_package_lacks_functions(nvml):
    stand_in = nvml(nvmlDeviceGetGpuFabricInfoV=None, nvmlDeviceGetMigMode=None)
    stand_in.c_nvmlGpuFabricInfoV_t = None
    gpu = read_nvml().gpus[3]
    assert gpu.fabric is None
    assert gpu.mig is None


def test_a_gpu_without_nvlink_has_no_links(nvml):
    nvml(
        nvmlDeviceGetNvLinkState=refuse(3),
        nvmlDeviceGetFieldValues=lambda *_: [value(0, 3)],
    )
    assert {gpu.links for gpu in read_nvml().gpus} == {()}


def test_a_remote_end_that_is_refused_is_missing(nvml):
    nvml(nvmlDeviceGetNvLinkRemotePciInfo=refuse(3), nvmlDeviceGetNvLinkRemoteDeviceType=refuse(9))
    assert links()[0] == LinkFacts(True, True, None, None, 26562)


def test_one_link_of_which_nothing_is_told(nvml):
    answers = vm_answers()

    def state(gpu, link):
        return NVMLError(999) if link == 5 else answers["nvmlDeviceGetNvLinkState"](gpu, link)

    def fields(gpu, ids):
        return [value(0, 999)] if ids[0][1] == 5 else answers["nvmlDeviceGetFieldValues"](gpu, ids)

    nvml(nvmlDeviceGetNvLinkState=state, nvmlDeviceGetFieldValues=fields)
    assert [link.active for link in links()] == [True] * 5 + [None] + [True] * 12


@pytest.mark.parametrize(
    ("sm", "field", "active"),
    [((9, 0), 1, True), ((9, 0), 2, True), ((9, 0), 0, False), ((8, 0), 0, True)],
)
def test_since_hopper_the_field_says_whether_a_link_is_up(nvml, sm, field, active):
    def fields(_gpu, ids):
        return [value(field if ids[0][0] == 165 else 26562)]

    nvml(nvmlDeviceGetCudaComputeCapability=lambda _gpu: sm, nvmlDeviceGetFieldValues=fields)
    assert {link.active for link in links()} == {active}


def test_the_link_to_a_grace_cpu(nvml):
    c2c = {170: value(10), 172: value(44712, kind=3)}
    nvml(nvmlDeviceGetFieldValues=lambda _gpu, ids: [c2c.get(ids[0][0], value(0, 3))])
    assert read_nvml().gpus[0].c2c == (10, 44712)


def test_a_value_of_an_unknown_kind_is_no_fact(nvml):
    nvml(nvmlDeviceGetFieldValues=lambda *_: [value(1.5, kind=0)])
    assert links()[0].speed is None


def test_a_gpu_without_an_address_is_left_out(nvml):
    answers = vm_answers()["nvmlDeviceGetPciInfo"]
    nvml(
        nvmlDeviceGetPciInfo=lambda gpu: NVMLError(15) if gpu == 2 else answers(gpu),
        nvmlDeviceGetHandleByIndex=lambda index: NVMLError(4) if index == 5 else index,
    )
    said = read_nvml()
    assert [gpu.index for gpu in said.gpus] == [0, 1, 3, 4, 6, 7]
    assert "no PCI address of GPU 2 (return code 15)" in said.notes[0]
    assert "no PCI address of GPU 5 (return code 4)" in said.notes[1]


def test_mig_is_told_by_the_mode_of_now(nvml):
    nvml(nvmlDeviceGetMigMode=lambda gpu: [int(gpu == 1), 0])
    assert [gpu.mig for gpu in read_nvml().gpus[:3]] == [False, True, False]


def test_addresses_may_be_text(nvml):
    nvml(nvmlDeviceGetPciInfo=lambda gpu: types.SimpleNamespace(busId=f"00010000:{gpu:02X}:00.0"))
    assert read_nvml().gpus[7].busid == "10000:07:00.0"
