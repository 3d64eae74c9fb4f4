"""Rings on one host: known answers, and properties that hold on any machine."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest

from ringcoll.errors import ArgumentError
from ringcoll.topology.paths import routes
from ringcoll.topology.presets import preset
from ringcoll.topology.search import find_rings
from ringcoll.topology.search.simplex import Simplex
from ringcoll.topology.system import LinkKind, PathClass, System
from tests.topology.graph import Graph, check, mesh, switched, tree
from tests.topology.real import FILES
from tests.topology.real import system as real

KNOWN = {
    "pcie-4-one-switch": (12, 1),
    "pcie-4-two-switches": (10, 1),
    "dgx1-p100": (72, 4),
    "dgx1-v100": (120, 6),
    "minsky": (32, 1),
    "ac922-4": (32, 1),
    "ac922-6": (32, 1),
    "a100-mesh-4": (240, 12),
    "dgx2": (120, 1),
    "dgx-a100": (240, 1),
    "dgx-h100": (370.8, 1),
    "hgx-b200": (721.8, 1),
    "gb200-nvl72": (721.8, 1),
}
"""GB/s of the optimum, and a number of rings that reaches it."""


@pytest.mark.parametrize("name", KNOWN)
def test_known_machines(name):
    system = preset(name)
    found = find_rings(system)
    total, rings = KNOWN[name]
    check(system, found)
    assert found.bandwidth == pytest.approx(total, rel=1e-6)
    assert found.bound == pytest.approx(total, rel=1e-6)
    assert len(found.rings) <= rings
    assert found.limits


@pytest.mark.parametrize("name", [name for name in FILES if "16p" not in name])
@pytest.mark.parametrize("mixed", [False, True])
def test_files_of_real_machines(name, mixed):
    system = real(name)
    found = find_rings(system, mixed=mixed)
    check(system, found)
    if len(system.gpus) > 1:
        assert found.bound is not None
        assert found.bandwidth >= 0.97 * found.bound
    else:
        assert found.rings == ()


@pytest.mark.parametrize(
    ("n", "total", "most"), [(3, 2, 2), (4, 3, 6), (5, 4, 4), (6, 5, 10), (7, 6, 6), (8, 7, 7)]
)
def test_full_meshes_of_single_links(n, total, most):
    # 4 and 6 have no full set of whole-link rings: rings of half a link reach what none of these
    # can. All others have as many as a GPU has links (Tillson, 1980).
    system = mesh(n, 20)
    found = find_rings(system)
    check(system, found)
    assert found.bandwidth == pytest.approx(20 * total)
    assert len(found.rings) <= most
    assert not found.all_pairs
    if n not in (4, 6):
        assert {ring.bandwidth for ring in found.rings} == {20}


def test_on_a_switch_one_ring_in_index_order_as_wide_as_the_weakest():
    system = switched([370.8, 370.8, 360.5, 370.8])
    found = find_rings(system)
    check(system, found)
    assert [(ring.order, ring.bandwidth) for ring in found.rings] == [((0, 1, 2, 3), 360.5)]
    assert found.all_pairs
    assert {limit.link for limit in found.limits} == {
        "GPU/2 -> NVS/0 (NVLink)",
        "NVS/0 -> GPU/2 (NVLink)",
    }


def test_an_nvlink_domain_is_one_ring_too_and_large_ones_take_no_time_even_mixed():
    system = preset("gb200-nvl72")
    found = find_rings(system)
    assert found.rings[0].order == tuple(range(72))
    assert found.all_pairs
    assert find_rings(system, mixed=True).rings == found.rings


def test_two_fabrics_add_up_where_different_gpus_are_weak():
    graph = Graph()
    for switch in (0, 1):
        graph.nvswitch(switch)
        for gpu in range(4):
            if not switch:
                graph.gpu(gpu)
            width = 50 if gpu == switch else 100
            graph.two(f"GPU/{gpu}", f"NVS/{switch}", LinkKind.NVLINK, width)
    system = graph.system()
    found = find_rings(system)
    check(system, found)
    # Rings that change between the fabrics fill both where all keep to one reach 50 each.
    assert found.bandwidth == pytest.approx(150)
    assert found.all_pairs


def test_pcie_beside_nvlink_if_asked_for():
    for name, pure, both in (("dgx1-p100", 72, 78), ("dgx1-v100", 120, 126)):
        system = preset(name)
        found = find_rings(system, mixed=True)
        check(system, found)
        assert found.bandwidth >= both
        assert all(hop is PathClass.NVL for ring in find_rings(system).rings for hop in ring.hops)
        assert find_rings(system).bandwidth == pytest.approx(pure)


def test_two_switches_are_left_once_each_way():
    # The indices alternate between the switches: index order would cross four times.
    system = tree([[0, 2, 4, 6], [1, 3, 5, 7]], 12, 12, sockets=10)
    found = find_rings(system)
    check(system, found)
    assert found.bandwidth == pytest.approx(10)
    assert len(found.rings) == 1
    crossings = [hop for hop in found.rings[0].hops if hop is PathClass.SYS]
    assert len(crossings) == 2
    assert found.limits[0].link.startswith("CPU/")


def test_one_pcie_switch_is_worth_its_link_in_index_order():
    system = tree([[0, 1, 2, 3]], 12, 12)
    found = find_rings(system)
    assert [(ring.order, ring.bandwidth) for ring in found.rings] == [((0, 1, 2, 3), 12.0)]


def test_relays_where_no_ring_closes_without():
    # A star has no cycle: every second hop goes through the middle again.
    system = mesh(3, 20, [(0, 1, 1), (1, 2, 1)])
    found = find_rings(system)
    check(system, found)
    assert found.bandwidth == pytest.approx(20)
    assert PathClass.NVB in found.rings[0].hops


def test_relays_where_they_add_much():
    system = preset("dgx1-v100")
    subset = [system.gpus[at] for at in (0, 3, 4, 7)]
    found = find_rings(system, subset)
    check(system, found)
    assert found.bandwidth == pytest.approx(60)
    assert any("relays" in said for said in found.tried)


def test_of_equal_rings_the_one_that_keeps_to_nvlink():
    # Two hives of XGMI, PCIe between: 24 GB/s a ring whether it takes two hops of PCIe or eight.
    found = find_rings(real("amd-topo_8p_rome.xml"))
    assert found.bandwidth == pytest.approx(48)
    for ring in found.rings:
        assert sum(hop is PathClass.PHB for hop in ring.hops) == 2


@pytest.mark.slow
def test_sixteen_gpus():
    system = real("amd-topo_16p1h.xml")
    found = find_rings(system)
    check(system, found)
    assert found.bandwidth == pytest.approx(216)
    assert {ring.bandwidth for ring in found.rings} == {36}
    assert {hop for ring in found.rings for hop in ring.hops} == {PathClass.NVL}


def test_more_gpus_than_can_be_searched_exactly():
    system = tree([range(at, at + 5) for at in (0, 5, 10, 15)], 12, 12, sockets=10)
    found = find_rings(system)
    check(system, found)
    # Two orders of the sockets share what one alone would lose to the links between them.
    assert found.bandwidth == pytest.approx(12)
    assert found.bound is None
    assert any("without a proof" in said for said in found.tried)


def test_unequal_links():
    edges = [(0, 1, 3), (1, 2, 1), (2, 3, 3), (3, 0, 1), (0, 2, 1), (1, 3, 2)]
    system = mesh(4, 20, edges)
    found = find_rings(system)
    check(system, found)
    assert found.bandwidth >= 0.97 * enumerated(system)


def test_directions_of_unequal_width():
    graph = Graph()
    graph.gpu(0, 1, 2)
    for a in range(3):
        graph.one(f"GPU/{a}", f"GPU/{(a + 1) % 3}", LinkKind.NVLINK, 40)
        graph.one(f"GPU/{(a + 1) % 3}", f"GPU/{a}", LinkKind.NVLINK, 10)
    system = graph.system()
    found = find_rings(system)
    check(system, found)
    assert [(ring.order, ring.bandwidth) for ring in found.rings] == [
        ((0, 1, 2), 40.0),
        ((0, 2, 1), 10.0),
    ]


def test_gpus_that_cannot_reach_each_other():
    system = mesh(4, 20, [(0, 1, 1), (2, 3, 1)])
    found = find_rings(system)
    assert found.rings == ()
    assert found.bound == 0
    assert "cannot reach" in found.tried[0]
    one_way = Graph()
    one_way.gpu(0, 1)
    one_way.one("GPU/0", "GPU/1", LinkKind.NVLINK, 20)
    assert find_rings(one_way.system()).rings == ()


def test_a_gpu_that_lost_its_links_to_the_switch():
    graph = Graph()
    graph.nvswitch()
    graph.cpu(0)
    for gpu in range(4):
        graph.gpu(gpu)
        graph.two(f"GPU/{gpu}", "CPU/0", LinkKind.PCI, 48)
        if gpu != 2:
            graph.two(f"GPU/{gpu}", "NVS/0", LinkKind.NVLINK, 370.8)
    system = graph.system()
    found = find_rings(system)
    check(system, found)
    assert not found.all_pairs
    assert found.bandwidth == pytest.approx(48)


@pytest.mark.parametrize("n", [0, 1])
def test_fewer_than_two_gpus(n):
    found = find_rings(mesh(n, 20))
    assert found.rings == ()
    assert len(found.gpus) == n
    assert found.bandwidth == 0


def test_two_gpus_are_one_ring():
    found = find_rings(mesh(2, 20, [(0, 1, 3)]))
    assert [(ring.order, ring.bandwidth) for ring in found.rings] == [((0, 1), 60.0)]


def test_wrong_arguments():
    system = mesh(3, 20)
    with pytest.raises(ArgumentError, match="twice"):
        find_rings(system, [system.gpus[0]] * 2)
    with pytest.raises(ArgumentError, match="no GPU of this system"):
        find_rings(system, [*system.gpus[:2], replace(system.gpus[2], name="GPU/7")])
    with pytest.raises(ArgumentError, match="most=0"):
        find_rings(system, most=0)


def test_no_more_rings_than_asked_for():
    system = mesh(8, 20)
    found = find_rings(system, most=3)
    check(system, found, most=3)
    assert found.bandwidth >= 60


def enumerated(system: System, *, mixed: bool = True) -> float:
    """The optimum by all cycles with all choices of routes in one program."""
    found = routes(system, system.gpus)
    n = len(system.gpus)
    rows = {(link.src, link.dst, link.kind): at for at, link in enumerate(system.links)}
    widths = np.array([link.bandwidth for link in system.links])
    scale = widths.max()
    program = Simplex(widths / scale)
    for rest in permutations(range(1, n)):
        order = (0, *rest)
        for ways in product(*(found[order[at], order[(at + 1) % n]] for at in range(n))):
            if not mixed and any(way.path_class > PathClass.NVL for way in ways):
                continue
            column = np.zeros(len(rows))
            for way in ways:
                for link, factor in way.uses:
                    column[rows[link.src, link.dst, link.kind]] += factor
            program.add(column, 1.0)
    program.optimise()
    return float(program.value * scale)


def some_machine(seed: int, n: int, *, relays: bool = True) -> System:
    """NVLinks at random over a PCIe tree; without relays, NVLinks of disjoint pairs."""
    rng = random.Random(seed)
    graph = Graph()
    for cpu in (0, 1):
        graph.cpu(cpu, vendor=rng.choice(("GenuineIntel", "AuthenticAMD")))
    graph.two("CPU/0", "CPU/1", LinkKind.SYS, rng.choice((6, 10, 22)))
    for gpu in range(n):
        graph.gpu(gpu)
        graph.two(f"GPU/{gpu}", f"CPU/{rng.randrange(2)}", LinkKind.PCI, rng.choice((12, 24)))
    pairs = [(a, b) for a in range(n) for b in range(a)] if relays else [(0, 1), (2, 3)]
    for a, b in pairs:
        if rng.random() < 0.7:
            graph.nvlink(a, b, 20, rng.randint(1, 3))
    return graph.system()


@pytest.mark.parametrize("seed", range(8))
def test_column_generation_agrees_with_all_cycles(seed):
    system = some_machine(seed, 4)
    assert find_rings(system, mixed=True).bound == pytest.approx(enumerated(system), rel=1e-4)
    system = some_machine(seed, 5, relays=False)
    assert find_rings(system, mixed=True).bound == pytest.approx(enumerated(system), rel=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_direct_links_agree_with_all_cycles_of_six(seed):
    rng = random.Random(seed)
    edges = [(a, b, rng.randint(1, 3)) for a in range(6) for b in range(a) if rng.random() < 0.9]
    system = mesh(6, 20, edges)
    found = find_rings(system)
    check(system, found)
    best = enumerated(system, mixed=False)
    assert found.bound is not None
    assert found.bound >= best * (1 - 1e-6)
    if not any("relays" in said for said in found.tried):
        assert found.bound == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("seed", range(12))
def test_any_machine(seed):
    system = some_machine(seed, 3 + seed % 6)
    for mixed in (False, True):
        found = find_rings(system, mixed=mixed)
        check(system, found)
        assert found.bound is not None
        assert found.bandwidth >= 0.97 * found.bound


def test_mixed_rings_carry_no_less_where_all_classes_are_needed_anyway():
    graph = Graph()
    for cpu in range(4):
        graph.cpu(cpu)
        for other in range(cpu):
            graph.two(f"CPU/{cpu}", f"CPU/{other}", LinkKind.SYS, 16)
    graph.nvswitch()
    graph.gpu(*range(7))
    buses = ((0, 3), (2, 24), (3, 3), (3, 12), (2, 3), (1, 0.75), (3, 6))
    for gpu, (cpu, width) in enumerate(buses):
        graph.two(f"GPU/{gpu}", f"CPU/{cpu}", LinkKind.PCI, width)
    for gpu, count in ((0, 6), (2, 4), (3, 13), (4, 6), (5, 18), (6, 18)):
        graph.two(f"GPU/{gpu}", "NVS/0", LinkKind.NVLINK, count * 40.1, count)
    system = graph.system()
    mixed = find_rings(system, mixed=True)
    check(system, mixed)
    assert mixed.bandwidth >= find_rings(system).bandwidth * (1 - 1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_more_capacity_is_worth_no_less(seed):
    system = some_machine(seed, 6)
    before = find_rings(system, mixed=True).bound or 0
    rng = random.Random(seed)
    wider = rng.sample(range(len(system.links)), 4)
    links = [
        replace(link, bandwidth=link.bandwidth * (1.5 if at in wider else 1))
        for at, link in enumerate(system.links)
    ]
    after = find_rings(replace(system, links=tuple(links)), mixed=True).bound or 0
    assert after >= before * (1 - 1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_names_and_order_do_not_change_the_worth(seed):
    system = some_machine(seed, 6)
    rng = random.Random(seed)
    ranks = list(range(6))
    rng.shuffle(ranks)
    nodes = list(system.nodes)
    for gpu, rank in zip(system.gpus, ranks, strict=True):
        nodes[nodes.index(gpu)] = replace(gpu, rank=rank)
    rng.shuffle(nodes)
    links = list(system.links)
    rng.shuffle(links)
    other = System(tuple(nodes), tuple(links))
    assert [gpu.rank for gpu in other.gpus] == list(range(6))
    found, again = find_rings(system), find_rings(other)
    assert again.bound == pytest.approx(found.bound, rel=1e-5)
    check(other, again)
    assert again.bandwidth >= 0.97 * found.bandwidth


def test_the_same_machine_gives_the_same_bits():
    system = some_machine(3, 8)
    again = System(tuple(system.nodes), tuple(system.links))
    assert find_rings(system, mixed=True) == find_rings(again, mixed=True)


def test_what_was_tried_is_said():
    found = find_rings(preset("minsky"))
    assert found.tried[0] == "Path classes up to NVL close no ring."
    assert any("proven" in said for said in found.tried)
    assert "1 ring of at most 16: 32 GB/s" in found.tried[-1]
