"""Calls that fail: every rank ends, says why, and touches nothing any more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Thread

import pytest

from ringcoll.algorithms import build
from ringcoll.launch import Launch
from tests.kernels.cases import LL, STAGED, Case
from tests.kernels.stand_in import compile_all, needs_compiler
from tests.kernels.world import ABORT, LEFT_RANKS, Ready, World

pytestmark = needs_compiler

EXPIRED, MISMATCH, ABORTED, PEER_FAILED, EPOCH_WRAPPED, LEFT = 1, 2, 3, 4, 5, 6
HELLO = 0xFFFFFFFF
SOURCE = 0x80000000
AT_ONCE = 30.0
"""Seconds within which everything ends, on a machine that is busy."""

EVERY = pytest.mark.parametrize("launch", [LL, STAGED, Launch()], ids=["lines", "staged", "mapped"])


def seconds(launches: Sequence[Ready]) -> float:
    """How long it takes until all launches, side by side, have ended."""
    threads = [Thread(target=launch) for launch in launches]
    compile_all(launch.text for launch in launches)
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - start


def ring(launch: Launch) -> Case:
    algorithm = "two_shot" if launch.mapped else "ring"
    return Case(build("all_reduce", algorithm, 3), launch, 500, replicas=2)


@EVERY
@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_never_comes(absent: int, launch: Launch) -> None:
    world = World(3)
    case = ring(launch)
    present = [rank for rank in range(3) if rank != absent]
    ready = world.ready(case, world.arrays(case), ranks=present, timeout=0.3)
    assert 0.3 <= seconds([ready]) < AT_ONCE
    assert world.report(absent) is None
    reports = [report for report in world.reports() if report is not None]
    assert len(reports) == 2
    assert {report.kind for report in reports} <= {EXPIRED, PEER_FAILED}
    assert any(report.kind == EXPIRED for report in reports)
    for report in reports:
        assert report.epoch == 1
        if report.kind == EXPIRED and report.step == HELLO:
            assert report.peer == absent or launch.mapped
        elif report.kind == EXPIRED:
            assert report.step < 20
            assert report.peer & SOURCE
    assert all(world.broken(rank) for rank in range(3))


@EVERY
def test_who_was_waited_for(launch: Launch) -> None:
    world = World(2)
    plan = build("reduce", "all_pairs", 2)
    case = Case(plan, launch, 100)
    ready = world.ready(case, world.arrays(case), ranks=(0,), signature=1234, timeout=0.2)
    if not launch.mapped:
        # Rank 1 has entered: rank 0 can wait for nothing but what its program says.
        world.hellos(0)[1, 1, 0] = (1234, 1, 0, 1)
    assert seconds([ready]) < AT_ONCE
    report = world.report(0)
    assert report is not None
    assert report.kind == EXPIRED
    if launch.mapped:
        assert (report.step, report.peer) == (HELLO, 1)
    else:
        assert report.step < 3
        assert report.peer & SOURCE


@EVERY
def test_the_next_call_returns_at_once_and_touches_nothing(launch: Launch) -> None:
    world = World(3)
    case = ring(launch)
    arrays = world.arrays(case)
    again = world.ready(case, arrays, timeout=60.0)
    seconds([world.ready(case, arrays, ranks=(0, 1), timeout=0.1)])
    before = world.memory.copy()
    # The rank that came late, too: its own arena says that the call is broken.
    assert seconds([again]) < AT_ONCE
    late = world.report(2)
    assert late is not None
    assert late.kind == PEER_FAILED
    world.words(2)[:] = 0
    world.workspace_of(2)[4:8] = 0  # the claim to the report
    world.hellos(2)[1, 2, 0] = 0  # what it would have said
    assert (world.memory == before).all()


@EVERY
def test_ranks_that_make_different_calls(launch: Launch) -> None:
    world = World(2)
    algorithm = "two_shot" if launch.mapped else "ring"
    case = Case(build("all_reduce", algorithm, 2), launch, 64)
    arrays = world.arrays(case)
    took = seconds(
        [
            world.ready(case, arrays, ranks=(rank,), signature=100 + rank, number=40 + rank)
            for rank in range(2)
        ]
    )
    assert took < AT_ONCE
    reports = world.reports()
    assert any(report is not None and report.kind == MISMATCH for report in reports)
    for rank, report in enumerate(reports):
        if report is not None and report.kind == MISMATCH:
            assert (report.peer, report.launch, report.step) == (1 - rank, 41 - rank, HELLO)
            assert report.epoch == 1
    assert world.broken(0)
    assert world.broken(1)


@EVERY
def test_ranks_of_one_launch_have_numbers_of_their_own(launch: Launch) -> None:
    world = World(3)
    case, numbers = ring(launch), [40, 41, 50]
    arrays = world.arrays(case)
    seconds(
        [
            world.ready(case, arrays, ranks=(0, 1), signature=100, number=40),
            world.ready(case, arrays, ranks=(2,), signature=101, number=50),
        ]
    )
    reports = world.reports()
    different = [rank for rank in range(3) if (r := reports[rank]) and r.kind == MISMATCH]
    assert different
    for rank in different:
        report = reports[rank]
        assert report is not None
        assert (report.own, report.launch) == (numbers[rank], numbers[report.peer])
    said = {int(world.hellos(rank)[1, rank, 0, 2]) for rank in different}
    assert said == {numbers[rank] for rank in different}


@EVERY
def test_the_host_gives_up(launch: Launch) -> None:
    world = World(3)
    case = ring(launch)
    ready = world.ready(case, world.arrays(case), ranks=(0, 1), timeout=1e10)

    def give_up() -> None:
        time.sleep(0.2)
        world.words(1)[ABORT] = 1

    host = Thread(target=give_up)
    host.start()
    assert seconds([ready]) < AT_ONCE
    host.join()
    report, other = world.report(1), world.report(0)
    assert report is not None
    assert report.kind == ABORTED
    assert other is not None
    assert other.kind == PEER_FAILED


@EVERY
@pytest.mark.parametrize("entered", [0, 1])
def test_a_rank_that_has_left(entered: int, launch: Launch) -> None:
    """The host says after which call; what was enqueued before that call still ends."""
    world = World(3)
    case = ring(launch)
    arrays = world.arrays(case)
    for rank in range(2):
        world.words(rank)[LEFT_RANKS + 2] = 1 + entered
    if entered:
        seconds([world.ready(case, arrays)])
        assert world.reports() == [None] * 3
    assert seconds([world.ready(case, arrays, ranks=(0, 1))]) < AT_ONCE
    reports = [world.report(rank) for rank in range(2)]
    told = [report for report in reports if report is not None]
    assert len(told) == 2
    assert {report.kind for report in told} <= {LEFT, PEER_FAILED}
    for report in told:
        assert report.epoch == 1 + entered
        if report.kind == LEFT:
            assert report.peer == 2
    assert any(report.kind == LEFT for report in told)


def test_a_late_rank_is_waited_for() -> None:
    world = World(2)
    case = Case(build("all_reduce", "ring", 2), LL, 64)
    arrays = world.arrays(case)
    first, late = (world.ready(case, arrays, ranks=(rank,)) for rank in range(2))
    compile_all([first.text, late.text])
    waiting = Thread(target=first)
    waiting.start()
    time.sleep(0.5)
    late()
    waiting.join()
    assert not any(world.reports())
    arrays.check(case)


@pytest.mark.parametrize(
    ("algorithm", "launch", "threads", "late"),
    [("ring", LL, 2, 2), ("one_shot_push", STAGED, 3, 2), ("two_shot", Launch(), 3, 4)],
    ids=["lines", "staged", "mapped"],
)
def test_each_wait_has_its_own_time(
    algorithm: str, launch: Launch, threads: int, late: int
) -> None:
    # A thread of rank 0 waits for rank 1 or 3, then for the late one: both together for too long.
    # On a busy machine a rank may come later than it is told to: then all is done more slowly.
    nranks = max(4, late + 1)
    for timeout in (0.5, 4.0, 24.0):
        world = World(nranks)
        case = Case(build("all_reduce", algorithm, nranks), launch, 64, threads=threads)
        arrays = world.arrays(case)
        groups = [(0,), tuple(sorted({*range(1, nranks)} - {late})), (late,)]
        ready = [world.ready(case, arrays, ranks=ranks, timeout=timeout) for ranks in groups]
        compile_all(launch.text for launch in ready)
        waiting = [Thread(target=launch) for launch in ready]
        for thread in waiting:
            thread.start()
            if thread is not waiting[-1]:
                time.sleep(0.6 * timeout)
        for thread in waiting:
            thread.join()
        if not any(world.reports()):
            break
    assert not any(world.reports())
    arrays.check(case)


@EVERY
def test_flags_that_would_begin_anew_are_refused(launch: Launch) -> None:
    world = World(3)
    for rank in range(3):
        world.progress(rank)[:] = (1 << 32) - 1
    case = ring(launch)
    assert seconds([world.ready(case, world.arrays(case), timeout=60.0)]) < AT_ONCE
    kinds = {report.kind for report in world.reports() if report is not None}
    assert EPOCH_WRAPPED in kinds
    assert kinds <= {PEER_FAILED, EPOCH_WRAPPED}
    assert all(world.broken(rank) for rank in range(3))
