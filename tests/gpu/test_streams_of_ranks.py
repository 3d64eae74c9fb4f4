"""Ranks as threads, streams other than the current one, and calls that are waited for later."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest

import ringcoll
from ringcoll.errors import ArgumentError
from tests.communicator.cases import Case
from tests.gpu.ranks import close, on, ordinal, run_alone, together

pytestmark = pytest.mark.gpu

CASES = [
    Case(collective, count, symmetric=symmetric, in_place=in_place, root=root, seed=count)
    for collective, root in (("all_reduce", 0), ("all_gather", 0), ("broadcast", 1))
    for count in (3, 5000, 100_003)
    for symmetric, in_place in ((True, False), (False, True))
]


def busy(cupy, seconds: float = 0.02) -> None:
    """Keep the current stream busy for about so long."""
    kernel = cupy.RawKernel(
        r"""extern "C" __global__ void spin(long long cycles) {
            long long start = clock64();
            while (clock64() - start < cycles) {}
        }""",
        "spin",
    )
    kernel((1,), (1,), (np.int64(seconds * 1.5e9),))


def hold(cupy, cupyx, seconds: float = 10.0):
    """Hold up the current stream until the host stores 1 in what is returned, or for so long."""
    kernel = cupy.RawKernel(
        r"""extern "C" __global__ void hold(volatile int* flag, long long cycles) {
            long long start = clock64();
            while (*flag == 0 && clock64() - start < cycles) {}
        }""",
        "hold",
    )
    flag = cupyx.zeros_pinned(1, "int32")
    kernel((1,), (1,), (flag.ctypes.data, np.int64(seconds * 1.5e9)))
    return flag


@pytest.mark.parametrize("nranks", [1, 2, 4])
def test_a_thread_for_each_rank(nranks):
    todo = [case for case in CASES if case.root < nranks]
    done = ringcoll.spawn(run_alone, nranks, todo, device="cuda", timeout=20)
    assert done == [len(todo)] * nranks


@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_each_rank_on_a_stream_of_its_own(nranks):
    def work(comm, cases):
        cupy = comm.xp
        with on(comm), cupy.cuda.Stream(non_blocking=True):
            return run_alone(comm, cases)

    todo = [case for case in CASES if case.root < nranks]
    done = ringcoll.spawn(work, nranks, todo, device="cuda", timeout=20)
    assert done == [len(todo)] * nranks


def test_a_call_comes_after_what_its_stream_was_given():
    """The inputs are written late, on the stream; nothing is waited for before the end."""

    def work(comm):
        cupy = comm.xp
        with on(comm):
            streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
            arrays = [comm.empty(10_000, "int32") for _ in range(2)]
            others = [cupy.empty(10_000, "int32") for _ in range(2)]
            seen = [cupy.empty(10_000, "int32") for _ in range(6)]
            # Memory and kernels are there before anybody waits for anybody.
            busy(cupy)
            others[0].fill(0)
            others[0] += 1
            seen[0][...] = others[0]
            cupy.cuda.Device().synchronize()
            for turn in range(6):
                with streams[turn % 2]:
                    x, y = arrays[turn % 2], others[turn % 2]
                    busy(cupy)
                    x.fill(comm.rank + turn)
                    comm.all_reduce(x, y)
                    y += 1
                    seen[turn][...] = y
            for stream in streams:
                stream.synchronize()
            comm.synchronize()
            return [sorted({*array.get().tolist()}) for array in seen]

    n = 3
    wanted = [[sum(rank + turn for rank in range(n)) + 1] for turn in range(6)]
    assert ringcoll.spawn(work, n, device="cuda", timeout=20) == [wanted] * n


def test_the_stream_of_the_call():
    def work(comm):
        cupy = comm.xp
        with on(comm):
            stream = cupy.cuda.Stream(non_blocking=True)
            x = cupy.zeros(500, "float32")
            cupy.cuda.get_current_stream().synchronize()
            with stream:
                busy(cupy)
                x.fill(comm.rank + 1)
            comm.all_reduce(x, stream=stream)
            stream.synchronize()
            first = float(x[7])
            comm.all_reduce(x, stream=stream.ptr)
            stream.synchronize()
            return first, float(x[499])

    assert ringcoll.spawn(work, 2, device="cuda", timeout=20) == [(3.0, 6.0)] * 2


def test_streams_that_are_gone():
    """Of a stream that was given by its handle alone nobody says how long it lives."""

    def work(comm):
        cupy = comm.xp
        with on(comm):
            x = comm.empty(500, "int32")
            x.fill(1)
            cupy.cuda.get_current_stream().synchronize()
            for turn in range(100):
                stream = cupy.cuda.Stream(non_blocking=True)
                comm.all_reduce(x, op="avg" if turn else "sum", stream=stream.ptr)
                stream.synchronize()
                del stream
            comm.synchronize()
            return int(x[499])

    assert ringcoll.spawn(work, 2, device="cuda", timeout=20) == [2, 2]


def test_work_orders_the_current_stream():
    def work(comm):
        import cupyx

        cupy = comm.xp
        with on(comm):
            first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
            x, y = comm.empty(70_000, "float32"), cupy.zeros(70_000, "float32")
            # Kernels are loaded before one waits for the host: loading may wait for that. So the
            # first call waits for its own kernel, and no generic one runs in its place.
            hold(cupy, cupyx)[0] = 1
            x.fill(0)
            comm.all_reduce(x)
            comm.synchronize()
            with first:
                held = hold(cupy, cupyx)
                x.fill(comm.rank + 1)
                started = comm.all_reduce(x, async_op=True)
            early = started.done()
            held[0] = 1
            with second:
                started.wait()
                y[...] = x
                second.synchronize()
            assert started.exception() is None
            return early, started.done(), float(y.min()), float(y.max())

    done = ringcoll.spawn(work, 2, device="cuda", timeout=20, kernel_wait=math.inf)
    assert done == [(False, True, 3.0, 3.0)] * 2


def test_a_call_returns_before_its_end():
    """One rank a launch: with ranks that share a launch, who comes first waits for the others."""
    (comm,) = ringcoll.init_all([0], device="cuda", timeout=20)
    with on(comm):
        x = comm.empty(100, "float32")
        comm.all_reduce(x)
        comm.synchronize()
        busy(comm.xp, 2.0)
        comm.all_reduce(x)
        assert not comm.xp.cuda.get_current_stream().done
        comm.synchronize()
    close([comm])


def test_a_thread_that_has_done_nothing_else():
    """Its device is said to be 0, but CUDA has no context there until something asks for one."""
    (comm,) = ringcoll.init_all([0], device="cuda", timeout=20)
    with on(comm):
        x, y = comm.xp.full(100, 3, "int32"), comm.xp.full(100, 5, "int32")
        comm.synchronize()
        comm.all_reduce(x)  # compiled, and kept
    errors: list[BaseException] = []

    def call() -> None:
        try:
            comm.all_reduce(x)
            comm.all_reduce(y, algorithm="one_shot_push")
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert errors == []
    close([comm])


def test_work_of_a_group():
    comms = ringcoll.init_all([0, 0], device="cuda", timeout=20)
    arrays = together(comms, lambda comm: comm.xp.full(40, comm.rank + 1, "int64"))
    with ringcoll.group():
        works = [
            comm.all_reduce(array, async_op=True) for comm, array in zip(comms, arrays, strict=True)
        ]
    for comm, work, array in zip(comms, works, arrays, strict=True):
        assert work is not None
        work.wait()
        comm.synchronize()
        assert (array.get() == 3).all()
    close(comms)


@pytest.mark.multi_gpu
def test_a_stream_of_another_device_is_refused():
    def work(comm):
        cupy = comm.xp
        with cupy.cuda.Device(1 - ordinal(comm)):
            foreign = cupy.cuda.Stream(non_blocking=True)
        with on(comm):
            x = comm.empty(4, "float32")
            with pytest.raises(ArgumentError, match="stream is on device"):
                comm.all_reduce(x, stream=foreign)
            comm.barrier()
            comm.synchronize()

    comms = ringcoll.init_all([0, 1], device="cuda", timeout=20)
    together(comms, work)
    close(comms)
