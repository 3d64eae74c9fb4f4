"""Rooted calls that differ: no rank need wait for another, and yet all are told."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from threading import Thread

import pytest

from ringcoll.algorithms import build
from ringcoll.executors.cuda.hellos import find_mismatch
from ringcoll.executors.cuda.reports import HELLO, MISMATCH, Report
from ringcoll.launch import Launch
from tests.kernels.apart import ADDRESS, run_apart
from tests.kernels.cases import LL, LL128, STAGED, Case
from tests.kernels.sanitizer import THREADS, needs_sanitizer
from tests.kernels.stand_in import CPU, KERNELS, compile_all, needs_compiler
from tests.kernels.world import Ready, World

pytestmark = needs_compiler

PEER_FAILED = 4
AT_ONCE = 30.0
"""Seconds, where the kernels' deadline is 60."""

STAGED_OR_NOT = pytest.mark.parametrize(
    "launch", [LL, STAGED, Launch()], ids=["lines", "staged", "mapped"]
)
SIZES = pytest.mark.parametrize("nranks", [2, 3, 4])


def calls(world: World, cases: Sequence[Case], kernels: Path = KERNELS) -> None:
    """Every rank makes a call of its own; calls that are equal have one signature."""
    launches: list[Ready] = []
    kinds = [case for k, case in enumerate(cases) if cases.index(case) == k]
    arrays = [world.arrays(kind) for kind in kinds]
    for rank, case in enumerate(cases):
        kind = kinds.index(case)
        ready = world.ready(
            case, arrays[kind], ranks=(rank,), signature=100 + kind, number=40 + rank
        )
        launches.append(ready)
    if kernels == KERNELS:
        compiled(world.nranks)
    threads = [Thread(target=ready, args=(kernels,)) for ready in launches]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - start < AT_ONCE


def rooted(name: str, nranks: int, root: int, launch: Launch) -> Case:
    return Case(build(name, "all_pairs", nranks, root=root), launch, 100)


def total(nranks: int, launch: Launch) -> Case:
    algorithm = "two_shot" if launch.mapped else "ring"
    return Case(build("all_reduce", algorithm, nranks), launch, 100)


@cache
def compiled(nranks: int) -> None:
    """Compile what the calls of so many ranks need, at once."""
    texts = []
    for launch in (LL, STAGED, Launch()):
        roots = [("broadcast", root) for root in range(nranks)] + [("reduce", 0), ("reduce", 1)]
        cases = [rooted(name, nranks, root, launch) for name, root in roots]
        for case in (*cases, total(nranks, launch)):
            world = World(nranks)
            arrays = world.arrays(case)
            texts += [world.ready(case, arrays, ranks=(rank,)).text for rank in range(nranks)]
    compile_all(texts)


def known(world: World, rank: int) -> Report | None:
    """What the host of a rank finds when it compares."""
    return find_mismatch(world.hellos(rank).tobytes(), world.nranks, rank)


def told(world: World) -> int:
    """How many ranks know a peer that differs; the others know that a call has failed."""
    found = 0
    for rank in range(world.nranks):
        report, compared = world.report(rank), known(world, rank)
        for each in (report, compared):
            if each is not None and each.kind == MISMATCH:
                assert (each.epoch, each.step) == (1, HELLO)
                assert each.peer != rank
                assert (each.own, each.launch) == (40 + rank, 40 + each.peer)
        if compared is None:  # it makes the call of all that have come
            assert report is not None
            assert report.kind == PEER_FAILED
        else:
            found += 1
    return found


@SIZES
@STAGED_OR_NOT
def test_every_rank_takes_itself_for_the_root(nranks: int, launch: Launch) -> None:
    world = World(nranks)
    calls(world, [rooted("broadcast", nranks, rank, launch) for rank in range(nranks)])
    if launch.in_band:  # a root waits for nobody, and the host of each compares
        assert world.reports() == [None] * nranks
        assert told(world) == nranks
    # The next call of each is told by its kernel.
    world.forget_arrays()
    calls(world, [total(nranks, launch)] * nranks)
    reports = [report for report in world.reports() if report is not None]
    assert len(reports) == nranks
    assert {report.kind for report in reports} <= {MISMATCH, PEER_FAILED}
    assert any(report.kind == MISMATCH for report in reports)
    assert told(world) >= 2


