"""Reading /sys and /proc from made-up trees."""

from pathlib import Path

import pytest

from ringcoll.topology.build import build
from ringcoll.topology.detect import collect, document_of
from ringcoll.topology.detect.facts import NumaFacts
from ringcoll.topology.detect.nics import read_nics
from ringcoll.topology.detect.sysfs import nvidia_gpus, read_cpu, read_numa, read_pci
from ringcoll.topology.system import Nic, PciSwitch

GPU = {"class": "0x030200", "vendor": "0x10de", "device": "0x20b0"}
BRIDGE = {"class": "0x060400", "vendor": "0x1000", "device": "0x0001"}
GEN4 = {"max_link_speed": "16.0 GT/s PCIe", "max_link_width": "16", "current_link_width": "16"}
ICE_LAKE = "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 106\n"


class Tree:
    """A copy of /sys and /proc that has only what is put in."""

    def __init__(self, root: Path):
        self.root = root

    def file(self, path, content):
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{content}\n")

    def pci(self, path, **files):
        """A device at /sys/devices/``path``; the last part is its bus id."""
        folder = self.root / "sys/devices" / path
        for name, content in files.items():
            self.file(folder / name, content)
        self.link(f"sys/bus/pci/devices/{folder.name}", folder)

    def link(self, path, target):
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for name in ("pynvml", "cupy", "cupy.cuda"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    return Tree(tmp_path)


def two_sockets(tree):
    """Two sockets with a switch of two GPUs each, no NVML."""
    for socket, root in enumerate(("0000:10", "0000:90")):
        at = f"pci{root}/{root}:01.0"
        numa = {"numa_node": socket}
        tree.pci(at, **BRIDGE, **GEN4, **numa)
        tree.pci(f"{at}/{root[:-1]}1:00.0", **BRIDGE, **GEN4, **numa)
        for port in (0, 1):
            down = f"{at}/{root[:-1]}1:00.0/{root[:-1]}2:0{port}.0"
            tree.pci(down, **BRIDGE, **GEN4, **numa)
            tree.pci(f"{down}/{root[:-1]}{3 + port}:00.0", **GPU, **GEN4, **numa)
        tree.file(f"sys/devices/system/node/node{socket}/cpumap", f"{socket:08x},0000ffff")
    tree.file("proc/cpuinfo", ICE_LAKE + "\nprocessor\t: 1\nvendor_id\t: GenuineIntel\n")


def test_a_machine_without_nvml(tree):
    two_sockets(tree)
    facts = collect(tree.root)
    assert [gpu.busid for gpu in facts.gpus] == [
        "0000:13:00.0",
        "0000:14:00.0",
        "0000:93:00.0",
        "0000:94:00.0",
    ]
    assert facts.numa == (
        NumaFacts(0, "00000000,0000ffff"),
        NumaFacts(1, "00000001,0000ffff"),
    )
    document = document_of(facts)
    assert "pip install nvidia-ml-py" in next(document.named("note")).get("text")
    system = build(document)
    assert [gpu.dev for gpu in system.gpus] == [0, 1, 2, 3]
    assert [gpu.sm for gpu in system.gpus] == [80] * 4
    bridges = [node.busid for node in system.nodes if isinstance(node, PciSwitch)]
    assert bridges == ["0000:11:00.0", "0000:91:00.0"]
    for cpu, (switch, gpus) in enumerate(zip(bridges, ((0, 1), (2, 3)), strict=True)):
        for gpu in gpus:
            (link,) = system.out[f"GPU/{gpu}"]
            assert (link.dst, link.bandwidth) == (f"PCI/{switch}", 24.0)
        assert f"CPU/{cpu}" in [link.dst for link in system.out[f"PCI/{switch}"]]
    (between,) = (link for link in system.out["CPU/0"] if link.dst == "CPU/1")
    assert between.bandwidth == 10.0


def test_the_driver_says_which_gpus_a_container_has(tree):
    two_sockets(tree)
    tree.file("proc/driver/nvidia/gpus/0000:93:00.0/information", "Model: NVIDIA")
    assert nvidia_gpus(tree.root) == ("0000:93:00.0",)
    assert [gpu.busid for gpu in collect(tree.root).gpus] == ["0000:93:00.0"]


def test_a_container_without_numa_nodes(tree):
    two_sockets(tree)
    for path in sorted((tree.root / "sys/devices/system").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert read_numa(tree.root) == ()
    document = document_of(collect(tree.root))
    assert [cpu.get("numaid") for cpu in document.named("cpu")] == ["0", "1"]
    assert not any(cpu.get("affinity") for cpu in document.named("cpu"))


def test_nothing_to_read(tree):
    facts = collect(tree.root)
    assert facts.gpus == ()
    document = document_of(facts)
    assert list(document.named("cpu")) == []
    assert build(document).gpus == ()


def test_the_slower_end_of_a_link_counts(tree):
    port = {**GEN4, "max_link_speed": "8.0 GT/s PCIe", "max_link_width": "8"}
    tree.pci("pci0000:00/0000:00:01.0", **BRIDGE, **port)
    tree.pci("pci0000:00/0000:00:01.0/0000:01:00.0", **GPU, **GEN4, numa_node=0)
    (pci,) = next(document_of(collect(tree.root)).named("cpu")).named("pci")
    assert (pci.get("link_speed"), pci.get("link_width")) == ("8.0 GT/s PCIe", "8")


def test_lanes_that_are_down(tree):
    tree.pci("pci0000:00/0000:00:01.0", **BRIDGE, **GEN4)
    files = {**GPU, **GEN4, "current_link_width": "4"}
    tree.pci("pci0000:00/0000:00:01.0/0000:01:00.0", **files, numa_node=0)
    document = document_of(collect(tree.root))
    (pci,) = next(document.named("cpu")).named("pci")
    assert pci.get("link_width") == "4"
    assert (
        "its PCIe link runs on 4 of 16 lanes"
        in [note.get("text") for note in document.named("note")][-1]
    )


@pytest.mark.parametrize(("speed", "width"), [("Unknown", "0"), ("Unknown speed", "255"), ("", "")])
def test_links_of_virtual_devices(tree, speed, width):
    told = {"max_link_speed": speed, "max_link_width": width, "current_link_width": width}
    tree.pci("pci0000:00/0000:00:06.0", **GPU, **told, numa_node=-1)
    (cpu,) = document_of(collect(tree.root)).named("cpu")
    (pci,) = cpu.named("pci")
    assert cpu.get("numaid") == "-1"
    assert "link_speed" not in pci.attributes
    assert "link_width" not in pci.attributes


def test_bridges_of_a_virtual_bus(tree):
    tree.pci("pci0000:64/0000:64:05.5", **BRIDGE)
    at = "pci0000:64/0000:64:05.5/pci10000:00/10000:00:02.0"
    tree.pci(at, **BRIDGE)
    tree.pci(f"{at}/10000:01:00.0", **GPU)
    found = {device.busid: device for device in read_pci(["10000:01:00.0"], tree.root)}
    gpu = found["10000:01:00.0"]
    assert gpu.path == ("10000:00:02.0", "10000:01:00.0")


def test_a_bridge_that_does_not_tell_its_numa_node(tree):
    at = "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0"
    for depth in (1, 2, 3):
        tree.pci("/".join(at.split("/")[: depth + 1]), **BRIDGE, **GEN4, numa_node=-1)
    tree.pci(f"{at}/0000:13:00.0", **GPU, **GEN4, numa_node=3)
    (cpu,) = document_of(collect(tree.root)).named("cpu")
    assert cpu.get("numaid") == "3"


def test_loops_and_missing_devices_are_left_out(tree):
    tree.link("sys/bus/pci/devices/0000:01:00.0", tree.root / "sys/bus/pci/devices/0000:01:00.0")
    assert read_pci(["0000:01:00.0", "0000:02:00.0"], tree.root) == ()


def test_processors(tree):
    assert read_cpu(tree.root).vendor is None
    tree.file("proc/cpuinfo", "processor: 0\nvendor_id: AuthenticAMD\ncpu family: 25\nmodel: 1\n")
    cpu = read_cpu(tree.root)
    assert (cpu.arch, cpu.vendor, cpu.family, cpu.model) == ("x86_64", "AuthenticAMD", 25, 1)
    tree.pci("pci0000:00/0000:00:06.0", **GPU, numa_node=0)
    (told,) = document_of(collect(tree.root)).named("cpu")
    assert told.get("familyid") == "175"  # as NCCL dumps it on Milan


def test_other_processors(tree, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    tree.file("proc/cpuinfo", "processor: 0\nCPU implementer: 0x41\nCPU part: 0xd4f\n")
    cpu = read_cpu(tree.root)
    assert (cpu.arch, cpu.vendor, cpu.model) == ("arm64", None, None)


def nic(tree):
    tree.pci("pci0000:00/0000:00:02.0/0000:02:00.0", **{"class": "0x020700"}, numa_node=0)
    tree.pci("pci0000:00/0000:00:02.0", **BRIDGE)
    device = tree.root / "sys/bus/pci/devices/0000:02:00.0"
    tree.link("sys/class/infiniband/mlx5_0/device", device)
    tree.file("sys/class/infiniband/mlx5_0/node_guid", "b859:9f03:00d4:1e2a")
    for port, state in ((1, "4: ACTIVE"), (2, "1: DOWN")):
        at = f"sys/class/infiniband/mlx5_0/ports/{port}"
        tree.file(f"{at}/rate", "400 Gb/sec (4X NDR)")
        tree.file(f"{at}/state", state)
    tree.link("sys/class/net/ib0/device", device)
    tree.file("sys/class/net/ib0/speed", "400000")


def virtio(tree):
    at = "pci0000:00/0000:00:03.0"
    tree.pci(at, **{"class": "0x020000"}, numa_node=0)
    (tree.root / "sys/devices" / at / "virtio1").mkdir()
    tree.link("sys/class/net/eth0/device", tree.root / "sys/devices" / at / "virtio1")
    tree.file("sys/class/net/eth0/speed", "-1")
    tree.file("sys/class/net/eth0/operstate", "up")
    (tree.root / "sys/class/net/lo").mkdir()


def test_ports_of_network_cards(tree):
    nic(tree)
    virtio(tree)
    found = {(nic.name, nic.port): nic for nic in read_nics(tree.root)}
    assert found.keys() == {("mlx5_0", 1), ("mlx5_0", 2), ("ib0", None), ("eth0", None)}
    one = found["mlx5_0", 1]
    assert (one.busid, one.speed, one.up) == ("0000:02:00.0", 400000, True)
    assert one.guid == "0xb8599f0300d41e2a"
    assert found["mlx5_0", 2].up is False
    eth0 = found["eth0", None]
    assert (eth0.busid, eth0.speed, eth0.up) == ("0000:00:03.0", None, True)


def test_interfaces_count_only_without_infiniband(tree):
    virtio(tree)
    nets = [element for element in document_of(collect(tree.root)).walk() if element.tag == "net"]
    assert [dict(net.attributes) for net in nets] == [{"name": "eth0", "dev": "0"}]
    nic(tree)
    document = document_of(collect(tree.root))
    nets = [element for element in document.walk() if element.tag == "net"]
    assert [(net.get("name"), net.get("port")) for net in nets] == [("mlx5_0", "1")]
    assert [node.port for node in build(document).nodes if isinstance(node, Nic)] == ["mlx5_0"]


def test_a_card_on_no_bus(tree):
    (tree.root / "sys/devices/platform/net0").mkdir(parents=True)
    tree.link("sys/class/net/eth7/device", tree.root / "sys/devices/platform/net0")
    (cpu,) = document_of(collect(tree.root)).named("cpu")
    assert [child.tag for child in cpu.children] == ["nic"]
