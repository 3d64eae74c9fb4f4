"""Lowering for protocol LL: what is accepted, that it is proven, and that nothing waits in vain."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ringcoll.algorithms import ALGORITHMS, build
from ringcoll.collectives import Collective
from ringcoll.encode import encode
from ringcoll.errors import ArgumentError, LaunchRefused, Race
from ringcoll.launch import ALL_MAPPED, Launch
from ringcoll.lower import lower, place, without_signals
from ringcoll.lower.in_band import by_hops
from ringcoll.plan import Block, Buffer, Chunk, Plan, Step
from ringcoll.verifier.prover import verify
from tests.definition import run
from tests.lower.plans import every_plan

IN, OUT, TMP = Buffer.INPUT, Buffer.OUTPUT, Buffer.SCRATCH

LL = Launch(protocol="LL", mapped=frozenset())
IN_PLACE = Launch(protocol="LL", mapped=frozenset(), in_place=True)

ACCEPTED = {
    "all_reduce": {
        "ring": "2345",
        "tree": "2",
        "one_shot_push": "2345",
        "all_pairs": "2345",
        "all_pairs_fused": "2",
        "recursive_doubling": "24",
        "halving_doubling": "2",
    },
    "broadcast": {
        "ring": "2345",
        "chain": "2345",
        "tree": "23",
        "scatter_gather": "2345",
        "scatter_gather_fused": "23",
        "all_pairs": "2345",
        "hierarchical": "2345",
    },
    "reduce": {
        "ring": "2345",
        "chain": "2345",
        "tree": "345",
        "scatter_gather_push": "2345",
        "all_pairs": "2345",
    },
    "all_gather": {
        "ring": "2345",
        "all_pairs": "2345",
        "all_pairs_fused": "2",
        "recursive_doubling": "2345",
        "bruck": "2345",
        "hierarchical": "2345",
    },
    "reduce_scatter": {
        "ring": "2345",
        "all_pairs": "2345",
        "all_pairs_output": "2345",
        "recursive_halving": "2",
    },
    "all_to_all": {"all_pairs": "2345", "bruck": "2345"},
    "gather": {"all_pairs": "2345"},
    "scatter": {"all_pairs": "2345"},
    "scan": {"chain": "2345", "recursive_doubling": "2345"},
    "exscan": {"chain": "2345", "recursive_doubling": "2345"},
    "send": {"pair": "2"},
}
"""By how many ranks, of two to five: who pushes to a rank that reads, each line once."""


def accepted(launch: Launch) -> dict[str, dict[str, str]]:
    """What ``encode`` carries, as in ``ACCEPTED``."""
    found: dict[str, dict[str, str]] = {}
    for collective, algorithms in ALGORITHMS.items():
        for algorithm in algorithms:
            ranks = ""
            for nranks in (2, 3, 4, 5) if collective != "send" else (2,):
                try:
                    encode(build(collective, algorithm, nranks), launch)
                except LaunchRefused:
                    continue
                ranks += str(nranks)
            if ranks:
                found.setdefault(collective, {})[algorithm] = ranks
    return found


def carrying(nranks: int, launch: Launch) -> Iterator[Plan]:
    """Every built-in plan that protocol LL carries; the last rank is the root."""
    for plan in every_plan(nranks, root=nranks - 1):
        if launch.in_place and plan.collective.name == "send":
            continue
        try:
            encode(plan, launch)
        except LaunchRefused:
            continue
        yield plan


def inputs_of(plan: Plan, launch: Launch) -> list[np.ndarray | None]:
    """A prime number of elements a segment, all different."""
    size = 7 * plan.collective.segments("INPUT")
    return [
        np.arange(size, dtype=np.float32) + 1000 * rank
        if plan.collective.has("INPUT", rank)
        else None
        for rank in range(plan.nranks)
    ]


@pytest.mark.parametrize("launch", [LL, IN_PLACE], ids=["apart", "in place"])
def test_what_is_accepted(launch: Launch) -> None:
    assert accepted(launch) == ACCEPTED


@pytest.mark.parametrize("launch", [LL, IN_PLACE], ids=["apart", "in place"])
@pytest.mark.parametrize("nranks", [2, 3, 4, 5])
def test_what_is_accepted_is_proven(nranks: int, launch: Launch) -> None:
    proven = 0
    for plan in carrying(nranks, launch):
        lowered = lower(plan, launch)
        for protocol in ("LL", "LL128"):
            assert verify(lowered, protocol=protocol).steps > 0
        total = verify(lowered, protocol="LL").total
        assert encode(plan, launch).total == total
        proven += 1
    assert proven > 15


@pytest.mark.parametrize("launch", [LL, IN_PLACE], ids=["apart", "in place"])
@pytest.mark.parametrize("nranks", [2, 3, 4, 5])
def test_rows_have_no_signals_beside_their_data(nranks: int, launch: Launch) -> None:
    for plan in carrying(nranks, launch):
        program = encode(plan, launch)
        assert len({block.rank for block in program.blocks}) == len(program.blocks)
        for block in program.programs:
            assert not (block.entry or block.exit_signals or block.exit_waits)
            for row in block.rows:
                assert not (row.waits or row.signals or row.awaits or row.grants)
                assert row.dsts
                assert {src.rank for src in row.srcs} == {block.block.rank}
                far = [dst for dst in row.dsts if dst.rank != block.block.rank]
                assert {dst.buffer for dst in far} <= {TMP}


def test_every_line_is_written_once_and_by_one() -> None:
    for plan in carrying(4, LL):
        rows = [row for block in encode(plan, LL).programs for row in block.rows]
        lines = [dst for row in rows for dst in row.dsts if dst.buffer is TMP]
        assert len(set(lines)) == len(lines)
        assert {src for row in rows for src in row.srcs if src.buffer is TMP} <= set(lines)


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [("all_reduce", "one_shot"), ("all_gather", "one_shot"), ("reduce", "scatter_gather")],
)
def test_plans_that_pull_are_refused(collective: str, algorithm: str) -> None:
    with pytest.raises(LaunchRefused, match=r"reads .* in another rank's memory") as caught:
        encode(build(collective, algorithm, 3), LL)
    assert str(caught.value).startswith(f"{collective} of 3 ranks")
    assert str(caught.value).endswith("protocol='Simple' runs it")


def test_signals_without_data_are_refused() -> None:
    with pytest.raises(LaunchRefused, match=r"waits for rank 2 .* without reading its data"):
        encode(build("barrier", "dissemination", 3), LL)


def test_the_second_write_of_a_line_is_refused() -> None:
    a, b = Block(0), Block(1)
    line = Chunk(1, TMP, 0)
    order = tuple(
        pair
        for k in (0, 1)
        for pair in (
            (a, Step((Chunk(0, IN, k),), (line,), signals=(b,))),
            (b, Step((line,), (Chunk(1, OUT, k),), waits=(a,))),
        )
    )
    reused = Plan(Collective("send", 2, chunks=2), order)
    with pytest.raises(LaunchRefused, match=r"writes 1\.S\[0\] for the second time"):
        without_signals(reused)
    with pytest.raises(Race):
        verify(reused, protocol="LL")


@pytest.mark.parametrize(
    "options", [{"slices": 2}, {"mapped": ALL_MAPPED}, {"mapped": frozenset({IN})}]
)
def test_slices_and_mapped_buffers_are_refused(options: dict) -> None:
    with pytest.raises(ArgumentError, match=r"protocol='LL' has slices=1 and mapped=frozenset\(\)"):
        Launch(**{"protocol": "LL", "mapped": frozenset(), **options})


@pytest.mark.parametrize("nranks", [2, 3, 4, 5])
def test_the_order_by_hops_keeps_the_meaning(nranks: int) -> None:
    for plan in every_plan(nranks, root=nranks - 1):
        if plan.collective.name == "barrier":
            continue
        inputs = inputs_of(plan, LL)
        for wanted, seen in zip(run(plan, inputs), run(by_hops(plan), inputs), strict=True):
            np.testing.assert_array_equal(seen, wanted)
        placed = place(plan, LL)
        assert sorted(map(repr, by_hops(placed).order)) == sorted(map(repr, placed.order))
        for wanted, seen in zip(run(plan, inputs), run(placed, inputs), strict=True):
            np.testing.assert_array_equal(seen, wanted)


def is_drain(step: Step) -> bool:
    return any(src.buffer is TMP for src in step.srcs)


def pushes_after_a_drain(plan: Plan) -> int:
    """Steps that need nothing from a peer behind one that does, over all blocks."""
    found = 0
    for steps in plan.steps.values():
        first = next((at for at, step in enumerate(steps) if is_drain(step)), len(steps))
        found += sum(not is_drain(step) for step in steps[first:])
    return found


@pytest.mark.parametrize("collective", ["all_gather", "all_to_all", "reduce_scatter"])
@pytest.mark.parametrize("nranks", [3, 5, 8])
def test_all_pairs_pushes_everything_before_it_drains(nranks: int, collective: str) -> None:
    plan = build(collective, "all_pairs", nranks)
    assert pushes_after_a_drain(place(plan, LL)) == 0


def test_all_pairs_in_two_phases_waits_twice() -> None:
    (block,) = place(build("all_reduce", "all_pairs", 4), LL).blocks(1)
    steps = place(build("all_reduce", "all_pairs", 4), LL).steps[block]
    kinds = "".join("d" if is_drain(step) else "p" for step in steps)
    assert kinds == "pppdpppddd"


def test_without_the_order_by_hops_pushes_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = build("all_gather", "all_pairs", 4)
    by = place(plan, LL)
    monkeypatch.setattr("ringcoll.lower.by_hops", lambda placed: placed)
    assert pushes_after_a_drain(place(plan, LL)) > 0
    assert place(plan, LL).order != by.order


def test_steps_that_conflict_keep_their_order() -> None:
    a, b = Block(0), Block(1)
    order = (
        (a, Step((Chunk(0, IN, 0),), (Chunk(1, TMP, 0),))),
        (b, Step((Chunk(1, TMP, 0),), (Chunk(1, OUT, 0),))),
        (b, Step((Chunk(1, IN, 0),), (Chunk(1, OUT, 0),))),  # overwrites what has come
        (b, Step((Chunk(1, IN, 1),), (Chunk(1, OUT, 1),))),  # needs nothing
    )
    plan = Plan(Collective("all_reduce", 2, chunks=2), order)
    assert by_hops(plan).order == (order[0], order[3], order[1], order[2])
