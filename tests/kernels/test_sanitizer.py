"""What no signal orders, ThreadSanitizer sees: the kernels on the stand-in leave it nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringcoll.algorithms import build
from ringcoll.launch import Launch
from ringcoll.plan import Buffer
from tests.kernels.apart import ADDRESS, run_apart, run_image
from tests.kernels.cases import LL, LL128, STAGED, Case
from tests.kernels.sanitizer import THREADS, needs_sanitizer
from tests.kernels.traffic import Traffic
from tests.kernels.world import World

pytestmark = [needs_sanitizer, pytest.mark.slow]

CASES = [
    ("all_reduce", "all_pairs", LL),
    ("all_reduce", "ring", LL),
    ("all_reduce", "all_pairs", LL128),
    ("all_reduce", "ring", STAGED),
    ("all_reduce", "all_pairs", Launch(slices=4, window=1, mapped=frozenset())),
    ("all_reduce", "two_shot", Launch()),
    ("all_gather", "all_pairs", Launch(slices=3, mapped=frozenset({Buffer.INPUT}))),
    ("broadcast", "chain", STAGED),
    ("reduce", "chain", STAGED),
]


@pytest.mark.parametrize(
    ("collective", "algorithm", "launch"), CASES, ids=lambda value: str(value)[:24]
)
def test_calls_in_a_row_leave_no_race(
    collective: str, algorithm: str, launch: Launch, tmp_path: Path
) -> None:
    case = Case(build(collective, algorithm, 3), launch, 2000, replicas=2)
    outcome = run_apart(case, tmp_path, *THREADS, calls=5)
    assert (outcome.verdict(), outcome.said) == ("right", "")


@pytest.mark.parametrize("launch", [STAGED, Launch()], ids=["staged", "mapped"])
def test_warps_of_two_threads_leave_no_race(launch: Launch, tmp_path: Path) -> None:
    algorithm = "two_shot" if launch.mapped else "all_pairs"
    case = Case(build("all_reduce", algorithm, 3), launch, 2000, replicas=2, threads=8)
    outcome = run_apart(case, tmp_path, *THREADS, "-DRC_LANES=2", calls=5)
    assert (outcome.verdict(), outcome.said) == ("right", "")


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_call_that_fails_leaves_no_race(lanes: int, tmp_path: Path) -> None:
    case = Case(build("all_reduce", "ring", 3), STAGED, 1300, threads=4 * lanes)
    flags = (*THREADS, f"-DRC_LANES={lanes}")
    outcome = run_apart(case, tmp_path, *flags, ranks=(0, 1), timeout=0.5)
    assert (outcome.verdict(), outcome.said) == ("report", "")


MESSAGES = [
    pytest.param([(0, 1, 90_000), (1, 0, 90_001)], 16 << 10, id="many slices"),
    pytest.param([(0, 1, 40_000), (1, 2, 40_000), (2, 0, 40_000)], 8 << 10, id="ring"),
    pytest.param([(0, 1, 40_000), (1, 0, 40_000)] * 2, 32 << 10, id="in a row"),
    pytest.param([(0, 1, 140_000)], 256 << 10, id="replicas"),
]


@pytest.mark.parametrize(("messages", "zone"), MESSAGES)
@pytest.mark.parametrize(
    "checks", [THREADS, ("-fsanitize=undefined", "-fno-sanitize-recover=all")], ids=["races", "ub"]
)
def test_messages_leave_no_race(messages, zone, checks, tmp_path: Path) -> None:
    # Each has more slices than a window: what only a hello orders looks like a race here.
    world = World(3, ADDRESS, zone)
    traffic = Traffic(messages, shift=1, world=world)
    ready = traffic.ready(world, range(3), threads=3)
    done = run_image(world, ready, tmp_path, *checks, calls=3)
    assert (done.returncode, done.stderr) == (0, "")
    assert not any(world.reports())
    traffic.check()


@pytest.mark.parametrize("launch", [LL, STAGED, Launch()], ids=["lines", "staged", "mapped"])
def test_memory_is_used_within_its_bounds(launch: Launch, tmp_path: Path) -> None:
    # Shifts, alignment and conversions are defined too: the C++ compiler's own checks run along.
    case = Case(build("all_reduce", "recursive_doubling", 3), launch, 333, shift=1)
    if launch is LL:
        case = Case(build("all_reduce", "all_pairs", 3), launch, 333, shift=1)
    checks = ("-fsanitize=undefined", "-fno-sanitize-recover=all")
    outcome = run_apart(case, tmp_path, *checks, calls=2)
    assert (outcome.verdict(), outcome.said) == ("right", "")


@pytest.mark.parametrize("launch", [LL, STAGED, Launch()], ids=["lines", "staged", "mapped"])
def test_factors_are_read_when_they_have_come(launch: Launch, tmp_path: Path) -> None:
    algorithm = "two_shot" if launch.mapped else "all_pairs"
    plan = build("all_reduce", algorithm, 3)
    case = Case(plan, launch, 2000, op="premul_sum", scalars=(0.5, 3, -2), replicas=2)
    outcome = run_apart(case, tmp_path, *THREADS, calls=5)
    assert (outcome.verdict(), outcome.said) == ("right", "")
