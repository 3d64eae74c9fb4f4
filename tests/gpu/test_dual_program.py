"""Rooted calls on GPUs: the same call, with the root's own array in reach of its peers or not."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import ringcoll
from ringcoll.bench.gpu import captured
from ringcoll.cuda.device import devices
from ringcoll.lower import lower
from tests.communicator.traces import check_rows
from tests.gpu.ranks import close, on, together

pytestmark = pytest.mark.gpu

COUNT = 2_300_003
"""Elements of float32: more than lines carry, and several slices where they go through SCRATCH."""


class Calls:
    """A rank's arrays of rooted calls: of comm.empty, but for one of the root's own."""

    def __init__(self, comm: Any, root: int) -> None:
        self.comm, self.root = comm, root
        self.x = comm.empty(COUNT, "float32")
        self.there = comm.empty(COUNT, "float32")
        with on(comm):
            self.plain = comm.xp.empty(COUNT, "float32")
            for array in (self.x, self.there, self.plain):
                array.fill(0)
            comm.xp.cuda.get_current_stream().synchronize()

    def own(self, there: bool) -> Any:
        """Where the sums come at the root; None elsewhere."""
        if self.comm.rank != self.root:
            return None
        return self.there if there else self.plain

    def prepare(self, number: int) -> None:
        """New numbers to be summed, and no old sums."""
        with on(self.comm):
            for array in (self.there, self.plain):
                array.fill(-1)
            self.x[:] = self.comm.xp.arange(COUNT, dtype="float32") % 1000 + number
            self.x += self.comm.rank

    def wrong(self, number: int, there: bool) -> int:
        """How many sums are not what they should be."""
        if self.comm.rank != self.root:
            return 0
        n = self.comm.nranks
        with on(self.comm):
            wanted = (self.comm.xp.arange(COUNT, dtype="float32") % 1000 + number) * n
            wanted += n * (n - 1) // 2
            other = self.own(not there)
            return int((self.own(there) != wanted).sum()) + int((other != -1).sum())


@pytest.fixture
def ranks(request) -> Iterator[list]:
    """So many ranks on device 0; "each": one on every GPU."""
    wanted = min(8, len(devices())) if request.param == "each" else request.param
    comms = ringcoll.init_all(wanted, device="cuda", timeout=20, debug="trace")
    yield comms
    close(comms)


def reduced(calls: list[Calls], there: bool) -> None:
    """One reduce of all ranks, by the thread that all share."""
    with ringcoll.group():
        for each in calls:
            with on(each.comm):
                each.comm.reduce(
                    each.x, each.own(there), root=each.root, algorithm="scatter_gather"
                )
    for each in calls:
        each.comm.synchronize()


def alternate(ranks: list) -> None:
    root = len(ranks) - 1
    calls = together(ranks, lambda comm: Calls(comm, root))
    for number, there in enumerate((True, False, False, True, True, False)):
        for each in calls:
            each.prepare(number)
            each.comm.synchronize()
        reduced(calls, there)
        assert [each.wrong(number, there) for each in calls] == [0] * len(calls)
        rows = [row for comm in ranks for row in comm._state.traced()]
        found = ranks[0]._state.cuda.async_errors.last.choice
        assert found.direct is not None
        ran = found.variants[there]
        check_rows(rows, lower(ran.plan, ran.launch), ran.layout)


@pytest.mark.parametrize(
    "ranks", [pytest.param([0] * n, id=f"{n} on one") for n in (2, 4)], indirect=True
)
def test_each_call_takes_the_program_that_the_roots_array_allows(ranks):
    alternate(ranks)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("ranks", ["each"], indirect=True)
def test_each_call_does_so_on_several_gpus(ranks):
    alternate(ranks)


def replayed(comm) -> int:
    """Captured calls of both kinds among eager ones; how many sums were wrong."""
    with on(comm), comm.xp.cuda.Stream(non_blocking=True) as stream:
        calls, wrong = Calls(comm, 0), 0

        def reduce(there: bool) -> None:
            comm.reduce(calls.x, calls.own(there), root=0, algorithm="scatter_gather")

        for there in (True, False):
            reduce(there)
        comm.synchronize()
        graphs = [captured(stream, partial(reduce, there), 3) for there in (False, True)]
        for number in range(12):
            there = number % 3 != 1
            calls.prepare(number)
            reduce(there)
            graphs[there].launch(stream)
            comm.synchronize()
            wrong += calls.wrong(number, there)
    return wrong


@pytest.mark.multi_gpu
def test_captured_calls_of_both_kinds():
    n = min(8, len(devices()))
    assert ringcoll.spawn(replayed, n, device="cuda", timeout=20) == [0] * n
