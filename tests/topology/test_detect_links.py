"""Direct NVLinks, and what contradicts them."""

from dataclasses import replace

import pytest

from ringcoll.topology.build import build
from ringcoll.topology.detect import document_of
from ringcoll.topology.detect.facts import LinkFacts, PairFacts
from ringcoll.topology.system import LinkKind
from tests.topology.replay import direct, edit, edit_links, edit_pairs

BUSES = ["06", "07", "0a", "0b", "85", "86", "89", "8a"]
CUBE = {
    **{(a, b): 1 for a in range(4) for b in range(a + 1, 4)},
    **{(a, b): 1 for a in range(4, 8) for b in range(a + 1, 8)},
    **{(a, a + 4): 1 for a in range(4)},
}


def dgx1():
    return direct([f"0000:{bus}:00.0" for bus in BUSES], CUBE)


def joins(document):
    links = [link for link in build(document).links if link.kind is LinkKind.NVLINK]
    return {
        (int(a.src[4:]), int(a.dst[4:])): a.count
        for a in links
        if a.src.startswith("GPU/") and a.dst.startswith("GPU/")
    }


def both(pairs):
    return {**pairs, **{(b, a): count for (a, b), count in pairs.items()}}


def notes(document):
    return [note.get("text") for note in document.named("note")]


def test_a_cube_mesh():
    document = document_of(dgx1())
    assert joins(document) == both(CUBE)
    assert notes(document) == []
    (one,) = {link.bandwidth for link in build(document).links if link.kind is LinkKind.NVLINK}
    assert one == 18.0


def test_the_pcie_tree_below_it():
    document = document_of(dgx1())
    assert [cpu.get("numaid") for cpu in document.named("cpu")] == ["0", "1"]
    for cpu in document.named("cpu"):
        bridges = list(cpu.named("pci"))
        assert [len(list(bridge.named("pci"))) for bridge in bridges] == [2, 2]
        assert {bridge.get("busid")[5:7] for bridge in bridges} <= {"e0", "e2", "e4", "e6"}


def test_domains_above_four_digits():
    facts = direct([f"{domain}:01:00.0" for domain in ("0001", "10000", "10001")], {(0, 2): 4})
    document = document_of(facts)
    assert joins(document) == {(0, 2): 4, (2, 0): 4}
    gpus = {gpu.busid: gpu.dev for gpu in build(document).gpus}
    assert gpus == {"0001:01:00.0": 0, "10000:01:00.0": 1, "10001:01:00.0": 2}


def test_a_link_that_only_one_end_names():
    facts = edit_links(dgx1(), 0, lambda _n, link: None if link.remote == "0000:85:00.0" else link)
    document = document_of(facts)
    left = {pair: count for pair, count in both(CUBE).items() if set(pair) != {0, 4}}
    assert joins(document) == left
    (note,) = notes(document)
    assert "GPU 0 (0000:06:00.0) reports 0 NVLinks to GPU 4 (0000:85:00.0), which reports 1" in note


def test_a_far_end_that_one_end_does_not_tell_but_the_other_names():
    def far(_n, link):
        named = link.remote == "0000:85:00.0"
        return replace(link, remote=None) if named else link

    document = document_of(edit_links(dgx1(), 0, far))
    assert joins(document) == both(CUBE)
    assert notes(document) == []


def test_links_without_names_are_not_taken_for_switches_where_others_are_direct():
    def far(n, link):
        return replace(link, remote=None, remote_type=None) if n < 2 else link

    facts = direct(["0000:01:00.0", "0000:02:00.0"], {(0, 1): 4})
    facts = edit_links(edit_links(facts, 0, far), 1, far)
    document = document_of(facts)
    assert joins(document) == {(0, 1): 2, (1, 0): 2}
    assert len(notes(document)) == 2
    assert [row.get("count") for row in document.walk() if row.tag == "nvlink"] == ["2", "2"]


def test_a_gpu_that_names_itself():
    facts = direct(["0001:00:00.0", "0002:00:00.0"], {(0, 1): 4})
    facts = edit_links(facts, 0, lambda _n, link: replace(link, remote="0001:00:00.0"))
    facts = edit_links(facts, 1, lambda _n, link: replace(link, remote="0002:00:00.0"))
    document = document_of(facts)
    assert joins(document) == {}
    assert len(notes(document)) == 2
    assert "4 NVLinks whose remote end is the GPU itself; not used" in notes(document)[0]


@pytest.mark.parametrize("kind", [0, None])
def test_a_gpu_that_is_not_here(kind):
    facts = dgx1()
    fewer = replace(facts, gpus=facts.gpus[:4])
    for index in range(4):
        fewer = edit_links(fewer, index, lambda _n, link: replace(link, remote_type=kind))
    document = document_of(fewer)
    assert joins(document) == both({pair: n for pair, n in CUBE.items() if max(pair) < 4})
    assert "1 NVLink to GPU 0000:85:00.0, which this machine does not show" in notes(document)[0]


def test_a_pair_that_the_driver_keeps_apart():
    facts = edit_pairs(
        dgx1(), lambda a, b: PairFacts(4, None, access=False) if {a, b} == {0, 1} else None
    )
    document = document_of(facts)
    assert (0, 1) not in joins(document)
    assert len(joins(document)) == 2 * len(CUBE) - 2
    assert "1 NVLink between GPU 0" in notes(document)[0]


def test_nvml_and_sysfs_on_who_shares_a_switch():
    facts = dgx1()

    def far(a, b):
        return replace(facts.pair(facts.gpus[a].busid, facts.gpus[b].busid), ancestor=ancestor)

    for ancestor, said in ((10, "a common PCIe switch"), (30, "no common PCIe switch")):
        (note,) = notes(document_of(edit_pairs(facts, far)))
        assert said in note
        assert ("and 21 more pairs" in note) == (ancestor == 10)
    near = {frozenset((n, n + 1)) for n in (0, 2, 4, 6)}

    def right(a, b):
        nearby = 20 if {a, b} in near else 40
        return replace(facts.pair(facts.gpus[a].busid, facts.gpus[b].busid), ancestor=nearby)

    assert notes(document_of(edit_pairs(facts, right))) == []


def test_a_gpu_that_mig_divides_has_no_direct_links_either():
    document = document_of(edit(dgx1(), 7, lambda gpu: replace(gpu, mig=True)))
    assert joins(document) == both({pair: n for pair, n in CUBE.items() if 7 not in pair})


def test_cpus_that_nvlink_reaches():
    facts = direct(["0002:01:00.0", "0003:01:00.0"], {(0, 1): 2})
    cpu = LinkFacts(True, True, "0004:00:00.0", 1)
    for index in (0, 1):
        facts = edit(
            facts, index, lambda gpu: replace(gpu, links=(*(gpu.links or ())[:2], cpu, cpu))
        )
    document = document_of(facts)
    assert joins(document) == {(0, 1): 2, (1, 0): 2}
    to_cpu = [
        link
        for link in build(document).links
        if link.kind is LinkKind.NVLINK and link.dst == "CPU/0"
    ]
    assert [link.count for link in to_cpu] == [2]


def test_the_link_to_a_grace_cpu():
    facts = direct(["0009:01:00.0"], {}, sm=90)
    facts = edit(facts, 0, lambda gpu: replace(gpu, c2c=(10, 44712)))
    links = [link for link in build(document_of(facts)).links if link.kind is LinkKind.C2C]
    assert [link.count for link in links] == [10, 10]
    assert links[0].bandwidth == pytest.approx(447.12)
