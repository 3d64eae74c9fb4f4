"""What files of real machines do that no manual says, one by one."""

from __future__ import annotations

import pytest

from ringcoll.errors import ArgumentError
from ringcoll.topology.system import (
    Confidence,
    Cpu,
    LinkKind,
    Nic,
    NvSwitch,
    PciSwitch,
    Source,
)
from tests.topology.real import built, link, linked

INTEL = 'arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143"'


def gpu(dev, rows="", attributes='sm="90"', rank=True, bus=None):
    said = f' rank="{dev}"' if rank else ""
    return (
        f'<pci busid="0000:{bus or f"{dev:02x}"}:00.0" class="0x030200" vendor="0x10de" '
        f'device="0x2330" link_speed="32 GT/s" link_width="16">'
        f'<gpu dev="{dev}" {attributes}{said}>{rows}</gpu></pci>'
    )


def row(target, count=1, tclass="0x030200", more=""):
    return f'<nvlink target="{target}" count="{count}" tclass="{tclass}" {more}/>'


def host(*devices, numa=0, more=""):
    return f'<cpu numaid="{numa}" {INTEL} {more}>{"".join(devices)}</cpu>'


def machine(*cpus):
    return built(f'<system version="1">{"".join(cpus)}</system>')


def to_switch(count=18, target="fffffff:ff:ff.0", more=""):
    return row(target, count, "0x068000", more)


def test_gpus_without_rank_are_left_out_where_others_have_one():
    found = machine(host(gpu(0), gpu(1, rank=False), gpu(2)))
    assert [one.dev for one in found.gpus] == [0, 2]
    assert found.notes == ()


def test_gpus_without_rank_are_used_where_none_has_one():
    found = machine(host(gpu(3, rank=False), gpu(1, rank=False, attributes="")))
    assert [(one.dev, one.rank, one.sm) for one in found.gpus] == [(1, None, 90), (3, None, 90)]


def test_dev_is_not_rank():
    swapped = gpu(8).replace('rank="8"', 'rank="4"'), gpu(2).replace('rank="2"', 'rank="7"')
    found = machine(host(*swapped))
    assert [(one.name, one.rank) for one in found.gpus] == [("GPU/8", 4), ("GPU/2", 7)]


def test_a_missing_dev_is_the_lowest_free():
    found = machine(host(gpu(0), gpu(1).replace('dev="1"', "")))
    assert [one.dev for one in found.gpus] == [0, 1]
    assert "has no dev" in found.notes[0]


def test_the_same_dev_twice_is_said():
    found = machine(host(gpu(1, rank=False, bus="0a"), gpu(1, rank=False, bus="0b")))
    assert {one.name for one in found.gpus} == {"GPU/1", "GPU/0000:0b:00.0"}
    assert "dev 1 appears twice" in found.notes[0]


def test_a_generation_that_nothing_tells_is_guessed():
    unknown = gpu(0, to_switch(4), attributes="").replace("0x2330", "0xffff")
    found = machine(host(unknown))
    one = link(found, "GPU/0", "NVS/0", LinkKind.NVLINK)
    assert (one.bandwidth, one.nominal, one.confidence) == (80.0, None, Confidence.MEDIUM)
    assert "compute capability is unknown" in found.notes[0]


def test_a_gpu_that_names_itself():
    found = machine(host(gpu(0, row("0000:00:00.0", 12)), gpu(1, row("0000:01:00.0", 12))))
    assert linked(found, LinkKind.NVLINK) == set()
    assert found.notes == (
        "GPU/0: a link whose target is the GPU itself is ignored",
        "GPU/1: a link whose target is the GPU itself is ignored",
    )


def test_a_gpu_that_is_not_there():
    found = machine(host(gpu(0, row("0000:0f:00.0", 2)), gpu(1)))
    assert linked(found, LinkKind.NVLINK) == set()
    assert found.notes == ("GPU/0: its link to 0000:0f:00.0, which is no GPU here, is ignored",)


@pytest.mark.parametrize(("theirs", "used"), [(1, 1), (3, 2), (0, 0)])
def test_a_row_counts_as_far_as_the_other_end_confirms_it(theirs, used):
    rows = row("0000:00:00.0", theirs) if theirs else ""
    found = machine(host(gpu(0, row("0000:01:00.0", 2)), gpu(1, rows)))
    pairs = {("GPU/0", "GPU/1", used), ("GPU/1", "GPU/0", used)} if used else set()
    assert linked(found, LinkKind.NVLINK) == pairs
    assert len(found.notes) == 1
    assert f"{used} used" in found.notes[0]


