"""NVSwitches: seen, hidden in a virtual machine, degraded, divided, contradicted."""

from dataclasses import replace

import pytest

from ringcoll.topology.build import build
from ringcoll.topology.detect import document_of
from ringcoll.topology.detect.facts import FabricFacts, PairFacts, PciFacts
from ringcoll.topology.document import Element, parse, write
from ringcoll.topology.system import Confidence, Cpu, LinkKind, NvSwitch
from tests.topology.replay import edit, edit_links, edit_pairs, only, vm_facts

SWITCHES = [f"0000:{bus}:00.0" for bus in ("07", "08", "09", "0a")]


def switches(system):
    return [node.name for node in system.nodes if isinstance(node, NvSwitch)]


def counts(system):
    """How many links each GPU has to which switch."""
    links = [link for link in system.links if link.kind is LinkKind.NVLINK]
    return {link.src: (link.dst, link.count) for link in links if link.src.startswith("GPU/")}


def notes(document):
    return [note.get("text") for note in document.named("note")]


@pytest.mark.parametrize("indices", [range(8), (0, 1), (2, 5), (1, 3, 4, 6), (7,)])
def test_the_virtual_machine_has_one_hidden_switch(indices):
    document = document_of(only(vm_facts(), indices))
    system = build(document)
    assert switches(system) == ["NVS/0"]
    assert len(system.gpus) == len(indices)
    for gpu in system.gpus:
        (up,) = (link for link in system.out[gpu.name] if link.dst == "NVS/0")
        (down,) = (link for link in system.out["NVS/0"] if link.dst == gpu.name)
        for link in (up, down):
            assert link.count == 18
            assert link.bandwidth == pytest.approx(370.8)
            assert link.nominal == pytest.approx(478.116)
    assert notes(document) == []


def test_a_flat_bus_says_little():
    system = build(document_of(vm_facts()))
    cpus = [node for node in system.nodes if isinstance(node, Cpu)]
    assert [cpu.numa for cpu in cpus] == [-1]
    pci = [link for link in system.links if link.kind is LinkKind.PCI]
    assert len(pci) == 16
    assert {link.confidence for link in pci} == {Confidence.LOW}
    assert {link.bandwidth for link in pci} == {48.0}


def test_a_document_of_facts_round_trips():
    document = document_of(edit(vm_facts(), 4, lambda gpu: replace(gpu, mig=True)))
    assert parse(write(document).encode(), "facts") == document
    assert len(notes(document)) == 1


def test_a_gpu_with_fewer_links_is_degraded():
    down = edit_links(vm_facts(), 3, lambda n, link: replace(link, active=n < 16))
    document = document_of(down)
    system = build(document)
    found = counts(system)
    assert found.pop("GPU/3") == ("NVS/0", 16)
    assert set(found.values()) == {("NVS/0", 18)}
    assert any("GPU/3 16: degraded links" in note for note in system.notes)


@pytest.mark.parametrize("how", ["down", "none", "unknown", "no P2P"])
def test_a_gpu_without_links_stays_out(how):
    changes = {
        "down": lambda _n, link: replace(link, active=False),
        "none": lambda _n, _link: None,
        "no P2P": lambda _n, link: replace(link, p2p=False),
    }
    if how == "unknown":
        facts = edit(vm_facts(), 5, lambda gpu: replace(gpu, links=None))
    else:
        facts = edit_links(vm_facts(), 5, changes[how])
    system = build(document_of(facts))
    found = counts(system)
    assert "GPU/5" not in found
    assert set(found.values()) == {("NVS/0", 18)}
    assert len(found) == 7
    said = " ".join(system.notes)
    assert "GPU/5: no NVLink to NVS/0, unlike other GPUs of the host; left out" in said
    assert ("carry no P2P" in said) == (how == "no P2P")
    assert ("does not report its NVLinks" in said) == (how == "unknown")


