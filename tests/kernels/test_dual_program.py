"""Calls that carry two programs run the one that the hellos ask for, on all ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from ringcoll.algorithms import build
from ringcoll.collectives import COLLECTIVES
from ringcoll.dtypes import dtype_of
from ringcoll.errors import PlanError
from ringcoll.executors.binding import TraceEntry
from ringcoll.executors.cuda.ll_layout import LLLayout
from ringcoll.executors.cuda.params import launch_bytes
from ringcoll.executors.cuda.trace import HEAD, ROW, executed, head, ran, summed
from ringcoll.lower import lower
from tests.communicator.traces import check_rows
from tests.kernels.apart import ADDRESS, REPORTED, run_image
from tests.kernels.cases import STAGED, Arrays, Case
from tests.kernels.rooted import Rooted, launch, text_of
from tests.kernels.sanitizer import THREADS, needs_sanitizer
from tests.kernels.stand_in import KERNELS, compile_all, needs_compiler
from tests.kernels.test_collectives import settled
from tests.kernels.world import Ready, World

pytestmark = needs_compiler

ALGORITHMS = [
    ("reduce", "scatter_gather"),
    ("reduce", "scatter_gather_push"),
    ("reduce", "hierarchical"),
    ("broadcast", "one_shot"),
    ("gather", "all_pairs"),
    ("scatter", "one_shot"),
    ("all_reduce", "two_shot"),
    ("all_reduce", "ring"),
    ("all_gather", "all_pairs"),
]
"""Those that touch the root's own buffer, or any, from elsewhere."""
REDUCE = Rooted(build("reduce", "scatter_gather", 3, root=2))
ALL_REDUCE = Rooted(build("all_reduce", "two_shot", 3), in_place=True)


def kinds(collective: str, algorithm: str, nranks: int) -> Iterator[Rooted]:
    """Few slices and many, of one element and more, in place and not."""
    root = nranks - 1 if COLLECTIVES[collective].has_root else 0
    call = Rooted(build(collective, algorithm, nranks, root=root), lacks=nranks - 1)
    yield call
    yield replace(call, in_place=True, slices=(4, 3), replicas=(2, 1), lacks=0)
    yield replace(call, slices=(1, 1), count=1, shift=1)
    yield replace(call, slices=(3, 5), replicas=(3, 3), count=2777, shift=3)


def make(world: World, call: Rooted, *, there: bool, seed: int = 0) -> None:
    """A call of all ranks, and a look at what it has left."""
    world.forget_arrays()
    arrays = world.arrays(call.case, seed)
    launch(world, call, arrays, there=there)()
    arrays.check(f"{call} there={there}")


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("root", [0, 2])
def test_the_roots_buffer_is_there_or_not(root: int, in_place: bool) -> None:
    plan, world = build("reduce", "scatter_gather", 3, root=root), World(3)
    for calls, there in enumerate((True, False, False, True, True, False), 1):
        make(world, Rooted(plan, in_place=in_place), there=there, seed=calls)
        settled(world, calls)


@pytest.mark.parametrize("lacks", [0, 1, 2])
def test_one_rank_is_enough_that_all_go_around_it(lacks: int) -> None:
    world = World(3)
    for calls, there in enumerate((True, False, False, True), 1):
        make(world, replace(ALL_REDUCE, lacks=lacks), there=there, seed=calls)
        settled(world, calls)


@cache
def compiled(nranks: int) -> None:
    """Compile what all :func:`kinds` need, at once."""
    world, todo = World(nranks), chain.from_iterable(kinds(*kind, nranks) for kind in ALGORITHMS)
    compile_all(text_of(world, call) for call in todo)


@pytest.mark.slow
@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS)
@pytest.mark.parametrize("nranks", [2, 3, 4])
def test_every_algorithm_that_reaches_the_root(
    nranks: int, collective: str, algorithm: str
) -> None:
    world, calls = World(nranks), 0
    compiled(nranks)
    for call in kinds(collective, algorithm, nranks):
        for there in (True, False, True):
            calls += 1
            make(world, call, there=there, seed=calls)
            settled(world, calls)