def test_the_hellos_of_the_call_before_are_what_tells(tmp_path: Path) -> None:
    blind = ("static_cast<u32>(hello) == signature", "static_cast<u32>(hello) + signature != 0")
    kernels = machine(tmp_path, blind, file="call.cuh")
    world = World(2)
    calls(world, [rooted("broadcast", 2, rank, LL) for rank in range(2)], kernels)
    world.forget_arrays()
    calls(world, [total(2, LL)] * 2, kernels)
    assert world.reports() == [None, None]
    assert told(world) == 2, "the hosts still know"


@SIZES
@STAGED_OR_NOT
@pytest.mark.parametrize("name", ["broadcast", "reduce"])
def test_one_rank_has_another_root(name: str, nranks: int, launch: Launch) -> None:
    """Who waits for data that nobody sends does not wait for the deadline."""
    world = World(nranks)
    calls(world, [rooted(name, nranks, int(rank == nranks - 1), launch) for rank in range(nranks)])
    assert told(world) >= 2


@SIZES
@STAGED_OR_NOT
def test_a_rooted_call_against_a_total_one(nranks: int, launch: Launch) -> None:
    world = World(nranks)
    ours = rooted("broadcast", nranks, 0, launch)
    calls(world, [ours, *[total(nranks, launch)] * (nranks - 1)])
    assert any(report is not None for report in world.reports())
    assert told(world) >= 2


SAME_BYTES = [
    ("reduce", "all_pairs", 0, (0,)),
    ("reduce", "chain", 0, (0,)),
    ("gather", "all_pairs", 0, (0,)),
    ("broadcast", "all_pairs", 0, ()),
    ("broadcast", "chain", 0, ()),
    ("scatter", "all_pairs", 0, ()),
]


@cache
def compiled_same() -> None:
    """Compile what all of these calls need, at once."""
    texts = []
    for launch, (name, algorithm, root, _) in product((LL, LL128, STAGED), SAME_BYTES):
        world, case = World(3), Case(build(name, algorithm, 3, root=root), launch, 100)
        arrays = world.arrays(case)
        texts += [world.ready(case, arrays, ranks=(rank,)).text for rank in range(3)]
    compile_all(texts)


@pytest.mark.parametrize("launch", [LL, LL128, STAGED], ids=["LL", "LL128", "staged"])
@pytest.mark.parametrize("odd", [1, 2])
@pytest.mark.parametrize(("name", "algorithm", "root", "receives"), SAME_BYTES)
def test_no_rank_ends_with_bytes_of_another_call(
    name: str, algorithm: str, root: int, receives: tuple[int, ...], odd: int, launch: Launch
) -> None:
    """The calls move the same bytes by the same program; only the signature of one rank differs."""
    compiled_same()
    for _ in range(3):
        world = World(3)
        case = Case(build(name, algorithm, 3, root=root), launch, 100)
        arrays = world.arrays(case)
        ready = [
            world.ready(case, arrays, ranks=(rank,), signature=100 + (rank == odd), number=40)
            for rank in range(3)
        ]
        threads = [Thread(target=each) for each in ready]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank in receives or (odd,):
            report = world.report(rank)
            assert report is not None
            assert report.kind in (MISMATCH, PEER_FAILED)
            assert known(world, rank) is not None


def test_a_root_that_only_sends_waits_for_nobody() -> None:
    for name in ("broadcast", "scatter"):
        world = World(3)
        case = rooted(name, 3, 0, LL)
        world.ready(case, world.arrays(case), ranks=(0,))()
        assert world.reports() == [None] * 3


