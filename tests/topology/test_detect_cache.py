"""Detecting twice: what is kept, for how long, and what is never believed."""

import json
import stat
import sys

import pytest

from ringcoll.errors import ArgumentError
from ringcoll.topology.build import build
from ringcoll.topology.detect import collect, detect, detection
from ringcoll.topology.system import PciSwitch
from tests.topology.replay import vm_facts
from tests.topology.stand_in_nvml import Nvml, vm_answers


@pytest.fixture
def vm(monkeypatch, tmp_path):
    """The VM with 8 H200: its cache folder, and how often it was read."""
    root = tmp_path / "root"
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(vm_answers()))
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("RINGCOLL_TOPO_FILE", "NCCL_TOPO_FILE"):
        monkeypatch.delenv(name, raising=False)
    for path, content in (
        ("proc/sys/kernel/random/boot_id", "first"),
        ("sys/module/nvidia/version", "580.95.05"),
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    for gpu in vm_facts().gpus:
        (root / "proc/driver/nvidia/gpus" / gpu.busid).mkdir(parents=True)
    return Machine(root, tmp_path / "cache", monkeypatch)


class Machine:
    def __init__(self, root, cache, monkeypatch):
        self.root, self.cache, self.reads = root, cache, 0

        def counted(root):
            self.reads += 1
            return collect(root)

        monkeypatch.setattr("ringcoll.topology.detect.detection.collect", counted)

    def detect(self, **options):
        return detect(root=self.root, cache_dir=str(self.cache), **options)

    def new_process(self):
        detection._detected.clear()

    @property
    def file(self):
        (path,) = (self.cache / "topology").iterdir()
        return path


def test_it_is_read_once_a_boot(vm):
    first = vm.detect()
    assert len(build(first).gpus) == 8
    assert vm.detect() is first
    vm.new_process()
    assert vm.detect() == first
    assert vm.reads == 1
    assert vm.detect(fresh=True) == first
    assert vm.reads == 2
    assert stat.S_IMODE(vm.file.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(vm.file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("proc/sys/kernel/random/boot_id", "second"),
        ("sys/module/nvidia/version", "590.1"),
        ("proc/driver/nvidia/gpus/0000:99:00.0/information", ""),
        ("proc/driver/nvidia/capabilities/gpu3/mig/gi1/access", ""),
    ],
)
def test_another_machine_is_read_anew(vm, path, content):
    vm.detect()
    (vm.root / path).parent.mkdir(parents=True, exist_ok=True)
    (vm.root / path).write_text(content)
    vm.detect()
    assert vm.reads == 2


def test_what_nvml_does_not_tell_is_not_kept(vm, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    document = vm.detect()
    assert len(build(document).gpus) == 8
    assert not (vm.cache / "topology").exists()


def test_a_fabric_that_is_starting_is_not_kept(vm, monkeypatch):
    answers = vm_answers()
    whole = answers["nvmlDeviceGetGpuFabricInfoV"]

    def starting(gpu, reference):
        whole(gpu, reference)
        reference._obj.state = 2
        return 0

    answers["nvmlDeviceGetGpuFabricInfoV"] = starting
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(answers))
    assert any("fabric manager" in note.get("text") for note in vm.detect().named("note"))
    assert not (vm.cache / "topology").exists()


def damaged(text):
    said = json.loads(text)
    yield b""
    yield b"[" * 100_000
    yield b"\xff\xfe"
    yield b"null"
    yield json.dumps({**said, "document": 5}).encode()
    yield json.dumps({**said, "document": "<system"}).encode()
    yield json.dumps({**said, "document": "<graphs version='1'/>"}).encode()
    yield json.dumps({**said, "document": "<!DOCTYPE system><system/>"}).encode()
    yield json.dumps({"key": said["key"]}).encode()
    yield json.dumps({**said, "key": {**said["key"], "format": 0}}).encode()


def test_a_damaged_file_is_written_anew(vm):
    first = vm.detect()
    good = vm.file.read_text()
    reads = 1
    for content in damaged(good):
        vm.file.write_bytes(content)
        vm.new_process()
        assert vm.detect() == first
        reads += 1
        assert vm.reads == reads
        assert vm.file.read_text() == good


def test_a_file_that_others_may_write_is_not_believed(vm):
    vm.detect()
    vm.file.chmod(0o666)
    vm.new_process()
    vm.detect()
    assert vm.reads == 2


def test_a_folder_that_cannot_be_written_is_no_error(vm):
    vm.cache.write_text("a file")
    assert len(build(vm.detect()).gpus) == 8
    assert vm.detect() is vm.detect()
    assert vm.reads == 1


TEMPLATE = """
<system version="1"><cpu numaid="0" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
<pci busid="ffff:ff:01.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
<pci busid="0000:00:06.0"/><pci busid="0000:00:07.0"/></pci></cpu></system>
"""


def test_what_the_provider_says_is_completed(vm):
    vm.detect()
    path = vm.root / "var/run/nvidia-topologyd/virtualTopology.xml"
    path.parent.mkdir(parents=True)
    path.write_text(TEMPLATE)
    document = vm.detect()
    assert vm.reads == 2
    system = build(document)
    assert len(system.gpus) == 8
    (switch,) = (node for node in system.nodes if isinstance(node, PciSwitch))
    below = [link.dst for link in system.out[switch.name]]
    assert sorted(below) == ["CPU/0", "GPU/0", "GPU/1"]
    assert [link.dst for link in system.out["GPU/0"]][-1] == "NVS/0"
    path.write_text("<system")
    document = vm.detect()
    assert len(build(document).gpus) == 8
    assert any("provider" in note.get("text") for note in document.named("note"))


def test_a_file_that_the_caller_names(vm, tmp_path):
    path = tmp_path / "named.xml"
    path.write_text(TEMPLATE)
    assert any(isinstance(n, PciSwitch) for n in build(vm.detect(topo_file=str(path))).nodes)
    assert not any(isinstance(node, PciSwitch) for node in build(vm.detect()).nodes)
    path.write_text("<system")
    with pytest.raises(ArgumentError, match=r"named\.xml, line 1"):
        vm.detect(topo_file=str(path))
    with pytest.raises(ArgumentError, match="no such file"):
        vm.detect(topo_file=str(tmp_path / "none.xml"))


def test_notes_outlive_a_template(vm, monkeypatch, tmp_path):
    answers = vm_answers()
    answers["nvmlDeviceGetMigMode"] = lambda gpu: [int(gpu == 1), 0]
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(answers))
    path = tmp_path / "named.xml"
    path.write_text(TEMPLATE)
    document = vm.detect(topo_file=str(path))
    assert any("MIG" in note for note in build(document).notes)
