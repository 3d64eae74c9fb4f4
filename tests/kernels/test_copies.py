"""Collectives by copies and gates on a CPU: streams are threads, and all bits are numpy's."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import chain as chain_of
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest

from ringcoll.algorithms import ALGORITHMS, build, options
from ringcoll.encode import encode
from ringcoll.errors import LaunchRefused
from ringcoll.executors.cuda.copies import Copy, _Open
from ringcoll.launch import Launch
from ringcoll.tuner.simple import copied_blocks, crosses
from tests.kernels.cases import LL, STAGED, Case
from tests.kernels.copied import Device, devices, run, texts_of
from tests.kernels.stand_in import compile_all, needs_compiler
from tests.kernels.world import ABORT, World

pytestmark = needs_compiler

COPIES = ("broadcast", "all_gather", "all_to_all", "gather", "scatter")
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
SOME = {
    "broadcast": ("chain", "scatter_gather", "scatter_gather_pull"),
    "all_gather": ("all_pairs", "ring", "all_pairs_pull"),
    "all_to_all": ("all_pairs", "all_pairs_pull"),
    "gather": ("one_shot",),
    "scatter": ("all_pairs",),
    "all_reduce": ("all_pairs", "all_pairs_pull"),
    "reduce_scatter": ("all_pairs",),
    "reduce": ("all_pairs", "scatter_gather_pull"),
}
"""Algorithms for tests that are quick."""
EXPIRED, MISMATCH, ABORTED, PEER_FAILED = 1, 2, 3, 4
HELLO = 0xFFFFFFFF
AT_ONCE = 30.0
"""Seconds within which everything ends, on a machine that is busy."""


def carries(case: Case) -> bool:
    """Whether a lane of the call copies."""
    program = encode(case.plan, case.launch)
    return any(crosses(program.programs[number]) for number in copied_blocks(program))


def cases(nranks: int, name: str, count: int, *, every: bool = True) -> Iterator[Case]:
    """Algorithms with a lane of copies, by buffers that peers reach and by others."""
    least = 2 if name in REDUCTIONS else 1
    for algorithm in ALGORITHMS[name] if every else SOME[name]:
        root = nranks - 1 if "root" in options(name, algorithm) else 0
        plan = build(name, algorithm, nranks, root=root)
        for launch in (
            Launch(slices=least),
            Launch(slices=least, in_place=True),
            Launch(slices=least, mapped=frozenset()),
            Launch(slices=5),
            STAGED,
        ):
            case = Case(plan, launch, count, dtype="int32", replicas=2 if count > 500 else 1)
            try:
                if carries(case):
                    yield case
            except LaunchRefused:
                continue


def settled(world: World, calls: int) -> None:
    """Nobody has failed; all have left so many calls, and know that all had entered them."""
    assert not any(world.reports())
    for rank in range(world.nranks):
        assert not world.broken(rank)
        assert (world.progress(rank) == calls).all()


def on_devices(calls: list[Device]) -> None:
    compile_all(text for call in calls for text in call.texts())
    run(calls)


def compile_calls(
    world: World, todo: Iterable[Case], groups: list[list[int]], *, generic: bool = False
) -> None:
    found = (texts_of(world, case, groups, generic=generic) for case in todo)
    compile_all(sorted(set(chain_of.from_iterable(found))))


@cache
def compiled(nranks: int, *, every: bool) -> None:
    """Compile what :func:`cases` need of every collective, where each rank has a device."""
    todo = (cases(nranks, name, 203, every=every) for name in SOME)
    groups = [[rank] for rank in range(nranks)]
    compile_calls(World(nranks), chain_of.from_iterable(todo), groups)


def called(
    nranks: int,
    groups: list[list[int]],
    todo: Iterable[Case],
    *,
    generic: bool = False,
    scratch: tuple[int, ...] = (),
) -> int:
    """Make the calls one after the other, of kernels compiled together; how many."""
    world, calls, todo = World(nranks), 0, list(todo)
    compile_calls(world, todo, groups, generic=generic)
    for case in todo:
        world.forget_arrays()
        arrays = world.arrays(case, calls)
        run(devices(world, case, arrays, groups, generic=generic, scratch=scratch))
        calls += 1
        arrays.check(case)
        settled(world, calls)
    return calls


@pytest.mark.parametrize("name", SOME)
def test_a_device_for_each_rank(name: str) -> None:
    compiled(3, every=False)
    assert called(3, [[0], [1], [2]], cases(3, name, 203, every=False)) >= 4


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_generic_kernel_beside_the_copies(name: str) -> None:
    apart = [[0], [1], [2]]
    assert called(3, apart, cases(3, name, 203, every=False), generic=True) >= 4


@pytest.mark.parametrize("name", SOME)
def test_scratch_that_is_no_part_of_a_workspace(name: str) -> None:
    held = [np.full(1 << 20, 0xA5, np.uint8) for _ in range(3)]
    scratch = tuple(each.ctypes.data for each in held)
    apart = [[0], [1], [2]]
    assert called(3, apart, cases(3, name, 203, every=False), scratch=scratch) >= 4
    assert any((each != 0xA5).any() for each in held)


@pytest.mark.slow
@pytest.mark.parametrize("nranks", [2, 4])
@pytest.mark.parametrize("name", SOME)
def test_every_algorithm_with_a_lane_of_copies(name: str, nranks: int) -> None:
    compiled(nranks, every=True)
    apart = [[rank] for rank in range(nranks)]
    # A small size and a large one by turns: each pair of launch, size and ranks comes up.
    both = zip(cases(nranks, name, 203), cases(nranks, name, 1301), strict=True)
    todo = [pair[(number + nranks // 4) % 2] for number, pair in enumerate(both)]
    assert called(nranks, apart, todo) >= 4


@pytest.mark.parametrize("groups", [[[0, 1, 2]], [[0, 2], [1]]], ids=str)
@pytest.mark.parametrize("name", ["broadcast", "all_gather", "all_reduce"])
def test_ranks_that_share_a_device(name: str, groups: list[list[int]]) -> None:
    assert called(3, groups, cases(3, name, 203, every=False)) >= 4


@pytest.mark.parametrize("name", COPIES)
def test_in_the_order_of_the_plan_nothing_waits(name: str) -> None:
    # One stream for all ranks: what waited for something after it would never come.
    world, calls = World(3), 0
    for case in cases(3, name, 203, every=False):
        arrays = world.arrays(case, calls)
        made = devices(world, case, arrays, [[0, 1, 2]], flat=True, timeout=5.0)
        if made[0].kernel is None:
            on_devices(made)
            calls += 1
            arrays.check(case)
            settled(world, calls)
        world.forget_arrays()
    assert calls >= 2


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "complex128"])
@pytest.mark.parametrize("count", [1, 7, 1000])
def test_sizes_and_element_types(dtype: str, count: int) -> None:
    world = World(2)
    choice = [
        ("all_gather", "all_pairs", Launch()),
        ("broadcast", "chain", Launch(slices=3)),
        ("all_to_all", "all_pairs", Launch(mapped=frozenset())),
        ("all_reduce", "all_pairs", Launch(slices=2, mapped=frozenset())),
        ("all_reduce", "ring", Launch(slices=2)),
    ]
    calls = 0
    for name, algorithm, launch in choice:
        op = "lor" if dtype == "bool" else "sum"
        case = Case(build(name, algorithm, 2), launch, count, dtype, op, shift=count % 2)
        if not carries(case):
            continue
        world.forget_arrays()
        arrays = world.arrays(case, count)
        on_devices(devices(world, case, arrays, [[0], [1]]))
        calls += 1
        arrays.check(case)
        settled(world, calls)
    assert calls >= 4


def test_among_calls_of_kernels() -> None:
    # Ranks run ahead of each other through calls of both kinds, in orders of their own making.
    world, rng = World(3), np.random.default_rng(5)
    single = [[0], [1], [2]]
    mixed = [
        (Case(build("all_gather", "all_pairs", 3), Launch(mapped=frozenset()), 300), True),
        (Case(build("broadcast", "chain", 3), STAGED, 900), False),
        (Case(build("broadcast", "chain", 3, root=1), Launch(slices=4), 700), True),
        (Case(build("all_reduce", "ring", 3), LL, 100), False),
        (Case(build("all_reduce", "all_pairs", 3), STAGED, 1200, replicas=2), True),
        (Case(build("reduce", "all_pairs", 3), LL, 50), False),
        (Case(build("all_to_all", "all_pairs", 3), Launch(), 64), False),
    ]
    prepared = [(case, copies, world.arrays(case, k)) for k, (case, copies) in enumerate(mixed)]
    ready = [
        devices(world, case, arrays, single)
        if copies
        else [world.ready(case, arrays, ranks=(rank,)) for rank in range(3)]
        for case, copies, arrays in prepared
    ]
    compile_all(
        text
        for calls in ready
        for call in calls
        for text in (call.texts() if isinstance(call, Device) else [call.text])
    )
    for number in range(1, 5):
        order = [int(at) for at in rng.permutation(len(mixed))]
        for _, _, arrays in prepared:
            arrays.poison()

        def calls_of(rank: int, order: list[int] = order) -> None:
            for at in order:
                ready[at][rank]()

        threads = [Thread(target=calls_of, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not any(world.reports())
        assert all((world.progress(rank)[:, 0] == number * len(mixed)).all() for rank in range(3))
        for case, _, arrays in prepared:
            arrays.check(case)


def chain(slices: int = 3) -> Case:
    return Case(build("broadcast", "chain", 3), Launch(slices=slices), 500, dtype="int32")


def test_gates_that_nothing_parts_are_one() -> None:
    world, case = World(3), chain()
    made = devices(world, case, world.arrays(case), [[0], [1], [2]])
    kinds = [
        "".join("gc"[isinstance(row, Copy)] for row in (*d.found.enter, *d.found.rows))
        + "g" * len(d.found.leave)
        for d in made
    ]
    # The middle hears, copies, and tells and hears at once; each end has half of that.
    assert kinds[1] == "gcgcgcg"
    assert kinds[0].count("c") == 6  # to the next, and to its own output
    assert kinds[2] == "gg"
    # What the root copies for itself nobody waits for: that goes aside.
    assert [device.found.lanes for device in made] == [2, 1, 1]


def test_a_gate_with_more_pairs_than_words_is_several() -> None:
    world, case = World(3), chain()
    (device, _, _) = devices(world, case, world.arrays(case), [[0], [1], [2]])
    gate = _Open(SimpleNamespace(lane=2, at=device.found.enter[0].at), 5, 9)  # type: ignore[arg-type]
    gate.signals.update({10 * k: k for k in range(5)})
    gate.waits.update({100 * k: k for k in range(1, 4)})
    parts = list(gate.parts(3))
    assert {(part.lane, part.slice) for part in parts} == {(2, 5)}
    heads = [part.words[0] for part in parts]
    # All signals come before the first wait.
    assert [(head >> 32 & 0xFFFF, head >> 48) for head in heads] == [(3, 0), (2, 1), (0, 2)]
    assert {head & 0xFFFFFFFF for head in heads} == {9 << 8}
    pairs = [word for part in parts for word in part.words[1:]]
    assert pairs[::2] == [0, 10, 20, 30, 40, 100, 200, 300]


def seconds(calls: list[Device]) -> float:
    compile_all(text for call in calls for text in call.texts())
    start = time.monotonic()
    run(calls)
    return time.monotonic() - start


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_never_comes(absent: int) -> None:
    world, case = World(3), chain()
    arrays = world.arrays(case)
    present = [[rank] for rank in range(3) if rank != absent]
    assert 0.3 <= seconds(devices(world, case, arrays, present, timeout=0.3)) < AT_ONCE
    reports = [world.report(rank) for (rank,) in present]
    assert {report.kind for report in reports if report is not None} <= {EXPIRED, PEER_FAILED}
    expired = [report for report in reports if report is not None and report.kind == EXPIRED]
    assert expired
    assert all((report.peer, report.step) == (absent, HELLO) for report in expired)
    assert all(world.broken(rank) for rank in range(3))
    assert not any(world.progress(rank).any() for rank in range(3)), "it is not counted"
    # Who comes late finds it broken, and waits for nobody.
    assert seconds(devices(world, case, arrays, [[absent]])) < AT_ONCE
    late = world.report(absent)
    assert late is not None
    assert late.kind == PEER_FAILED


def test_a_row_that_never_comes_names_rank_and_step() -> None:
    world, case = World(3), chain()
    arrays = world.arrays(case)
    made = [
        devices(world, case, arrays, [[rank]], timeout=0.3 if rank == 1 else 60.0)[0]
        for rank in range(3)
    ]
    made[0] = replace(made[0], found=replace(made[0].found, rows=(), leave=()))
    assert seconds(made) < AT_ONCE
    report = world.report(1)
    assert report is not None
    assert (report.kind, report.peer, report.step) == (EXPIRED, 0, 0)


def test_ranks_that_make_different_calls() -> None:
    world, case = World(2), Case(build("all_gather", "all_pairs", 2), Launch(), 64)
    arrays = world.arrays(case)
    made = [
        devices(world, case, arrays, [[rank]], signature=100 + rank, number=40 + rank)[0]
        for rank in range(2)
    ]
    assert seconds(made) < AT_ONCE
    found = [
        (rank, report)
        for rank, report in enumerate(world.reports())
        if report is not None and report.kind == MISMATCH
    ]
    assert found
    assert all((r.peer, r.launch, r.step) == (1 - rank, 41 - rank, HELLO) for rank, r in found)


def test_the_host_gives_up() -> None:
    world, case = World(3), chain()
    made = devices(world, case, world.arrays(case), [[0], [1]], timeout=1e10)

    def give_up() -> None:
        time.sleep(0.2)
        world.words(1)[ABORT] = 1

    host = Thread(target=give_up)
    host.start()
    assert seconds(made) < AT_ONCE
    host.join()
    report = world.report(1)
    assert report is not None
    assert report.kind == ABORTED