def test_bus_ids_are_the_same_in_any_spelling():
    rows = row("00000000:01:00.0", 2), row("0000:00:00.0", 1) + row("0:0:0.0", 1)
    found = machine(host(gpu(0, rows[0]), gpu(1, rows[1])))
    assert linked(found, LinkKind.NVLINK) == {("GPU/0", "GPU/1", 2), ("GPU/1", "GPU/0", 2)}
    assert found.notes == ()


def test_pci_domains_may_be_any():
    cards = [gpu(n).replace("0000:", domain) for n, domain in enumerate(("0001:", "10000:"))]
    assert [one.busid for one in machine(host(*cards)).gpus] == ["0001:00:00.0", "10000:01:00.0"]


@pytest.mark.parametrize("target", ["fffffff:ffff:ff", "fffffff:ff:ff.0", "FFFFFFFF:FF:FF.0"])
@pytest.mark.parametrize("tclass", ["0x068000", "", "0x030200"])
def test_all_ones_are_a_switch(target, tclass):
    found = machine(host(gpu(0, row(target, 18, tclass)), gpu(1, row(target, 18, tclass))))
    assert linked(found, LinkKind.NVLINK) >= {("GPU/0", "NVS/0", 18), ("NVS/0", "GPU/1", 18)}


def test_mixed_evidence_of_the_same_switches():
    named = "".join(to_switch(count, f"0000:0{n}:00.0") for n, count in enumerate((5, 4, 5, 4)))
    found = machine(host(gpu(0, named), gpu(1, to_switch())))
    counts = {count for src, _, count in linked(found, LinkKind.NVLINK) if src != "NVS/0"}
    assert counts == {18}
    assert found.notes == ()


def test_rows_without_class_lead_to_a_gpu_if_there_is_one():
    found = machine(
        host(gpu(0, row("0000:01:00.0", 2, "")), gpu(1, row("0000:00:00.0", 2, ""))),
    )
    assert linked(found, LinkKind.NVLINK) == {("GPU/0", "GPU/1", 2), ("GPU/1", "GPU/0", 2)}


def test_degraded_links_are_said():
    found = machine(host(gpu(0, to_switch()), gpu(1, to_switch(16)), gpu(2, to_switch())))
    assert found.notes == ("NVS/0: most GPUs have 18 links to it, but GPU/1 16: degraded links",)
    assert link(found, "GPU/1", "NVS/0", LinkKind.NVLINK).count == 16


def test_a_gpu_whose_links_are_missing_is_kept_out():
    found = machine(host(gpu(0, to_switch()), gpu(1), gpu(2, to_switch())))
    assert found.notes == (
        "GPU/1: no NVLink to NVS/0, unlike other GPUs of the host; left out of its fabric",
    )
    assert all(one.kind is not LinkKind.NVLINK for one in found.out["GPU/1"])


def test_a_fabric_that_is_cut_in_partitions():
    halves = [gpu(n, to_switch(more=f'fabric="{n // 2}"')) for n in range(4)]
    found = machine(host(*halves))
    switches = [node.name for node in found.nodes if isinstance(node, NvSwitch)]
    assert switches == ["NVS/0", "NVS/1"]
    assert ("GPU/1", "NVS/0", 18) in linked(found, LinkKind.NVLINK)
    assert ("GPU/2", "NVS/1", 18) in linked(found, LinkKind.NVLINK)
    assert found.notes == ()


def test_the_speed_that_nvml_reports_is_the_nominal_one():
    found = machine(host(gpu(0, to_switch(more='speed="26562"')), gpu(1, to_switch())))
    one = link(found, "GPU/0", "NVS/0", LinkKind.NVLINK)
    assert one.nominal == pytest.approx(18 * 26.562)
    assert one.bandwidth == pytest.approx(370.8)


def test_many_virtual_ports_under_a_cpu():
    nets = "".join(f'<net name="v{n}" dev="{n}" speed="-1"/>' for n in range(61))
    found = machine(host(f"<nic>{nets}</nic>", gpu(0)))
    ports = [node for node in found.nodes if isinstance(node, Nic)]
    assert [port.port for port in ports] == [f"v{n}" for n in range(61)]
    assert all(link(found, port.name, "NET", LinkKind.NET).bandwidth == 1.25 for port in ports)


def test_two_ports_of_one_number():
    nets = '<net name="a" dev="0"/><net name="b" dev="0"/><net name="c"/>'
    found = machine(host(f"<nic>{nets}</nic>"))
    assert [node.port for node in found.nodes if isinstance(node, Nic)] == ["a", "b"]
    assert "several ports" in found.notes[0]


