"""Captured calls: CUDA graphs replayed thousands of times among eager calls."""

from __future__ import annotations

import pytest

import ringcoll
from ringcoll.bench.gpu import captured
from ringcoll.cuda.device import devices
from ringcoll.errors import LaunchRefused
from tests.gpu.ranks import close, on, together

pytestmark = pytest.mark.gpu

CHUNKS, REPLAYS = 200, 50
SMALL, LARGE = 300, 600_000  # elements of int32: signals in the data, and of their own


class Counted:
    """Calls on numbers that grow by one a replay, so that no old result passes for a new one."""

    def __init__(self, comm) -> None:
        cupy = comm.xp
        self.comm, self.n, self.turn = comm, comm.nranks, 0
        self.x = comm.empty(SMALL, "int32")
        self.sums = cupy.empty(SMALL, "int32")
        self.big = comm.empty(LARGE, "int32")
        self.big_sums = comm.empty(LARGE, "int32")
        self.every = comm.empty(SMALL * self.n, "int32")
        self.plain = cupy.empty(SMALL, "int32")
        for array in (self.x, self.big):
            array.fill(comm.rank)
        self.plain.fill(-1)

    def step(self) -> None:
        """Enqueue one round of calls."""
        self.x += 1
        self.big += 1
        self.comm.all_reduce(self.x, self.sums)
        self.comm.all_gather(self.x, self.every)
        self.comm.all_reduce(self.big, self.big_sums)
        self.comm.broadcast(self.x if self.comm.rank == 0 else None, self.plain)

    def check(self, rounds: int) -> None:
        ranks = range(self.n)
        total = sum(ranks) + self.n * rounds
        assert {*self.sums.get().tolist()} == {total}
        assert {*self.big_sums.get().tolist()} == {total}
        assert {*self.plain.get().tolist()} == {rounds}
        parts = self.every.get().reshape(self.n, SMALL)
        assert [{*part.tolist()} for part in parts] == [{rank + rounds} for rank in ranks]


def replay(comm) -> int:
    """10,000 replays in short chunks, eager rounds between them; how many rounds."""
    cupy = comm.xp
    with on(comm), cupy.cuda.Stream(non_blocking=True) as stream:
        counted, rounds = Counted(comm), 0
        for _ in range(3):
            counted.step()
            rounds += 1
        comm.synchronize()
        graphs = [captured(stream, counted.step, steps) for steps in (1, 3)]
        counted.check(rounds)  # to capture is not to run
        for chunk in range(CHUNKS):
            for turn in range(REPLAYS):
                longer = turn % 10 == 9
                graphs[longer].launch(stream)
                rounds += 3 if longer else 1
                if (turn + chunk) % 17 == 0:
                    counted.step()
                    rounds += 1
            comm.synchronize()
            if chunk % 20 == 0:
                counted.check(rounds)
        counted.check(rounds)
    return rounds


def test_one_rank():
    assert ringcoll.spawn(replay, 1, device="cuda", timeout=20)[0] > CHUNKS * REPLAYS


def test_a_capture_stays_whole():
    """Neither what is waited for beside it nor a stream of it that is gone does it harm."""

    def work(comm) -> tuple[list[int], list[int]]:
        cupy, runtime = comm.xp, comm.xp.cuda.runtime
        stream = cupy.cuda.Stream(non_blocking=True)
        x, y = cupy.ones(SMALL, "int32"), cupy.ones(SMALL, "int32")
        with on(comm):
            for each in (x, y):
                comm.all_reduce(each)
            comm.synchronize()
            with stream:
                stream.begin_capture()
                comm.all_reduce(x)
                for _ in range(3):
                    side = runtime.streamCreateWithFlags(runtime.streamNonBlocking)
                    event = cupy.cuda.Event(disable_timing=True)
                    event.record(stream)
                    runtime.streamWaitEvent(side, event.ptr, 0)
                    comm.all_reduce(x, stream=side)
                    comm.synchronize()  # nobody keeps that stream: what ran before is waited for
                    runtime.eventRecord(event.ptr, side)
                    stream.wait_event(event)
                    runtime.streamDestroy(side)
                x += 1
                comm.all_reduce(x)
                for call in (comm.synchronize, comm.close):
                    with pytest.raises(LaunchRefused, match="captured"):
                        call()
                graph = stream.end_capture()
            for _ in range(5):
                graph.launch(stream)
            comm.all_reduce(y)
            comm.synchronize()
            stream.synchronize()
        return x.get().tolist(), y.get().tolist()

    (said,) = ringcoll.spawn(work, 1, device="cuda", timeout=20)
    assert said == ([6] * SMALL, [1] * SMALL)


def test_close_frees_memory_beside_a_capture():
    """In the usual mode of a capture no thread may do so, unless it says that it knows."""

    def work(comm) -> list[int]:
        cupy = comm.xp
        with on(comm), cupy.cuda.Stream(non_blocking=True) as stream:
            x, other = cupy.ones(SMALL, "int32"), comm.split(0)
            comm.all_reduce(x)
            other.all_reduce(x, stream=cupy.cuda.Stream(non_blocking=True))
            other.synchronize()
            comm.synchronize()
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
            x += 1
            comm.all_reduce(x)
            other.close()
            graph = stream.end_capture()
            for _ in range(3):
                graph.launch(stream)
            stream.synchronize()
        return x.get().tolist()

    assert ringcoll.spawn(work, 1, device="cuda", timeout=20) == [[4] * SMALL]


@pytest.mark.multi_gpu
def test_a_gpu_for_each_rank():
    n = min(8, len(devices()))
    rounds = ringcoll.spawn(replay, n, device="cuda", timeout=20)
    assert min(rounds) == max(rounds) > CHUNKS * REPLAYS


@pytest.mark.multi_gpu
def test_what_is_replayed_late_is_told():
    """A rank that does not launch its graph: the others end by the deadline."""

    def work(comm) -> str:
        cupy = comm.xp
        with on(comm), cupy.cuda.Stream(non_blocking=True) as stream:
            x = comm.empty(100, "float32")
            x.fill(1)
            comm.all_reduce(x)
            comm.synchronize()
            graph = captured(stream, lambda: comm.all_reduce(x), 2)
            if comm.rank == 1:
                return "never launched"
            graph.launch(stream)
            with pytest.raises(ringcoll.Error) as told:
                comm.synchronize()
            return type(told.value).__name__

    comms = ringcoll.init_all([0, 1], device="cuda", timeout=2)
    said = together(comms, work)
    assert said == ["DeadlineError", "never launched"]
    close(comms, failed=True)