def seen(facts, but=()):
    """The same machine where the switches are on the bus: 4, 5, 5 and 4 links to each."""
    order = [0] * 4 + [1] * 5 + [2] * 5 + [3] * 4
    for index in range(len(facts.gpus)):
        if index not in but:
            facts = edit_links(
                facts, index, lambda n, link: replace(link, remote=SWITCHES[order[n]])
            )
    shown = tuple(PciFacts(busid, (busid,), "0x068000") for busid in SWITCHES)
    return replace(facts, pci=(*facts.pci, *shown))


def test_switches_that_are_seen():
    document = document_of(seen(vm_facts()))
    gpu = next(element for element in document.walk() if element.tag == "gpu")
    rows = [(row.get("target"), row.get("count"), row.get("tclass")) for row in gpu.children]
    assert rows == [(s, n, "0x068000") for s, n in zip(SWITCHES, "4554", strict=True)]
    assert set(counts(build(document)).values()) == {("NVS/0", 18)}


def test_one_gpu_that_does_not_see_what_others_see():
    document = document_of(seen(vm_facts(), but=[6]))
    assert set(counts(build(document)).values()) == {("NVS/0", 18)}
    assert notes(document) == []


@pytest.mark.parametrize("kind", [None, 255])
def test_a_far_end_that_is_on_no_bus_is_a_switch(kind):
    def far(_n, link):
        return replace(link, remote="0000:c5:00.0", remote_type=kind)

    facts = vm_facts()
    for index in range(8):
        facts = edit_links(facts, index, far)
    assert set(counts(build(document_of(facts))).values()) == {("NVS/0", 18)}


def unnamed(facts, index, kind=None):
    return edit_links(facts, index, lambda _n, link: replace(link, remote=None, remote_type=kind))


def test_far_ends_that_nvml_does_not_name():
    facts = vm_facts()
    for index in range(8):
        facts = unnamed(facts, index)
    document = document_of(facts)
    assert set(counts(build(document)).values()) == {("NVS/0", 18)}
    assert len(notes(document)) == 8
    assert "count as links to NVSwitches" in notes(document)[0]


def test_a_far_end_without_a_name_that_is_a_switch():
    document = document_of(unnamed(vm_facts(), 2, kind=2))
    assert set(counts(build(document)).values()) == {("NVS/0", 18)}
    assert notes(document) == []


@pytest.mark.parametrize("status", [5, None])
def test_far_ends_without_a_name_need_the_word_of_every_pair(status):
    def far(a, b):
        return PairFacts(status, 30, access=True) if {a, b} == {2, 6} else None

    document = document_of(unnamed(edit_pairs(vm_facts(), far), 2))
    found = counts(build(document))
    assert "GPU/2" not in found
    assert len(found) == 7
    assert any(
        "does not report the remote end of 18 NVLinks; not used" in n for n in notes(document)
    )


def clique(facts, index, number, state=3, cluster="0" * 32):
    fabric = FabricFacts(state, 0, number, cluster)
    return edit(facts, index, lambda gpu: replace(gpu, fabric=fabric))


def test_two_cliques_are_two_fabrics():
    facts = edit_pairs(
        vm_facts(),
        lambda a, b: None if (a < 4) == (b < 4) else PairFacts(5, 30, access=False),
    )
    for index in range(4, 8):
        facts = clique(facts, index, 1)
    document = document_of(facts)
    found = counts(build(document))
    assert [found[f"GPU/{n}"] for n in range(8)] == [("NVS/0", 18)] * 4 + [("NVS/1", 18)] * 4
    (note,) = notes(document)
    assert note.startswith("the NVSwitches form 2 partitions: GPU 0 (0000:00:06.0), GPU 1")
    assert note in build(document).notes
    without = document_of(edit_links(facts, 2, lambda _n, _link: None))
    assert counts(build(without)).keys() == {f"GPU/{n}" for n in (0, 1, 3, 4, 5, 6, 7)}
    said = "GPU 2 (0000:00:08.0) has no usable NVLink, others have 18; it is left out"
    assert any(said in note for note in notes(without))


def rows(document):
    return {row.get("fabric") for row in document.walk() if row.tag == "nvlink"}


