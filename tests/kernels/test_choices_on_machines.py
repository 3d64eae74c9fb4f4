"""What a call on GPUs gets where the machine is known: nothing new on a switch, else rings."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest

from ringcoll.algorithms import ALGORITHMS, build
from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.dtypes import dtype_of, op_of
from ringcoll.errors import LaunchRefused
from ringcoll.executors.cuda import dual_program
from ringcoll.executors.cuda.signature import signature_text
from ringcoll.launch import ALL_MAPPED
from ringcoll.model import fastest as model
from ringcoll.plan import Buffer
from tests.communicator.known import machine_on
from tests.kernels.chosen import chosen

SIZES = (8, 100_000, 1 << 20, 64 << 20)


def call_of(name: str, nbytes: int, nranks: int) -> Call:
    wide = "all" in (COLLECTIVES[name].input, COLLECTIVES[name].output)
    units = nbytes // 4 // (nranks if wide else 1)
    op = op_of("sum") if COLLECTIVES[name].reduces else None
    return Call(name, 0, None, None, units, dtype_of("float32"), op, nbytes=nbytes)


def mapped_of(name: str) -> frozenset[Buffer]:
    return frozenset(b for b in ALL_MAPPED if b.name.lower() != COLLECTIVES[name].rooted)


def choice(
    name: str,
    nbytes: int,
    machine: Any,
    *,
    nranks: int = 8,
    mapped: bool = True,
    nvlink: bool = False,
    blocks: int = 80,
    most: int | None = None,
    **options: Any,
) -> Any:
    reached = mapped_of(name) if mapped else frozenset[Buffer]()
    call = call_of(name, nbytes, nranks)
    how: dict[str, Any] = {"mapped": reached, "blocks": most, **options}
    return chosen(call, nranks, blocks, nvlink=nvlink, known=machine, **how)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "send"])
def test_on_a_switch_everything_stays_as_it_is(name):
    machine = machine_on("dgx-h200")
    assert machine.all_pairs and machine.channels is None
    for nbytes, mapped in product(SIZES if name != "barrier" else (0,), (False, True)):
        how: dict[str, Any] = {"mapped": mapped, "nvlink": True, "blocks": 132}
        found = choice(name, nbytes, machine, **how)
        unknown = choice(name, nbytes, None, **how)
        assert found == unknown and found.why == unknown.why
    if "ring" in ALGORITHMS[name]:
        for wish in ({"algorithm": "ring"}, {"channels": 3}):
            found = choice(name, 1 << 24, machine, **wish)
            assert found == choice(name, 1 << 24, None, **wish)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_machine_of_unlike_pairs_goes_along_its_rings(name, mapped):
    machine = machine_on("dgx1-v100")
    small = choice(name, 256, machine, mapped=mapped)
    assert small == choice(name, 256, None, mapped=mapped)
    assert small.why[2].startswith("  ring, S = 1: ")
    for nbytes in (1 << 20, 64 << 20):
        found = choice(name, nbytes, machine, mapped=mapped)
        assert found.algorithm == "ring" and found.channels == machine.channels
        assert found.layout.shares == (2, 2, 1, 1)
        assert found.plan == build(name, "ring", 8, rings=machine.channels.rings)
        assert " shares=2:2:1:1 " in signature_text(found, call_of(name, nbytes, 8), (0, 0))
        assert found.why[0] == "the clock on this machine's links:"
        assert found.why[1].startswith("  ring, S = 1: ")
        assert found.why[2].endswith("times as long)")


@pytest.mark.parametrize("name", ["broadcast", "reduce"])
def test_a_rooted_call_goes_along_chains_in_slices(name):
    found = choice(name, 256 << 20, machine_on("dgx1-v100"), mapped=False)
    assert found.algorithm == "chain" and found.launch.slices >= 32
    assert found.layout.shares == (2, 2, 1, 1)


@pytest.mark.parametrize("name", ["all_to_all", "gather", "scatter", "barrier"])
def test_what_has_no_rings_stays(name):
    nbytes = 0 if name == "barrier" else 1 << 24
    assert choice(name, nbytes, machine_on("dgx1-v100")) == choice(name, nbytes, None)


def test_options_go_before_the_clock():
    machine = machine_on("dgx1-v100")
    assert choice("all_reduce", 1 << 26, machine, algorithm="tree").algorithm == "tree"
    ordered = choice("all_reduce", 1 << 26, machine, deterministic=True)
    assert ordered == choice("all_reduce", 1 << 26, None, deterministic=True)
    copied = choice("all_gather", 1 << 26, machine, deterministic=True)
    assert copied.algorithm == "ring", "nothing is summed"
    two = choice("all_reduce", 1 << 26, machine, channels=2)
    assert two.channels.rings == machine.channels.rings[:2]
    assert two.layout.shares == (1,)
    lines = choice("all_reduce", 4096, machine, algorithm="ring", protocol="LL")
    assert lines.launch.protocol == "LL" and lines.layout.shares == (2, 2, 1, 1)
    plan = build("all_reduce", "tree", 8)
    own = choice("all_reduce", 1 << 26, machine, algorithm=lambda _nranks: plan)
    assert own.plan is plan and not own.algorithm
    engine = choice("all_gather", 1 << 26, machine, engine="copy")
    assert engine == choice("all_gather", 1 << 26, None, engine="copy")


def test_fewer_rings_where_not_all_can_run():
    machine = machine_on("dgx1-v100")
    for blocks, rings in ((4, 4), (3, 2), (1, 1)):
        found = choice("all_gather", 1 << 26, machine, blocks=blocks)
        assert found.channels.rings == machine.channels.rings[:rings]


def test_fewer_rings_where_the_user_spares_blocks():
    machine = machine_on("dgx1-v100")
    for spared, rings in ((4, 4), (3, 2), (1, 1)):
        found = choice("all_gather", 1 << 26, machine, blocks=80, most=spared)
        assert found.channels.rings == machine.channels.rings[:rings]
        assert found.grid.blocks <= spared and found.why
    wanted = choice("all_gather", 1 << 26, machine, most=1, channels=4)
    assert len(wanted.channels.rings) == 4, "asked for"


def test_ranks_that_are_threads_compare_once(monkeypatch):
    machine, asked = machine_on("dgx1-v100"), []
    honest = model.fastest

    def counted(*args: Any, **how: Any) -> Any:
        asked.append(1)
        return honest(*args, **how)

    monkeypatch.setattr(model, "fastest", counted)
    with ThreadPoolExecutor(8) as ranks:
        found = [*ranks.map(lambda _rank: choice("reduce", 1 << 21, machine), range(8))]
    assert all(one == found[0] for one in found) and len(asked) == 1


@pytest.fixture
def small_launches(monkeypatch):
    """A launch carries the steps of two rings among 8 ranks, and not of four."""
    monkeypatch.setattr(dual_program, "LARGEST", 5000)
    dual_program.fits_one.cache_clear()
    yield
    dual_program.fits_one.cache_clear()


def test_fewer_rings_where_a_launch_does_not_carry_all(small_launches):
    machine = machine_on("dgx1-v100")
    found = choice("all_reduce", 1 << 26, machine)
    assert found.channels.rings == machine.channels.rings[:2]
    with pytest.raises(LaunchRefused, match="do not hold the steps of 4 rings; use fewer"):
        choice("all_reduce", 1 << 26, machine, channels=4)


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "reduce", "all_gather"])
def test_two_ranks_are_as_on_a_switch(name):
    machine = machine_on("dgx1-v100", 0, 3)
    assert machine.all_pairs
    for nbytes in SIZES:
        how: dict[str, Any] = {"nranks": 2, "mapped": False}
        assert choice(name, nbytes, machine, **how) == choice(name, nbytes, None, **how)


def test_a_mesh_has_as_many_rings_as_its_links_carry():
    mesh = choice("all_reduce", 1 << 26, machine_on("a100-mesh-4"), nranks=4)
    assert mesh.algorithm == "ring" and len(mesh.channels.rings) == 6


@pytest.mark.parametrize("mapped", [False, True])
def test_a_broadcast_goes_along_chains_whatever_is_reached(mapped):
    how: dict[str, Any] = {"nranks": 4, "blocks": 132, "nvlink": True, "mapped": mapped}
    mesh = choice("broadcast", 64 << 20, machine_on("a100-mesh-4"), **how)
    assert mesh.algorithm == "chain" and len(mesh.channels.rings) == 6
    if mapped:  # where all pairs are alike there is no need to
        alike = choice("broadcast", 64 << 20, None, **how)
        assert alike.algorithm == "scatter_gather_fused"


def test_a_pcie_tree_crosses_between_its_switches_once():
    machine = machine_on("pcie-8-dual-socket")
    assert not machine.all_pairs and machine.channels is None
    found = choice("all_reduce", 1 << 26, machine)
    assert found.plan == build("all_reduce", "ring", 8) and "two_shot" in found.why[2]