def test_a_card_on_a_host_bridge():
    card = (
        '<pci busid="0000:05:00.0" class="0x060000"><nic><net name="eth0" dev="0" speed="25000"/>'
        "</nic></pci>"
    )
    inside = f'<pci busid="0000:06:00.0" class="0x060000">{card}</pci>'
    for devices, parent in ((card, "CPU/0"), (inside, "PCI/0000:06:00.0")):
        found = machine(host(devices))
        assert link(found, "NIC/0", parent, LinkKind.PCI).bandwidth == 12.0


def test_ports_share_a_slot_that_is_narrower_than_they():
    nets = "".join(f'<net name="m{n}" dev="{n}" speed="200000" rail="{n}"/>' for n in range(2))
    slot = 'link_speed="16 GT/s" link_width="16"'
    card = f'<pci busid="0000:05:00.0" class="0x020700" {slot}><nic>{nets}</nic></pci>'
    found = machine(host(card))
    assert [link(found, f"NIC/{n}", "CPU/0", LinkKind.PCI).bandwidth for n in (0, 1)] == [12, 12]
    assert [node.rail for node in found.nodes if isinstance(node, Nic)] == [0, 1]


def test_ports_that_are_fused_into_another_are_not_there():
    nets = '<net name="a" dev="0" net="0"/><net name="a+b" dev="2" rail="1073741824"/>'
    found = machine(host(f"<nic>{nets}</nic>"))
    ports = [node for node in found.nodes if isinstance(node, Nic)]
    assert [(port.port, port.rail) for port in ports] == [("a+b", None)]


def test_devices_that_are_neither_gpu_nor_card():
    leaves = "".join(
        f'<pci busid="0000:1{n}:00.0" class="{code}"/>'
        for n, code in enumerate(("0x030200", "0x020000", "0x068000", "0x120000", "0x010802", ""))
    )
    found = machine(host(leaves))
    assert [node.name for node in found.nodes if isinstance(node, PciSwitch)] == [
        "PCI/0000:14:00.0"
    ]


def test_a_bridge_that_is_there_twice():
    twice = '<pci busid="ffff:ff:01.0" class="0x060400">{}</pci>'
    found = machine(host(twice.format(gpu(0)), twice.format(gpu(1))))
    switches = [node.name for node in found.nodes if isinstance(node, PciSwitch)]
    assert len(switches) == len(set(switches)) == 2
    assert "appears twice" in found.notes[0]


def test_links_between_switches():
    bridges = "".join(
        f'<pci busid="0000:a{n}:00.0" class="0x060400"><pcilink target="{target}"/>{gpu(n)}</pci>'
        for n, target in enumerate(("0000:a1:00.0", "0000:a0:00.0", "0000:a2:00.0"))
    )
    found = machine(host(bridges))
    one = link(found, "PCI/0000:a0:00.0", "PCI/0000:a1:00.0", LinkKind.PCI)
    assert (one.bandwidth, one.count) == (5000.0, 1)
    assert found.notes == (
        "PCI/0000:a2:00.0: its <pcilink> to 0000:a2:00.0, which is no other bridge, is ignored",
    )


@pytest.mark.parametrize("told", ["lower", "other"])
def test_links_of_the_lower_level_of_a_broadcom_switch_are_those_of_the_switch(told):
    same = 'vendor="0x1000" device="0xc010" subsystem_vendor="0x1000" subsystem_device="0xa096"'
    bridge = '<pci busid="0000:{}:00.0" class="0x060400" {}>{}</pci>'
    row = '<pcilink target="0000:{}:00.0"/>'
    lower = bridge.format("a1", same, row.format("b0") if told == "lower" else "")
    other = bridge.format("b0", "", row.format("a1") if told == "other" else "")
    found = machine(host(bridge.format("a0", same, lower), other))
    assert link(found, "PCI/0000:a0:00.0", "PCI/0000:b0:00.0", LinkKind.PCI).bandwidth == 5000.0
    assert found.notes == ()


def test_a_broadcom_switch_is_not_its_own_lower_level():
    same = 'vendor="0x1000" device="0xc010" subsystem_vendor="0x1000" subsystem_device="0xa096"'
    bridge = f'<pci busid="0000:a0:00.0" class="0x060400" {same}>{{}}</pci>'
    with pytest.raises(ArgumentError, match=r"bridge 0000:a0:00\.0 is below itself"):
        machine(host(bridge.format(bridge.format(""))))


def test_rows_of_c2c_add_up():
    found = machine(host(gpu(0, '<c2c bw="40000" count="2"/><c2c bw="20000" count="1"/>')))
    one = link(found, "CPU/0", "GPU/0", LinkKind.C2C)
    assert (one.bandwidth, one.count, one.source) == (100.0, 3, Source.REPORTED)


