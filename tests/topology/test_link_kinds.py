"""A class of links between GPUs is a member of ``LinkKind`` and its line of ``GPU_LINKS``."""

from __future__ import annotations

import pytest

from ringcoll.topology.draw.labels import labels_of
from ringcoll.topology.draw.matrix import format_matrix
from ringcoll.topology.draw.words import format_machine
from ringcoll.topology.search import find_rings
from ringcoll.topology.system import GPU_LINKS, GpuLinks, LinkKind, PathClass
from tests.topology.real import built, link


@pytest.fixture
def planted(monkeypatch):
    """A kind that the package does not have."""
    kind = object.__new__(LinkKind)
    kind._name_, kind._value_ = "NEW", "NewLink"
    row = GpuLinks(
        element="newlink",
        payload=lambda sm: 50.0 if sm == 90 else 40.0,
        nominal=lambda sm: 64.0,
        constants="Somebody",
        cell="NW#",
        legend="# NewLinks, directly or by switches",
        switch="NewSwitch",
    )
    monkeypatch.setitem(GPU_LINKS, kind, row)
    return kind


def machine(*rows):
    """A host with a GPU for each text of link rows."""
    gpus = "".join(
        f'<pci busid="0000:{dev:02x}:00.0" class="0x030200" link_speed="32 GT/s" link_width="16">'
        f'<gpu dev="{dev}" sm="90" rank="{dev}">{text}</gpu></pci>'
        for dev, text in enumerate(rows)
    )
    return built(f'<system version="1"><cpu numaid="0" arch="x86_64">{gpus}</cpu></system>')


def to_gpu(element, dev, count):
    return f'<{element} target="0000:{dev:02x}:00.0" count="{count}" tclass="0x030200"/>'


def test_a_new_kind_joins_gpus_directly(planted):
    found = machine(to_gpu("newlink", 1, 3), to_gpu("newlink", 0, 3))
    one = link(found, "GPU/0", "GPU/1", planted)
    assert (one.bandwidth, one.nominal, one.count) == (150.0, 192.0, 3)
    said = format_machine(found)
    assert "every pair of GPUs joined directly by NewLink:\n  3 links: 150 GB/s each way" in said
    assert "payload by Somebody's constants; nominal 192 = 3 x 64" in said
    matrix = format_matrix(found)
    assert "GPU0  X     NW3   0" in matrix
    assert "  NW#   # NewLinks, directly or by switches\n" in matrix
    assert "NVLink" not in said + matrix
    assert find_rings(found, found.gpus).rings[0].hops == (PathClass.NVL,) * 2


def test_a_new_kind_joins_gpus_by_switches(planted):
    row = '<newlink target="fffffff:ff:ff.0" count="4" tclass="0x068000"/>'
    found = machine(row, row, row)
    assert "every GPU has 4 NewLinks to the NewSwitch: 200 GB/s each way" in format_machine(found)
    assert labels_of(found)["NVS/0"] == "NewSwitch"
    assert "GPU2  NW4   NW4   X     0" in format_matrix(found)


def test_kinds_are_not_mixed(planted):
    ends = [to_gpu("newlink", 1 - dev, 3) + to_gpu("nvlink", 1 - dev, 2) for dev in range(2)]
    found = machine(*ends)
    assert link(found, "GPU/0", "GPU/1", planted).count == 3
    assert link(found, "GPU/0", "GPU/1", LinkKind.NVLINK).bandwidth == pytest.approx(41.2)
    said = format_machine(found)
    assert "directly by NewLink:\n  3 links" in said and "directly by NVLink:\n  2 links" in said
    assert "NW3" in format_matrix(found)


def test_a_row_counts_only_as_far_as_the_other_end_has_its_kind(planted):
    found = machine(to_gpu("newlink", 1, 3), to_gpu("nvlink", 0, 3))
    assert not [one for one in found.links if one.kind in GPU_LINKS]
    assert len([note for note in found.notes if "3 links" in note]) == 1


def test_words_of_kinds_are_their_own():
    for words in ("element", "cell"):
        assert len({getattr(row, words) for row in GPU_LINKS.values()}) == len(GPU_LINKS)
