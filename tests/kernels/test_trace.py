"""What the kernels execute is the lowered plan, row by row: their own record, on a CPU."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from ringcoll.algorithms import ALGORITHMS, build, options
from ringcoll.dtypes import dtype_of
from ringcoll.encode import encode
from ringcoll.errors import LaunchRefused, OutOfMemory, PlanError
from ringcoll.executors.cuda.compile import compile_kernel
from ringcoll.executors.cuda.ll_layout import LLLayout
from ringcoll.executors.cuda.params import Addresses, Body
from ringcoll.executors.cuda.trace import Executed, executed, head, summed, traced
from ringcoll.launch import Launch
from ringcoll.lower import lower
from ringcoll.plan import Block
from tests.communicator.traces import check_rows
from tests.kernels.cases import LL, LL128, Case
from tests.kernels.stand_in import KERNELS, compile_all, needs_compiler
from tests.kernels.world import World, lanes_of

COLLECTIVES = [name for name in ALGORITHMS if name != "send"]
LAUNCHES = (
    LL,
    LL128,
    Launch(),
    Launch(slices=3, in_place=True),
    Launch(slices=5, mapped=frozenset()),
)
"""In lines and in words; mapped, in place and staged, so that credits are taken and given."""
SOME = {4: LAUNCHES[0::3]}
"""For more ranks than three, which add algorithms: one in lines and one in words."""
RECORD = 1 << 17


class Recorded:
    """Ranks whose kernels keep a record."""

    def __init__(self, nranks: int, nbytes: int = RECORD) -> None:
        self.world = World(nranks)
        self.records = np.zeros((nranks, nbytes), np.uint8)
        self.world.traces = [record.ctypes.data for record in self.records]

    def rows(self, case: Case, kernels: Path = KERNELS) -> list[Executed]:
        """Make a call; the rows of all ranks."""
        self.world.forget_arrays()
        self.records[:] = 0
        self.records[:, :16] = np.frombuffer(head(self.records.shape[1]), np.uint8)
        self.world.call(case, kernels=kernels).check(case)
        program = encode(case.plan, case.launch)
        places = LLLayout(dtype_of(case.dtype), lanes_of(case.launch))
        return [
            row
            for rank, record in enumerate(self.records)
            for row in executed(record.tobytes(), rank, program, case.launch, places, case.replicas)
        ]


def carrying(nranks: int, collective: str) -> tuple[Launch, ...]:
    if collective == "barrier":  # which has neither data nor slices
        return (Launch(),)
    return SOME.get(nranks, LAUNCHES)


def cases(nranks: int, collective: str) -> Iterator[Case]:
    first = set[Launch]()
    for turn, algorithm in enumerate(ALGORITHMS[collective]):
        root = nranks - 1 if "root" in options(collective, algorithm) else 0
        plan = build(collective, algorithm, nranks, root=root)
        for number, launch in enumerate(carrying(nranks, collective)):
            # The first algorithm that a launch carries, and by turns every other one.
            if launch in first and (turn + number) % 2:
                continue
            try:
                encode(plan, launch)
            except LaunchRefused:
                continue
            first.add(launch)
            count = 0 if collective == "barrier" else 331
            replicas = 1 if launch.in_band else 1 + number % 2
            yield Case(plan, launch, count, "float32", replicas=replicas)


@cache
def compiled(nranks: int) -> None:
    """Compile what :func:`cases` need, at once."""
    world = Recorded(nranks).world
    todo = chain.from_iterable(cases(nranks, name) for name in COLLECTIVES)
    compile_all(world.body(case).text for case in todo)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("nranks", [3, 4])
def test_kernels_execute_the_lowered_plan(nranks: int, collective: str) -> None:
    todo, ranks = list(cases(nranks, collective)), Recorded(nranks)
    compiled(nranks)
    kinds: Counter[object] = Counter()
    for case in todo:
        check_rows(
            summed(ranks.rows(case)), lower(case.plan, case.launch), case.layout(sliced=True)
        )
        kinds[case.launch.protocol, case.launch.slices] += 1
    wanted = {(launch.protocol, launch.slices) for launch in carrying(nranks, collective)}
    assert kinds.keys() == wanted


@needs_compiler
@pytest.mark.parametrize("launch", [LL, Launch(slices=3)], ids=["lines", "words"])
def test_a_record_that_lacks_a_row_or_holds_another_is_noticed(launch: Launch) -> None:
    """What the test above leans on."""
    case = Case(build("all_reduce", "ring", 3), launch, 331, "float32", replicas=2)
    case = replace(case, replicas=1) if launch.in_band else case
    rows, layout = Recorded(3).rows(case), case.layout(sliced=True)
    lowered = lower(case.plan, launch)
    check_rows(summed(rows), lowered, layout)
    late = next(i for i, row in enumerate(rows) if row.count > 1)
    one = rows[late]
    for broken in (
        [*rows[:late], *rows[late + 1 :]],
        [*rows[:late], one, one, *rows[late + 1 :]],
        [*rows[:late], replace(one, at=one.at + 1), *rows[late + 1 :]],
    ):
        with pytest.raises(PlanError, match=r"part \d+ executed"):
            summed(broken)
    for broken in (
        [*rows[:late], replace(one, count=one.count + 1), *rows[late + 1 :]],
        [row for row in rows if row.step != one.step or row.block != one.block],
        [row for row in rows if row.block != one.block],
    ):
        with pytest.raises(AssertionError):
            check_rows(summed(broken), lowered, layout)


TWICE = [
    # Every block goes on with all places, not with those of its turn.
    (LL, "ll.cuh", {" * grid_blocks();": ";"}, PlanError),
    # Every replica does the whole slice.
    (
        Launch(),
        "simple.cuh",
        {"(width + replicas - 1) / replicas;": "width;", "first = replica * most;": "first = 0;"},
        AssertionError,
    ),
]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("launch", "file", "edits", "error"), TWICE, ids=["lines", "words"])
def test_work_that_is_done_twice_is_noticed(
    launch: Launch, file: str, edits: dict[str, str], error: type[Exception], tmp_path: Path
) -> None:
    """Its results are right: only the record tells."""
    kernels = tmp_path / "kernels"
    shutil.copytree(KERNELS, kernels)
    text = (kernels / file).read_text()
    for old, new in edits.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    (kernels / file).write_text(text)
    case = Case(build("broadcast", "chain", 3), launch, 2000, "float32", replicas=2)
    layout, lowered, ranks = case.layout(sliced=True), lower(case.plan, launch), Recorded(3)
    check_rows(summed(ranks.rows(case)), lowered, layout)
    rows = ranks.rows(case, kernels)
    with pytest.raises(error):
        check_rows(summed(rows), lowered, layout)


@needs_compiler
def test_rows_that_find_no_room_are_counted() -> None:
    case = Case(build("all_reduce", "ring", 3), LL, 331, "float32")
    with pytest.raises(OutOfMemory, match="rank 0 has room for 5 rows, 336 were executed"):
        Recorded(3, nbytes=16 + 5 * 24).rows(case)


@needs_compiler
def test_a_rank_without_a_record_runs_beside_others() -> None:
    ranks, case = Recorded(3), Case(build("all_reduce", "ring", 3), Launch(), 331, "float32")
    ranks.world.traces[1] = 0
    assert {row.block.rank for row in ranks.rows(case)} == {0, 2}


def test_a_kernel_keeps_no_record_unless_it_is_asked_to() -> None:
    body = Body("#define RC_WORDS 16\nrest", ((1,) * 16, (2,) * 16), (0, 0), 0, 0)
    local = [Addresses(rank, (0, 0), 0) for rank in range(2)]
    assert traced(body, local) is body
    found = traced(body, [local[0], replace(local[1], trace=77)])
    assert found.text == "#define RC_WORDS 32\n#define RC_TRACE 16\nrest"
    assert [row[:17] for row in found.words] == [(*(1,) * 16, 0), (*(2,) * 16, 77)]


@pytest.mark.parametrize("launch", [LL, Launch()], ids=["lines", "words"])
def test_kernels_that_keep_a_record_compile_for_gpus(launch: Launch) -> None:
    pytest.importorskip("cupy", reason="NVRTC is reached through CuPy")
    case = Case(build("all_reduce", "ring", 2), launch)
    at = [Addresses(rank, (0, 0), 0, trace=1) for rank in range(2)]
    text = World(2).body(case, at).text
    assert "#define RC_TRACE " in text
    assert b"ringcoll_kernel" in compile_kernel(text, "sm_90")


def test_parts_that_differ_are_told_apart() -> None:
    block = Block(1)
    one, other = (Executed(block, part, 4, 2, 10 + part) for part in range(2))
    assert summed([one, other]) == [(block, 4, 2, 21)]
    with pytest.raises(PlanError, match=r"rank 1 .*part 1 executed \[\(5, 2\)\], another"):
        summed([one, replace(other, step=5)])