def test_fabrics_are_named_only_where_need_be():
    facts = vm_facts()
    assert rows(document_of(facts)) == {""}
    parts = clique(facts, 0, 1)
    for index in (1, 2, 3):
        parts = clique(parts, index, 1)
    assert rows(document_of(parts)) == {"0000:00:06.0", "0000:00:0a.0"}
    for index in range(8):
        facts = clique(facts, index, 7, cluster="ab" * 16)
    assert rows(document_of(facts)) == {"ab" * 16 + "-7"}


def test_hosts_of_one_cluster_share_a_fabric():
    facts = vm_facts()
    for index in range(8):
        facts = clique(facts, index, 7, cluster="ab" * 16)
    hosts = (document_of(facts), document_of(facts))
    system = build(Element("systems", {}, hosts))
    assert switches(system) == ["NVS/0"]
    assert len(counts(system)) == 16
    alone = build(Element("systems", {}, (document_of(vm_facts()),) * 2))
    assert len(switches(alone)) == 2


def test_pairs_alone_divide_a_fabric():
    far = PairFacts(5, 30, access=True)
    document = document_of(edit_pairs(vm_facts(), lambda a, b: None if a % 2 == b % 2 else far))
    found = counts(build(document))
    assert {found[f"GPU/{n}"] for n in (0, 2, 4, 6)} == {("NVS/0", 18)}
    assert {found[f"GPU/{n}"] for n in (1, 3, 5, 7)} == {("NVS/1", 18)}


def test_cliques_against_the_word_of_pairs():
    document = document_of(clique(vm_facts(), 7, 1))
    found = counts(build(document))
    assert "GPU/7" not in found
    assert len(found) == 7
    said = " ".join(notes(document))
    assert "their fabric cliques differ" in said
    assert (
        "GPU 7 (0000:00:0d.0): its 18 NVLinks lead to NVSwitches, but P2P reaches no other" in said
    )


def test_cuda_has_the_last_word_of_a_pair():
    facts = edit_pairs(
        vm_facts(), lambda a, b: PairFacts(0, 30, access=False) if 1 in (a, b) else None
    )
    document = document_of(facts)
    found = counts(build(document))
    assert "GPU/1" not in found
    assert len(found) == 7
    assert any("NVML reports NVLink between GPU 0" in note for note in notes(document))


def test_a_fabric_of_which_one_pair_is_not_joined():
    facts = edit_pairs(vm_facts(), lambda a, b: PairFacts(nvlink=5) if {a, b} == {2, 6} else None)
    found = counts(build(document_of(facts)))
    assert "GPU/6" not in found
    assert len(found) == 7


def test_a_fabric_manager_that_is_not_ready():
    facts = vm_facts()
    for index in range(8):
        facts = clique(facts, index, 0, state=2)
    nothing = edit_pairs(facts, lambda _a, _b: PairFacts())
    document = document_of(nothing)
    assert counts(build(document)) == {}
    assert any("is the fabric manager running?" in note for note in notes(document))


def test_without_a_word_on_pairs_and_fabrics_the_links_are_believed():
    facts = edit_pairs(vm_facts(), lambda _a, _b: PairFacts())
    for index in range(8):
        facts = edit(facts, index, lambda gpu: replace(gpu, fabric=None))
    assert set(counts(build(document_of(facts))).values()) == {("NVS/0", 18)}


def test_instances_of_mig_have_no_nvlink():
    document = document_of(edit(vm_facts(), 0, lambda gpu: replace(gpu, mig=True)))
    found = counts(build(document))
    assert "GPU/0" not in found
    assert len(found) == 7
    assert "GPU 0 (0000:00:06.0) is in MIG mode" in notes(document)[0]


def test_links_of_several_speeds_run_at_the_slowest():
    facts = edit_links(vm_facts(), 0, lambda n, link: replace(link, speed=26562 - (n == 3) * 562))
    document = document_of(facts)
    system = build(document)
    assert system.out["GPU/0"][1].nominal == pytest.approx(18 * 26.0)
    assert "26000 to 26562 MB/s" in notes(document)[0]
