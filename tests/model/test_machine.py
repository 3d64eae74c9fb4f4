"""Rings of real machines, timed on the links that their hops share."""

from __future__ import annotations

import pytest

from ringcoll.algorithms import build
from ringcoll.errors import ArgumentError
from ringcoll.model.links import Links
from ringcoll.model.machine import machine_links, ring_gain, ring_seconds
from ringcoll.model.predict import predict
from ringcoll.topology.presets import preset
from ringcoll.topology.search import find_rings
from ringcoll.topology.system import LinkKind

NBYTES = 64 << 20


@pytest.mark.parametrize(
    ("name", "relayed", "stored"),
    [("dgx1-p100", 4, 12), ("dgx1-v100", 3, 20), ("a100-mesh-4", 1.5, 1.5)],
)
def test_found_rings_beat_the_order_of_the_indices(name, relayed, stored):
    """By as much as the README says, where GPUs relay and where none does."""
    system = preset(name)
    assert ring_gain(system, find_rings(system)) == pytest.approx(relayed, rel=1e-3)
    found = find_rings(system, stored=True)
    assert ring_gain(system, found, stored=True) == pytest.approx(stored, rel=1e-3)


def test_without_relays_index_order_is_worth_the_link_between_the_cpus():
    """No NVLink joins 3 and 4, nor 7 and 0: each ring crosses that link once in each direction."""
    system = preset("dgx1-v100")
    found = find_rings(system, stored=True)
    (between,) = {link.bandwidth for link in system.links if link.kind is LinkKind.SYS}
    gain = ring_gain(system, found, stored=True)
    assert gain == pytest.approx(found.bandwidth / between)


def test_a_ring_takes_what_its_bandwidth_says():
    system = preset("dgx1-v100")
    found = find_rings(system)
    orders = [ring.order for ring in found.rings]
    shares = [ring.bandwidth for ring in found.rings]
    taken = ring_seconds(machine_links(system), orders, shares, NBYTES)
    assert taken == pytest.approx(2 * 7 / 8 * NBYTES / (found.bandwidth * 1e9), rel=1e-6)


def test_equal_shares_of_unequal_rings_take_longer():
    system = preset("dgx1-v100")
    found = find_rings(system)
    orders = [ring.order for ring in found.rings]
    shares = [ring.bandwidth for ring in found.rings]
    assert len(set(shares)) > 1
    links = machine_links(system)
    fair = ring_seconds(links, orders, shares, NBYTES)
    assert ring_seconds(links, orders, [1.0] * len(orders), NBYTES) > 1.1 * fair


def test_a_switch_is_the_switch_of_the_closed_forms():
    system = preset("dgx-h200")
    plan = build("all_reduce", "ring", 8)
    machine = predict(plan, NBYTES, machine_links(system)).seconds
    assert machine == pytest.approx(predict(plan, NBYTES, Links(370.8e9)).seconds, rel=1e-6)


def test_some_gpus_of_a_machine():
    system = preset("dgx1-v100")
    chosen = (system.gpus[0], system.gpus[3], system.gpus[2], system.gpus[1])
    found = find_rings(system, chosen)
    assert ring_gain(system, found) >= 1


def test_nothing_to_gain_without_rings():
    system = preset("dgx1-v100")
    assert ring_gain(system, find_rings(system, system.gpus[:1])) == 1
    with pytest.raises(ArgumentError, match="two or more"):
        machine_links(system, system.gpus[:1])


def test_a_machine_has_ways_and_nothing_else_has():
    with pytest.raises(ArgumentError, match="links='machine' alone, which needs them"):
        Links(1e9, topology="machine")
