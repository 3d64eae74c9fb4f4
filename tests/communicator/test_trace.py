"""What runs is what is proven: the trace of every algorithm against the lowered plan, row by row.

The trace is taken through the public call. What it must be is read off ``lower(plan, launch)``,
which spells out every slice; the executor runs encoded rows and never sees that plan.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import ringcoll
from ringcoll.algorithms import ALGORITHMS, build
from ringcoll.collectives import Collective
from ringcoll.executors.binding import TraceEntry
from ringcoll.executors.point_to_point import Pairs
from ringcoll.launch import Launch, Layout
from ringcoll.lower import lower
from ringcoll.tuner.kept import KeptChoices
from ringcoll.tuner.measured import AGREED_BYTES
from tests.communicator.cases import ROOTED, SHAPES, Case, Memory, contribution, run_case
from tests.communicator.traces import check_rows, check_trace

PAIRS = [(c, a) for c, builders in ALGORITHMS.items() if c in SHAPES for a in builders]


@pytest.fixture
def selections(monkeypatch):
    """What each traced call selected, in a list: one entry a rank and call."""
    chosen = []
    honest = KeptChoices.find

    def find(*args):
        found, layout = honest(*args)
        chosen.append(found.on(layout=layout))
        return found, layout

    monkeypatch.setattr(KeptChoices, "find", find)
    return chosen


def traced(nranks, cases, selections):
    """For each case all ranks' rows as they happened, and the selection of all ranks."""
    traces: list[list[TraceEntry]] = [[] for _ in cases]
    chosen = [None] * len(cases)

    def work(comm):
        memory = Memory(comm)
        for number, case in enumerate(cases):
            inputs = [contribution(case, rank, nranks) for rank in range(nranks)]
            comm.barrier()
            if comm.rank == 0:
                selections.clear()
            comm.barrier()
            comm._state.executor.trace = traces[number]
            run_case(comm, memory, case, inputs)
            comm._state.executor.trace = None
            comm.barrier()
            if comm.rank == 0:
                # The last one of each rank is what it has run; a guess may come before it.
                finals = selections[-nranks:]
                assert all(s == finals[0] for s in finals), "the ranks chose different launches"
                chosen[number] = finals[0]

    ringcoll.spawn(work, nranks)
    return list(zip(cases, traces, chosen, strict=True))


def variants(number, collective, algorithm, nranks):
    """Staged and mapped, in place and not, one slice, more than the window, many lanes.

    Three of the five, others for each algorithm and number of ranks: of four numbers, all.
    """
    wide = nranks if "n" in SHAPES[collective] else 1
    root = nranks - 1 if collective in ROOTED else 0
    large = (AGREED_BYTES.value + 4100) // 4 // wide | 1
    made = [
        (33, False, False, None),
        (large, True, True, 1),
        (large, False, True, 3),
        (large, False, False, 2),
        (large, True, False, 7),
    ]
    for turn in range(3):
        count, in_place, symmetric, slices = made[(number + nranks + 2 * turn) % 5]
        options = {"algorithm": algorithm} | ({} if slices is None else {"slices": slices})
        yield Case(
            collective, count, root=root, in_place=in_place, symmetric=symmetric, options=options
        )


@pytest.mark.parametrize("nranks", [1, 2, 3, 4])
def test_trace_is_the_lowered_plan(nranks, selections):
    cases = [case for at, pair in enumerate(PAIRS) for case in variants(at, *pair, nranks)]
    kinds: Counter[str] = Counter()
    for case, merged, chosen in traced(nranks, cases, selections):
        lowered = lower(chosen.plan, chosen.launch)
        assert chosen.layout.slices == chosen.launch.slices
        if "slices" in case.options:
            assert chosen.launch.slices == case.options["slices"]
        check_trace(merged, lowered, chosen.layout)
        kinds["in place"] += chosen.launch.in_place
        kinds["staged"] += not chosen.launch.mapped
        kinds["mapped"] += len(chosen.launch.mapped) == 2
        kinds["credits"] += chosen.launch.slices > chosen.launch.window
        kinds["lanes"] += any(block.lane for block in lowered.steps)
    wanted = {"in place", "staged", "mapped", "credits"} | ({"lanes"} if nranks > 1 else set())
    assert {kind for kind, number in kinds.items() if number >= 20} >= wanted


def test_the_trace_of_every_call_by_the_environment(selections, monkeypatch):
    monkeypatch.setenv("RINGCOLL_DEBUG", "trace")
    values = np.arange(7000, dtype="float32")

    def work(comm):
        comm.all_reduce(values.copy(), algorithm="ring", slices=3)
        return comm._state.traced(), comm._state.traced()

    first, again = zip(*ringcoll.spawn(work, 3), strict=True)
    lowered = lower(selections[-1].plan, selections[-1].launch)
    check_rows([entry for own in first for entry in own], lowered, selections[-1].layout)
    assert again == ([], [], [])


@pytest.mark.parametrize("algorithm", ALGORITHMS["barrier"])
def test_trace_of_a_barrier(algorithm, selections):
    merged: list[TraceEntry] = []

    def work(comm):
        comm._state.executor.trace = merged
        comm.barrier(algorithm=algorithm)

    ringcoll.spawn(work, 5)
    lowered = lower(build("barrier", algorithm, 5), selections[-1].launch)
    check_trace(merged, lowered, selections[-1].layout)
    assert {count for _, _, _, count in merged} == {0}


@pytest.mark.parametrize("count", [0, 1, 1000, 1 << 20])
def test_trace_of_a_pair(count, monkeypatch):
    """send and recv run the two-rank plan, staged, however many slices it takes."""
    merged: list[TraceEntry] = []
    launches: list[tuple[int, Launch]] = []
    honest = Pairs._staged_launch

    def launch(self, call):
        launches.append(honest(self, call))
        return launches[-1]

    monkeypatch.setattr(Pairs, "_staged_launch", launch)
    values = np.arange(count, dtype="float64")

    def work(comm):
        comm._state.progress.pairs.trace = merged
        if comm.rank == 1:
            comm.send(values, 2)
        if comm.rank == 2:
            out = np.empty(count)
            comm.recv(out, 1)
            return out

    assert np.array_equal(ringcoll.spawn(work, 4)[2], values)
    (slot, how), (other, same) = launches
    assert (slot, how) == (other, same)
    assert how == Launch(slices=how.slices, mapped=frozenset())
    assert (how.slices > 8) == (count > 1000)
    layout = Layout(Collective("send", 2), (count,), how.slices, align=8)
    check_trace(merged, lower(build("send", "pair", 2), how), layout)


def test_a_trace_that_lacks_a_row_or_runs_too_early_is_noticed(selections):
    """What the tests above lean on."""
    case = Case("all_reduce", 9000, options={"algorithm": "ring", "slices": 3})
    ((_, merged, chosen),) = traced(3, [case], selections)
    lowered = lower(chosen.plan, chosen.launch)
    check_trace(merged, lowered, chosen.layout)
    late = next(i for i, (b, s, _, _) in enumerate(merged) if lowered.steps[b][s].signals)
    block, step, at, count = merged[late]
    for broken in (
        merged[:-1],
        [*merged[:late], (block, step, at, count + 1), *merged[late + 1 :]],
        [*merged[:late], (block, step, at + 1, count), *merged[late + 1 :]],
        [m for m in merged if m[0] != block] + [m for m in merged if m[0] == block],
    ):
        with pytest.raises(AssertionError):
            check_trace(broken, lowered, chosen.layout)
