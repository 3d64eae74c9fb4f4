"""Rings that stores take: no relays, and of each pair the one way there is."""

from __future__ import annotations

from itertools import combinations

import pytest

from ringcoll.algorithms import build
from ringcoll.launch import Launch
from ringcoll.lower import lower
from ringcoll.model.links import Wire
from ringcoll.model.machine import machine_links, machine_of
from ringcoll.topology.paths import routes, stores
from ringcoll.topology.presets import PRESETS, preset
from ringcoll.topology.search import find_rings
from ringcoll.topology.system import PathClass, subsystem
from ringcoll.verifier.prover import verify

ALONE = [name for name in PRESETS if len(preset(name).hosts) == 1]


@pytest.mark.parametrize("name", ALONE)
def test_each_pair_has_the_way_that_its_stores_take(name):
    system = preset(name)
    ways = routes(system, system.gpus)
    for pair, own in stores(ways).items():
        classes = {way.path_class for way in own}
        assert len(classes) == 1 and PathClass.NVB not in classes
        best = min(way.path_class for way in ways[pair] if way.path_class is not PathClass.NVB)
        assert classes == {best}


@pytest.mark.parametrize("size", [2, 3, 5, 7, 8])
@pytest.mark.parametrize("name", ["dgx1-p100", "dgx1-v100"])
def test_rings_without_relays(name, size):
    system = preset(name)
    subsets = list(combinations(system.gpus, size))
    for gpus in subsets[:: max(1, len(subsets) // 6)]:
        part = subsystem(system, gpus)
        found = find_rings(part, stored=True)
        ways = stores(routes(part, part.gpus))
        assert found.rings
        for ring in found.rings:
            following = (*ring.order[1:], ring.order[0])
            for hop, path in zip(zip(ring.order, following, strict=True), ring.paths, strict=True):
                assert path in {way.nodes for way in ways[hop]}
        assert found.bandwidth <= find_rings(part).bandwidth * (1 + 1e-6)


def test_a_part_of_a_machine_is_numbered_by_ranks():
    system = preset("dgx1-v100")
    part = subsystem(system, [system.gpus[6], system.gpus[5], system.gpus[1]])
    assert [gpu.busid for gpu in part.gpus] == [system.gpus[i].busid for i in (6, 5, 1)]
    assert [gpu.rank for gpu in part.gpus] == [0, 1, 2]
    assert part.title == system.title
    named = {gpu.name for gpu in part.gpus}
    assert all(
        end in named or not end.startswith("GPU")
        for link in part.links
        for end in (link.src, link.dst)
    )
    assert find_rings(system, part_gpus(system, 1, 5, 6)).bandwidth == find_rings(part).bandwidth


def part_gpus(system, *numbers):
    return [system.gpus[number] for number in numbers]


@pytest.mark.parametrize("name", ALONE)
def test_what_a_choice_goes_by(name):
    system = preset(name)
    found = find_rings(system, stored=True)
    machine = machine_of(system, found, Wire(1.0, 2e-6, 3e-6))
    assert machine.all_pairs == found.all_pairs, "none of them has two GPUs"
    if found.all_pairs:
        assert machine.channels is None, "what runs on a switch stays as it is"
    n = len(system.gpus)
    assert machine.links == machine_links(system, stored=True, alpha=2e-6, latency=3e-6)
    for src in range(n):
        for dst in range(n):
            ports = machine.links.ports(src, dst) if src != dst else ()
            alphas = [wire.alpha for _, wire in ports]
            assert alphas == [2e-6] * (src != dst) + [0.0] * (len(ports) - 1)
            assert machine.links.flight(src, dst) == (3e-6 if src != dst else 0)


@pytest.mark.parametrize("gpus", [range(8), (0, 1, 2), (0, 1, 4, 5, 6), (7, 6, 4, 3, 2, 1, 0)])
def test_plans_along_found_rings_are_proven(gpus):
    system = preset("dgx1-v100")
    part = subsystem(system, part_gpus(system, *gpus))
    machine = machine_of(part, find_rings(part, stored=True), Wire(1.0))
    rings = None if machine.channels is None else machine.channels.rings
    n = len(part.gpus)
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"):
        roots = (0, n - 1) if collective in ("broadcast", "reduce") else (0,)
        for root in roots:
            plan = build(collective, "ring", n, root=root, rings=rings)
            assert verify(lower(plan, Launch())) is not None
