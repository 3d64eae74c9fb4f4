"""The picture: what is drawn how wide, and that nothing covers or cuts off anything else."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import combinations

import pytest

from ringcoll.errors import ArgumentError, MachineError
from ringcoll.topology.draw.edges import LINK_COLOUR, ring_colour
from ringcoll.topology.draw.files import format_svg, write_picture
from ringcoll.topology.draw.picture import picture
from ringcoll.topology.draw.shapes import Arc, Box, Drawing, Straight, Stroke, Text, text_width
from ringcoll.topology.draw.tree import format_tree
from ringcoll.topology.presets import PRESETS, preset
from ringcoll.topology.rings import Limit, Ring, RingSet
from ringcoll.topology.search import find_rings
from ringcoll.topology.system import PathClass, System
from tests.topology.by_hand import mesh, ring, rings_of, switched, tree
from tests.topology.real import FILES, built, system

SQUARE = [(0, 1, 2), (1, 2, 1), (2, 3, 2), (3, 0, 1)]


def without_rings(found: System) -> Drawing:
    return picture(found, RingSet(found.gpus, ()))


def frame(shape: Text | Box) -> tuple[float, float, float, float]:
    if isinstance(shape, Box):
        return shape.x, shape.y, shape.right, shape.bottom
    width = text_width(shape.text, shape.size)
    left = shape.x - {"start": 0.0, "middle": width / 2, "end": width}[shape.anchor]
    return left, shape.y - 0.8 * shape.size, left + width, shape.y + 0.2 * shape.size


def overlap(a: Text | Box, b: Text | Box) -> bool:
    (left, top, right, bottom), (left2, top2, right2, bottom2) = frame(a), frame(b)
    return left < right2 and left2 < right and top < bottom2 and top2 < bottom


def inside(a: Text | Box, b: Box) -> bool:
    (left, top, right, bottom), (left2, top2, right2, bottom2) = frame(a), frame(b)
    return left2 <= left and top2 <= top and right <= right2 and bottom <= bottom2


def assert_readable(drawing: Drawing) -> None:
    page = Box(0.0, 0.0, drawing.width, drawing.height, "", "")
    texts = [shape for shape in drawing.shapes if isinstance(shape, Text)]
    boxes = [shape for shape in drawing.shapes if isinstance(shape, Box)]
    assert [text for text in texts if not inside(text, page)] == []
    assert [box for box in boxes if not inside(box, page)] == []
    for text, other in combinations(texts, 2):
        assert not overlap(text, other), (text, other)
    for box, under in combinations(boxes, 2):
        assert not overlap(box, under) or inside(box, under) or inside(under, box), (box, under)
    for text in texts:
        covered = [box for box in boxes if overlap(text, box)]
        assert all(inside(text, box) for box in covered), text
    for stroke in (shape for shape in drawing.shapes if isinstance(shape, Stroke)):
        ends = [stroke.start, *(curve[-2:] for curve in stroke.curves)]
        half = stroke.width / 2
        assert all(half <= x <= drawing.width - half for x, _ in ends), stroke
        assert all(0 <= y <= drawing.height - half for _, y in ends), stroke


def texts(drawing: Drawing) -> list[str]:
    return [shape.text for shape in drawing.shapes if isinstance(shape, Text)]


def strokes(drawing: Drawing, colour: str) -> list[Stroke]:
    return [s for s in drawing.shapes if isinstance(s, Stroke) and s.colour == colour]


def arcs(drawing: Drawing, colour: str) -> list[Stroke]:
    return [stroke for stroke in strokes(drawing, colour) if len(stroke.curves) == 2]


@pytest.mark.parametrize("name", FILES)
def test_files_are_readable(name):
    assert_readable(without_rings(system(name)))


@pytest.mark.parametrize("name", PRESETS)
def test_known_machines_are_readable(name):
    found = preset(name)
    drawing = without_rings(found)
    assert_readable(drawing)
    # Hosts that are alike are drawn once.
    drawn = len(found.gpus) // len(found.hosts)
    assert {f"GPU{i}" for i in range(drawn)} <= set(texts(drawing))
    assert f"GPU{drawn}" not in texts(drawing)


def test_hosts_that_are_alike_are_drawn_once():
    said = texts(without_rings(preset("gb200-nvl72")))
    assert {"host 0; hosts like it: 1-17", "NVSwitch of hosts 0-17", "network"} <= set(said)

    def host(at: int, width: int) -> str:
        return f"""<system version="1"><cpu numaid="0"><pci busid="0000:01:00.0" class="0x030200"
            link_speed="16 GT/s" link_width="{width}"><gpu dev="0" sm="80" rank="{at}"/></pci>
            <nic><net dev="0" name="ib"/></nic></cpu></system>"""

    found = built(f"<systems>{host(0, 16)}{host(1, 8)}{host(2, 16)}{host(3, 16)}</systems>")
    said = texts(without_rings(found))
    assert {"host 0; hosts like it: 2-3", "host 1", "GPU0", "GPU1"} <= set(said)
    assert "GPU2" not in said and said.count("network") == 2


def test_rings_of_nics_that_share_a_box_are_drawn():
    def host(at: int) -> str:
        nets = "".join(f'<net dev="{i}" name="ib{i}" speed="100000"/>' for i in range(9))
        return f"""<system version="1"><cpu numaid="0"><pci busid="0000:01:00.0" class="0x030200"
            link_speed="32 GT/s" link_width="16"><gpu dev="0" sm="90" rank="{at}"/></pci>
            <nic>{nets}</nic></cpu></system>"""

    found = built(f"<systems>{host(0)}{host(1)}</systems>")
    rings = find_rings(found)
    drawing = picture(found, rings)
    assert "9 NICs" in texts(drawing) and len(rings.rings) > 1
    (only,) = {
        shape.x for shape in drawing.shapes if isinstance(shape, Text) and "9 NI" in shape.text
    }
    for i in range(len(rings.rings)):
        assert any(abs(stroke.start[0] - only) < 12 for stroke in strokes(drawing, ring_colour(i)))


def test_links_are_labelled_with_their_bandwidth():
    drawing = without_rings(mesh(SQUARE, 4))
    assert_readable(drawing)
    (single, double) = (str(40 * count // 2) for count in (1, 2))
    assert texts(drawing).count(single) == texts(drawing).count(double) == 2
    assert {f"{double}: NVLink x2", f"{single}: NVLink"} <= set(texts(drawing))


def test_links_are_as_wide_as_their_bandwidth():
    found = mesh(SQUARE, 4)
    widths = sorted(stroke.width for stroke in arcs(without_rings(found), LINK_COLOUR))
    assert len(widths) == 4
    assert widths[0] == widths[1] and widths[2] == widths[3]
    assert widths[2] == pytest.approx(2 * widths[0])


def test_a_ring_colours_its_share_of_a_link():
    found = mesh(SQUARE, 4)
    rings = rings_of(found, ring(found, (0, 1, 2, 3), 20.0), ring(found, (0, 3, 2, 1), 10.0))
    drawing = picture(found, rings)
    assert_readable(drawing)
    bands = {band.start[0]: band.width for band in arcs(drawing, LINK_COLOUR)}
    assert len(bands) == 4
    narrow, wide = min(bands.values()), max(bands.values())
    first = arcs(drawing, ring_colour(0))
    second = arcs(drawing, ring_colour(1))
    assert len(first) == len(second) == 4
    # 20 GB/s fill a direction of the single links, half of one of the double links.
    assert all(stroke.width == pytest.approx(narrow / 2) for stroke in first)
    assert all(stroke.width == pytest.approx(narrow / 4) for stroke in second)
    assert wide == pytest.approx(2 * narrow)
    assert "20 GB/s: 0 1 2 3 0" in texts(drawing) and "10 GB/s: 0 3 2 1 0" in texts(drawing)
    assert "2 rings, 30 GB/s together" in texts(drawing)


def test_traffic_keeps_to_the_right():
    found = switched(2)
    drawing = picture(found, rings_of(found, ring(found, (0, 1), 120.0, "NVS/0")))
    (left, up), (right, down) = (
        sorted(stroke.start[0] for stroke in strokes(drawing, ring_colour(0))[i : i + 2])
        for i in (0, 2)
    )
    assert left < up < right < down
    band = strokes(drawing, LINK_COLOUR)[0]
    assert left < band.start[0] < up


def test_a_full_link_is_coloured_all_over_though_bytes_count_double():
    found = tree()
    order = [f"GPU/{i}" for i in range(4)]
    paths = tuple(
        (a, f"PCI/{i // 2}", *(() if i % 2 == 0 else ("CPU/0", f"PCI/{(i + 1) // 2 % 2}")), b)
        for i, (a, b) in enumerate(zip(order, [*order[1:], order[0]], strict=True))
    )
    hops = (PathClass.PIX, PathClass.PHB, PathClass.PIX, PathClass.PHB)
    limits = [Limit("PCI/0 -> CPU/0 (PCIe)", 12.0, 12.0)]
    drawing = picture(found, rings_of(found, Ring((0, 1, 2, 3), 10.0, hops, paths), limits=limits))
    band = strokes(drawing, LINK_COLOUR)[0].width
    stripes = strokes(drawing, ring_colour(0))
    assert len(stripes) == 2 * 6 + 1
    assert max(stripe.width for stripe in stripes[:2]) == pytest.approx(band / 2)
    assert min(stripe.width for stripe in stripes[:2]) == pytest.approx(band / 2 * 10 / 12)


def test_gpus_that_are_in_no_ring_are_pale():
    found = switched(4)
    drawing = picture(found, RingSet(found.gpus[:3], ()))
    fills = {
        box.fill
        for box in drawing.shapes
        if isinstance(box, Box) and box.height > 30 and box.x > 280
    }
    assert fills == {"#f3f3f3"}
    assert "no ring: 3 GPUs" in texts(drawing)


def test_more_rings_and_gpus_than_a_legend_holds():
    found = switched(20)
    one = ring(found, range(20), 1.0, "NVS/0")
    drawing = picture(found, rings_of(found, *[one] * 40))
    assert_readable(drawing)
    assert "and 8 more" in texts(drawing)
    assert any(
        text.startswith("1 GB/s: 0 1 2") and text.endswith("… 19 0") for text in texts(drawing)
    )


def test_parallel_lines_stay_apart():
    ways = Straight(0.0, 0.0, 10.0, 0.0), Straight(0.0, 10.0, 0.0, 0.0)
    assert ways[0].stroke(2.0, 1.0, "").start == (0.0, 2.0)
    assert ways[1].stroke(2.0, 1.0, "").start == (2.0, 10.0)
    valley, hill = Arc(0.0, 10.0, 0.0, 4.0), Arc(0.0, 10.0, 0.0, -4.0)
    assert valley.stroke(1.0, 1.0, "").start == (-1.0, 0.0)
    assert hill.stroke(1.0, 1.0, "").start == (1.0, 0.0)
    assert valley.stroke(1.0, 1.0, "").curves[0][-1] == 5.0
    assert hill.stroke(1.0, 1.0, "").curves[0][-1] == -3.0


ODD = {
    "nothing": '<system version="1"/>',
    "a CPU": '<system version="1"><cpu numaid="0"/></system>',
    "a port of two CPUs among many": """<system version="1"><cpu numaid="-1">
        <pci busid="10000:01:00.0" class="0x030200"><gpu dev="0" sm="80"/></pci>
        <nic><net dev="0" name="averyveryverylongname0"/><net dev="1" name="b"/></nic></cpu>
        <cpu numaid="1"><nic><net dev="0" name="averyveryverylongname0"/><net dev="2" name="c"/>
        <net dev="3" name="d"/><net dev="4" name="e"/><net dev="5" name="f"/></nic></cpu>
        </system>""",
    "two fabrics and a link between switches": """<system version="1"><cpu numaid="0">
        <pci busid="0000:10:00.0" class="0x060400"><pcilink target="0000:20:00.0"/>
        <pci busid="0000:11:00.0" class="0x030200"><gpu dev="0" sm="90">
        <nvlink target="fffffff:ffff:ff" count="18" tclass="0x068000" fabric="a"/></gpu></pci>
        <pci busid="0000:12:00.0" class="0x030200"><gpu dev="1" sm="90">
        <nvlink target="fffffff:ffff:ff" count="18" tclass="0x068000" fabric="b"/></gpu></pci></pci>
        <pci busid="0000:20:00.0" class="0x060400"><pcilink target="0000:10:00.0"/>
        <pci busid="0000:21:00.0" class="0x030200"><gpu dev="2" sm="90">
        <nvlink target="fffffff:ffff:ff" count="18" tclass="0x068000" fabric="a"/></gpu></pci></pci>
        </cpu></system>""",
}


@pytest.mark.parametrize("name", ODD)
def test_odd_machines_are_readable(name):
    drawing = without_rings(built(ODD[name]))
    assert_readable(drawing)
    assert ElementTree.fromstring(format_svg(drawing)) is not None


def test_switches_that_lead_to_each_other_hang_side_by_side():
    found = built(ODD["two fabrics and a link between switches"])
    lines = format_tree(found).splitlines()
    assert [line[:12] for line in lines if "switch" in line] == ["├─ switch 10", "└─ switch 20"]
    assert {"NVSwitch0", "NVSwitch1"} <= set(texts(without_rings(found)))


def test_svg_is_well_formed_and_the_same_every_time():
    found = system("dgx1-p100.xml")
    rings = rings_of(found, ring(found, (0, 4, 7, 5, 6, 2, 3, 1), 18.0))
    text = format_svg(picture(found, rings))
    assert text == format_svg(picture(system("dgx1-p100.xml"), rings))
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(root.findall("{*}path")) > 16
    labels = {element.text for element in root.findall("{*}text")}
    assert {"GPU0", "GPU7", "switch 03:00.0", "18 GB/s: 0 4 7 5 6 2 3 1 0"} <= labels


def test_titles_are_escaped():
    found = System(switched(2).nodes, switched(2).links, title="<A & B>")
    root = ElementTree.fromstring(format_svg(without_rings(found)))
    assert root.findtext("{*}title") == "<A & B>"


def test_files_by_their_endings(tmp_path):
    found = tree()
    rings = RingSet(found.gpus, ())
    write_picture(found, rings, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    write_picture(found, rings, tmp_path / "b.PNG")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.PNG").read_bytes()
    write_picture(found, rings, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text(encoding="utf-8").startswith("<?xml")
    write_picture(found, rings, tmp_path / "a.txt")
    assert "└─ GPU3 13:00.0" in (tmp_path / "a.txt").read_text(encoding="utf-8")
    with pytest.raises(ArgumentError, match=r"\.svg, \.png or \.txt"):
        write_picture(found, rings, tmp_path / "a.gif")
    with pytest.raises(ArgumentError, match=r"none.a\.svg"):
        write_picture(found, rings, tmp_path / "none" / "a.svg")


def test_without_matplotlib_a_png_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    found = tree()
    with pytest.raises(MachineError, match=r"pip install -e '.*\[plot\]', or write \.svg"):
        write_picture(found, RingSet(found.gpus, ()), tmp_path / "a.png")
    write_picture(found, RingSet(found.gpus, ()), tmp_path / "a.svg")
    assert (tmp_path / "a.svg").exists()