def test_grace():
    found = machine(host(gpu(0, '<c2c bw="44712" count="10"/>')))
    assert link(found, "CPU/0", "GPU/0", LinkKind.C2C).bandwidth == pytest.approx(447.12)


@pytest.mark.parametrize("gcn", ["gfx942", "942", "gfx942:sramecc+:xnack-"])
def test_rccl(gcn):
    both = 'sm="304" gcn="' + gcn + '" arch="38911"'
    rows = [f'<xgmi target="0000:0{1 - n}:00.0" count="1" tclass="0x120000"/>' for n in range(2)]
    found = machine(host(gpu(0, rows[0], both), gpu(1, rows[1], both)))
    assert all(one.amd and one.sm == 942 for one in found.gpus)
    assert link(found, "GPU/0", "GPU/1", LinkKind.XGMI).bandwidth == 48.0


def test_the_number_of_gfx90a():
    found = machine(host(gpu(0, "", 'gcn="gfx90a"'), gpu(1, "", 'gcn="gfx90a:xnack-"')))
    assert [one.sm for one in found.gpus] == [910, 910]


def test_cpus_that_come_twice_are_one():
    found = machine(host(gpu(0)), host(gpu(1)), host(gpu(2), numa=-1), host(gpu(3), numa=-1))
    assert [node.numa for node in found.nodes if isinstance(node, Cpu)] == [0, -1]


def test_a_cpu_without_a_number_is_unknown():
    found = built(f"<system><cpu {INTEL}>{gpu(0)}</cpu></system>")
    assert [node.numa for node in found.nodes if isinstance(node, Cpu)] == [-1]
    assert link(found, "GPU/0", "CPU/?", LinkKind.PCI).confidence is Confidence.LOW


def test_what_nobody_knows_between_sockets_is_no_limit():
    found = built('<system><cpu numaid="0" arch="x86_64" vendor="?"/><cpu numaid="1"/></system>')
    one = link(found, "CPU/0", "CPU/1", LinkKind.SYS)
    assert (one.bandwidth, one.confidence) == (5000.0, Confidence.LOW)
    assert len(found.notes) == 2


def test_hosts_are_numbered_in_the_order_of_the_file():
    cpus = [
        host(gpu(n % 2, rank=False), numa=n % 2, more=f'host_hash="{code}"')
        for n, code in enumerate(("0xb", "0x00B", "0xa", "a"))
    ]
    found = machine(*cpus)
    assert found.hosts == (0, 1)
    assert [one.name for one in found.gpus] == ["GPU/0-0", "GPU/0-1", "GPU/1-0", "GPU/1-1"]
    assert linked(found, LinkKind.SYS) == {
        (f"CPU/{h}-{a}", f"CPU/{h}-{1 - a}", 1) for h in (0, 1) for a in (0, 1)
    }


def test_several_systems_are_several_hosts():
    one = f"<system>{host(gpu(0, to_switch(), rank=False))}</system>"
    found = built(f"<systems>{one * 3}</systems>")
    assert found.hosts == (0, 1, 2)
    assert sum(isinstance(node, NvSwitch) for node in found.nodes) == 3


def test_links_do_not_leave_the_host():
    rows = row("0000:01:00.0", 2), row("0000:00:00.0", 2)
    cpus = [
        host(gpu(0, rows[0], rank=False), gpu(1, rows[1], rank=False), more=f'host_hash="{n}"')
        for n in range(2)
    ]
    found = machine(*cpus)
    assert {(a[:5], b[:5]) for a, b, _ in linked(found, LinkKind.NVLINK)} == {
        ("GPU/0", "GPU/0"),
        ("GPU/1", "GPU/1"),
    }


@pytest.mark.parametrize(
    ("target", "arch", "more", "switches"),
    [
        ("fffffff:ff:ff.0", "arm64", "", 1),
        ("fffffff:ff:ff.0", "x86_64", "", 2),
        ("0000:c4:00.0", "arm64", "", 2),
        ("fffffff:ff:ff.0", "x86_64", 'fabric="all"', 1),
    ],
)
def test_hosts_share_the_switches_that_none_of_them_sees(target, arch, more, switches):
    cpus = [
        host(gpu(0, to_switch(target=target, more=more), rank=False), more=f'host_hash="{n}"')
        for n in range(2)
    ]
    found = machine(*(cpu.replace("x86_64", arch) for cpu in cpus))
    assert sum(isinstance(node, NvSwitch) for node in found.nodes) == switches


def test_ranks_that_share_a_device_are_said():
    shared = gpu(0).replace("</pci>", '<gpu dev="0" sm="90" rank="1"/></pci>')
    found = machine(host(shared, gpu(2)))
    assert [one.rank for one in found.gpus] == [0, 2]
    assert "several <gpu> share" in found.notes[0]