@SIZES
@STAGED_OR_NOT
def test_equal_calls_do_not_differ(nranks: int, launch: Launch) -> None:
    world = World(nranks)
    for case in (rooted("broadcast", nranks, 1, launch), total(nranks, launch)):
        world.forget_arrays()
        calls(world, [case] * nranks)
        assert world.reports() == [None] * nranks
        assert [known(world, rank) for rank in range(nranks)] == [None] * nranks


def test_only_what_has_come_is_compared() -> None:
    world = World(3)
    world.hellos(0)[1, :, 0] = [(7, 5, 40, 5), (8, 1, 41, 1), (9, 5, 42, 4)]
    assert known(world, 0) is None, "an older call, and half a line"
    world.hellos(0)[1, 1, 0] = (8, 5, 41, 5)
    assert known(world, 0) == Report(MISMATCH, 1, 5, HELLO, 41, 40)
    world.hellos(0)[0, :2, 0] = [(7, 4, 38, 4), (6, 4, 39, 4)]
    found = known(world, 0)
    assert found is not None
    assert found.epoch == 4, "the first call is where it began"


# -- many threads find fault at once --------------------------------------------------------------

PAIRS = Case(build("all_reduce", "all_pairs", 4), LL, 600, replicas=4)
SLOW = (
    "__atomic_store_n(reinterpret_cast<u32*>(at), value, RELEASE);",
    "timespec time{0, 2000000}; nanosleep(&time, nullptr);"
    " __atomic_store_n(reinterpret_cast<u32*>(at), value, RELEASE);",
)
EVERYBODY = (
    "__atomic_exchange_n(reinterpret_cast<u32*>(at), value, __ATOMIC_RELAXED)",
    "0 * __atomic_exchange_n(reinterpret_cast<u32*>(at), value, __ATOMIC_RELAXED)",
)


def surrounded(world: World) -> World:
    """All peers of rank 0 have come, each with another call."""
    for peer in range(1, world.nranks):
        world.hellos(0)[1, peer, 0] = (100 + peer, 1, 40 + peer, 1)
    return world


def machine(folder: Path, *changes: tuple[str, str], file: str = "cpu/machine.cpp") -> Path:
    """The kernels with some text changed."""
    kernels = folder / "kernels"
    shutil.copytree(KERNELS, kernels)
    shutil.copytree(CPU, kernels / "cpu")
    path = kernels / file
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)
    return kernels


def first_and_last(kernels: Path) -> tuple[Report | None, Report | None]:
    """The report of rank 0 when there is one, and when the kernel has ended."""
    world = surrounded(World(4))
    ready = world.ready(PAIRS, world.arrays(PAIRS), ranks=(0,))
    thread = Thread(target=ready, args=(kernels,))
    thread.start()
    first = None
    while first is None and thread.is_alive():
        first = world.report(0)
    thread.join()
    return first, world.report(0)


def test_the_first_report_stays(tmp_path: Path) -> None:
    kernels = machine(tmp_path, SLOW)
    first, last = first_and_last(kernels)
    assert first is not None
    assert first == last
    assert (first.kind, first.launch) == (MISMATCH, 40 + first.peer)


def test_a_report_that_everybody_writes_is_seen_to_change(tmp_path: Path) -> None:
    kernels = machine(tmp_path, SLOW, EVERYBODY)
    tries = (first_and_last(kernels) for _ in range(100))  # a busy machine may look too late
    assert any(first != last for first, last in tries)


@needs_sanitizer
def test_reports_of_many_threads_leave_no_race(tmp_path: Path) -> None:
    world = surrounded(World(4, ADDRESS))
    outcome = run_apart(PAIRS, tmp_path, *THREADS, world=world, ranks=(0,))
    assert (outcome.verdict(), outcome.said) == ("report", "")
    report = outcome.world.report(0)
    assert report is not None
    assert (report.kind, report.epoch, report.launch) == (MISMATCH, 1, 40 + report.peer)
