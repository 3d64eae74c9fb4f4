"""What GPU ranks choose for large calls, without SCRATCH of their own and with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.dtypes import dtype_of, op_of
from ringcoll.errors import LaunchRefused
from ringcoll.executors.cuda.kernel_body import KernelFits, gpu_ranks
from ringcoll.executors.cuda.workspace import LARGE_SCRATCH_BYTES, Workspace
from ringcoll.launch import ALL_MAPPED
from ringcoll.model.links import Wire
from ringcoll.model.machine import Machine, machine_of
from ringcoll.topology.presets import preset
from ringcoll.topology.search import find_rings
from ringcoll.topology.system import subsystem
from ringcoll.tuner import Choice, GpuRanks, Limits, choose
from ringcoll.tuner.measured import LARGE_BYTES, LARGE_SLICES
from ringcoll.tuner.simple import large_engine, sizes_like
from ringcoll.verifier.rank_order import sums_in_rank_order

MIB = 1 << 20
NAMES = tuple(LARGE_SLICES.by)


def ranks(nranks: int, known: Machine | None = None) -> GpuRanks:
    """GPUs whose large calls have SCRATCH of their own after some time."""
    return replace(gpu_ranks(Workspace(nranks), 132, nvlink=True, known=known), large_scratch=True)


def machine(name: str, gpus: Sequence[int]) -> GpuRanks:
    """So many GPUs of a preset."""
    system = preset(name)
    part = subsystem(system, [system.gpus[gpu] for gpu in gpus])
    return ranks(len(gpus), machine_of(part, find_rings(part, stored=True), Wire(1.0)))


def call_of(name: str, nranks: int, nbytes: int, dtype: str = "bfloat16") -> Call:
    kind = COLLECTIVES[name]
    op = op_of("sum") if kind.reduces else None
    count = nbytes // dtype_of(dtype).itemsize
    count //= nranks if "all" in (kind.input, kind.output) else 1
    return Call(name, 0, None, None, count, dtype_of(dtype), op, 0, False, nbytes)


def found(call: Call, there: GpuRanks, *, large: bool = True, **limits: Any) -> Choice:
    fits = KernelFits(Workspace(there.nranks), LARGE_SCRATCH_BYTES if large else 0)
    return choose(call, there, Limits(large_scratch="sm" if large else None, **limits), fits)


def test_which_calls_are_large():
    there, least = ranks(4), LARGE_BYTES.value
    for name in NAMES:
        assert large_engine(call_of(name, 4, least), there, Limits()) == "sm"
        assert large_engine(call_of(name, 4, least - 4), there, Limits()) is None
        others = replace(there, large_scratch=False)
        assert large_engine(call_of(name, 4, least), others, Limits()) is None
    call = call_of("all_gather", 4, least)
    assert large_engine(call, there, Limits(protocol="Simple", slices=3)) == "sm"
    assert large_engine(call, there, Limits(protocol="LL")) is None
    counts = (call.count,) * 4
    assert large_engine(replace(call, counts=counts), there, Limits()) is None
    assert large_engine(call_of("scan", 4, least), there, Limits()) is None, "it was not timed"


def test_sizes_of_calls_that_are_large_or_not():
    """By them the words of one call serve others of new counts."""
    there, least = ranks(4), LARGE_BYTES.value
    call = call_of("all_gather", 4, MIB)
    small, large = (sizes_like(call, there, None, large=each) for each in (False, True))
    assert (least - 1 in small, least in small) == (True, False)
    assert (least - 1 in large, least in large) == (False, True)
    counted = replace(call, counts=(call.count,) * 4)
    assert least in sizes_like(counted, there, None, large=False), "they are never large"
    without = replace(there, large_scratch=False)
    assert least in sizes_like(call, without, None, large=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("nranks", [2, 3, 4, 8])
def test_slices_of_large_calls(name, nranks):
    there, (_, least, most) = ranks(nranks), LARGE_SLICES.by[name] or (0, 0, 0)
    for mebibytes in (64, 512):
        call = call_of(name, nranks, mebibytes * MIB)
        chosen = found(call, there)
        assert chosen.large_scratch and chosen.reads_hellos and chosen.takes_large
        fewest = least if nranks <= 4 and mebibytes == 64 else most
        assert chosen.launch.slices == fewest
        asked = found(call, there, slices=40)
        assert asked.launch.slices == 40, "an option goes first"
        assert not found(call, there, large=False).large_scratch
        mapped = found(call, there, mapped=ALL_MAPPED)
        assert mapped.large_scratch == (mapped.program.scratch > 0)


def test_algorithms_of_large_calls():
    four, eight = ranks(4), ranks(8)
    for name, plain, mapped in (
        ("broadcast", "chain", "chain"),
        ("reduce", "scatter_gather", "scatter_gather"),
        ("all_reduce", "all_pairs", "two_shot"),
    ):
        call = call_of(name, 4, 64 * MIB)
        assert found(call, four).algorithm == plain
        assert found(call, four, large=False, mapped=ALL_MAPPED).algorithm in (
            mapped,
            "scatter_gather_fused",
        )
    assert found(call_of("broadcast", 8, 64 * MIB), eight).algorithm == "tree", "not timed"
    assert found(call_of("reduce", 4, 64 * MIB), four, large=False).algorithm == (
        "scatter_gather_push"
    )


def test_a_chain_of_sums_does_not_begin_with_the_scratch():
    """It sums in another order, and from which call on ranks have SCRATCH depends on time."""
    four, two = ranks(4), ranks(2)
    for large in (False, True):
        for mapped in (frozenset(), ALL_MAPPED):
            how: dict[str, Any] = {"large": large, "mapped": mapped}
            big, small = (call_of("reduce", 4, n * MIB, "float32") for n in (256, 255))
            chain = found(big, four, **how)
            assert chain.algorithm == "chain"
            assert any("gpu_large_scratch.json" in why for why in chain.why)
            assert found(small, four, **how).algorithm != "chain"
            assert found(big, four, deterministic=True, **how).algorithm != "chain"
            assert found(call_of("reduce", 4, 256 * MIB), four, **how).algorithm != "chain"
            assert found(call_of("reduce", 2, 256 * MIB, "float32"), two, **how).algorithm != (
                "chain"
            )
            never = replace(four, large_scratch=False)
            assert found(big, never, **how).algorithm != "chain"


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("dgx-h100", range(3)),
        ("dgx-h100", range(8)),
        ("dgx-a100", range(4)),
        ("a100-mesh-4", range(4)),
        ("a100-mesh-4", range(3)),
        ("dgx1-v100", range(3)),
        ("dgx1-p100", range(4)),
        ("ac922-6", range(3)),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sums_have_one_order_before_and_after(name, gpus, dtype):
    there = machine(name, gpus)
    for collective in ("reduce", "all_reduce", "reduce_scatter"):
        for mebibytes in (64, 512):
            call = call_of(collective, there.nranks, mebibytes * MIB, dtype)
            for how in ({}, {"hellos_decide": True}, {"mapped": ALL_MAPPED}):
                orders = set()
                for large in (False, True):
                    try:
                        choice = found(call, there, large=large, **how)
                    except LaunchRefused:
                        continue
                    for each in choice.variants:
                        # Slices sum alike: a few show the order, and 64 take minutes to prove.
                        launch = replace(each.launch, slices=min(each.launch.slices, 3))
                        ordered = sums_in_rank_order(each.plan, launch, "wide")
                        orders.add("by rank" if ordered else each.algorithm)
                assert len(orders) == 1, (collective, mebibytes, how, orders)