def test_factors_are_heard_by_both() -> None:
    call, world = replace(REDUCE, op="premul_sum", scalars=(0.5, 3, -2)), World(3)
    for calls, there in enumerate((True, False), 1):
        make(world, call, there=there)
        settled(world, calls)


def test_ranks_run_ahead_and_the_root_changes_its_mind() -> None:
    """Each rank goes through all calls by itself; a staged call stands between them."""
    world, rng = World(3), np.random.default_rng(5)
    push = Rooted(build("reduce", "scatter_gather_push", 3, root=1), slices=(4, 3))
    gather = Rooted(build("gather", "all_pairs", 3), slices=(3, 1), replicas=(2, 2))
    other = Case(build("all_reduce", "ring", 3), STAGED, 700)
    own: list[list[Ready]] = [[] for _ in range(3)]
    found: list[tuple[Arrays, str]] = []
    for call in (REDUCE, push, gather):
        for there in (True, False):
            arrays = world.arrays(call.case, len(found))
            found.append((arrays, f"{call} there={there}"))
            for rank in range(3):
                own[rank].append(launch(world, call, arrays, there=there, ranks=(rank,)))
    arrays = world.arrays(other)
    found.append((arrays, str(other)))
    for rank in range(3):
        own[rank].append(world.ready(other, arrays, ranks=(rank,)))
    compile_all(ready.text for calls in own for ready in calls)
    for number in range(1, 7):
        order = [int(at) for at in rng.permutation(2 * len(found)) % len(found)]
        for arrays, _ in found:
            arrays.poison()

        def calls(rank: int, order: list[int] = order) -> None:
            for at in order:
                own[rank][at]()

        threads = [Thread(target=calls, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        settled(world, number * len(order))
        for arrays, title in found:
            arrays.check(title)


class Recorded:
    """Ranks whose kernels say what they execute."""

    def __init__(self, nranks: int) -> None:
        self.world = World(nranks)
        self.records = np.zeros((nranks, 1 << 16), np.uint8)
        self.world.traces = [record.ctypes.data for record in self.records]

    def rows(
        self, call: Rooted, *, there: bool, kernels: Path = KERNELS
    ) -> tuple[set[int], list[TraceEntry]]:
        """Which programs the ranks of a call have run, and the rows of all."""
        self.records[:, :16] = np.frombuffer(head(self.records.shape[1]), np.uint8)
        self.world.forget_arrays()
        arrays = self.world.arrays(call.case)
        launch(self.world, call, arrays, there=there)(kernels)
        arrays.check(call)
        programs, rows = set(), []
        places = LLLayout(dtype_of(call.case.dtype), 1)
        for rank, record in enumerate(self.records):
            data = record.tobytes()
            number = ran(data, rank)
            programs.add(number)
            found = call.choice.variants[number]
            rows += executed(data, rank, found.program, found.launch, places, found.grid.replicas)
        return programs, summed(rows)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(
    "call",
    [
        REDUCE,
        Rooted(build("gather", "all_pairs", 3, root=1), slices=(3, 3), replicas=(3, 2)),
        replace(ALL_REDUCE, lacks=1),
    ],
    ids=["reduce", "gather", "all_reduce"],
)
def test_what_runs_is_the_plan_of_its_variant(call: Rooted, there: bool) -> None:
    programs, rows = Recorded(3).rows(call, there=there)
    assert programs == {int(there)}
    found, other = call.choice.variants[there], call.choice.variants[not there]
    check_rows(rows, lower(found.plan, found.launch), found.layout)
    with pytest.raises(AssertionError):
        check_rows(rows, lower(other.plan, other.launch), other.layout)


def edited(folder: Path, old: str, new: str) -> Path:
    """The kernels with a change."""
    kernels = folder / "kernels"
    shutil.copytree(KERNELS, kernels)
    text = (kernels / "simple.cuh").read_text()
    assert text.count(old) == 1
    (kernels / "simple.cuh").write_text(text.replace(old, new))
    return kernels


def test_a_kernel_that_takes_the_other_program_is_noticed(tmp_path: Path) -> None:
    """Where the root's buffer is in reach both give the right result: the record tells."""
    kernels = edited(tmp_path, "if (at == 0) second = 0;", "if (at != 0) second = 0;")
    programs, rows = Recorded(3).rows(REDUCE, there=True, kernels=kernels)
    assert programs == {0}
    found = REDUCE.choice.variants[1]
    with pytest.raises(AssertionError):
        check_rows(rows, lower(found.plan, found.launch), found.layout)


WRONG = [
    pytest.param(REDUCE, "if (at == 0)", "if (at != 0)", False, id="inverted"),
    pytest.param(REDUCE, "if (at == 0)", "if (at == 1)", False, id="always there"),
    pytest.param(
        REDUCE,
        "rank == local.rank ? local.hello[buffer] : ",
        "",
        False,
        id="the root finds its own",
    ),
    pytest.param(REDUCE, ": bases.at[buffer][rank];", ": 0;", True, id="only the root knows"),
    pytest.param(
        REDUCE, "words += words[second];", "words += words[1];", False, id="the other's words"
    ),
    pytest.param(
        replace(ALL_REDUCE, lacks=1),
        "k < end",
        "k < end && k < 2",
        False,
        id="only the first rank is asked",
    ),
    pytest.param(
        ALL_REDUCE, "u64 k = first;", "u64 k = first + 2;", False, id="the first rank is not asked"
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("call", "old", "new", "there"), WRONG)
def test_wrong_choices_do_not_end_well(
    call: Rooted, old: str, new: str, there: bool, tmp_path: Path
) -> None:
    call = replace(call, replicas=(1, 3), slices=(5, 2))
    assert outcome(call, tmp_path, there=there, timeout=20) == "right"
    kernels = edited(tmp_path, old, new)
    assert outcome(call, tmp_path, there=there, kernels=kernels) != "right"


def outcome(
    call: Rooted, folder: Path, *, there: bool, kernels: Path = KERNELS, timeout: float = 2
) -> str:
    """What shows that something is wrong; "right" if nothing does."""
    world = World(call.plan.nranks, ADDRESS)
    arrays = world.arrays(call.case)
    ready = launch(world, call, arrays, there=there, timeout=timeout)
    done = run_image(world, ready, folder, kernels=kernels)
    if done.returncode:
        return "crash"
    if any(world.reports()):
        return "report"
    try:
        arrays.check(call)
    except AssertionError:
        return "wrong"
    return "right"


@needs_sanitizer
@pytest.mark.slow
@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS[:2])
def test_calls_in_a_row_leave_no_race(collective: str, algorithm: str, tmp_path: Path) -> None:
    call = Rooted(build(collective, algorithm, 3, root=1), slices=(5, 3), replicas=(2, 2))
    world = World(3, ADDRESS)
    arrays = world.arrays(call.case)
    for there in (True, False, True):
        ready = launch(world, call, arrays, there=there)
        done = run_image(world, ready, tmp_path, *THREADS, calls=3)
        assert done.returncode != REPORTED and (done.returncode, done.stderr) == (0, "")
        assert not any(world.reports())
        arrays.check(call)


def test_blocks_of_a_rank_that_differ_are_told() -> None:
    rows = [(0, 0xFFFFFFFF, 1, 0), (1, 0xFFFFFFFF, 0, 0)]

    def record(some: list[tuple[int, int, int, int]]) -> bytes:
        return np.array((len(some), 9), HEAD).tobytes() + np.array(some, ROW).tobytes()

    assert [ran(record(some), 4) for some in ([], rows[:1], rows[1:])] == [0, 1, 0]
    with pytest.raises(PlanError, match=r"rank 4: its CUDA blocks have run programs \[0, 1\]"):
        ran(record(rows), 4)


def test_the_bytes_of_a_launch_are_known_ahead() -> None:
    world = World(3)
    ready = launch(world, REDUCE, world.arrays(REDUCE.case), there=True)
    assert len(ready.parameter) == launch_bytes(3, 256, 3)
