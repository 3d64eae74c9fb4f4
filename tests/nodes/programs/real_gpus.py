"""The program of fake GPUs on real ones: ``python real_gpus.py PART ... WORD``."""

import sys
from dataclasses import replace

import numpy as np

import ringcoll
from ringcoll.executors.cuda_nodes import layers
from ringcoll.tuner import measured
from tests.gpu.ranks import Call, Mirror, inputs_of, judge, on
from tests.gpu.test_point_to_point import DeviceBuffer
from tests.nodes.programs import gpus
from tests.processes.programs.verdict import Checks, say


def run(comm, checks, *cases) -> None:
    """As the fake ones' run, on the rank's GPU; every other case in memory of ``comm.empty``."""
    memories = [Mirror(comm, 1 << 20) for _ in cases]
    calls = [
        Call(comm, memory, case, inputs_of(case, comm.nranks))
        for memory, case in zip(memories, cases, strict=True)
    ]
    for call in calls:
        call.upload()
    comm.xp.cuda.Device().synchronize()
    for call in calls:
        call.make()
    comm.synchronize()
    for call, case in zip(calls, cases, strict=True):
        judge(call, case)
        checks.count += 1


def large(comm, checks, _gpus) -> None:
    """Many slices of full length, in a row and on streams by turns, beside work of their own."""
    xp, n, count = comm.xp, comm.nranks, 40_000_003
    with on(comm):
        streams = [xp.cuda.Stream(non_blocking=True) for _ in range(2)]
        want = n * (n - 1) // 2
        x = xp.full(count, comm.rank, "float32")
        xp.cuda.Device().synchronize()
        for turn in range(4):
            with streams[turn % 2]:
                comm.all_reduce(x)
        comm.synchronize()
        checks.true("sums in a row", bool((x == want * n**3).all()))
        parts = xp.full(count // n * n, 1, "int32")
        out = xp.zeros(count // n, "int32")
        comm.reduce_scatter(parts, out)
        comm.all_gather(out, parts)
        comm.synchronize()
        checks.true("scattered and gathered", bool((parts == n).all()))
        works = [comm.all_reduce(parts, op="max", async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        checks.true("later", bool((parts == n).all()))


def captured(comm, checks, _gpus) -> None:
    """A CUDA graph cannot hold such a call, and goes on without it."""
    xp = comm.xp
    with on(comm):
        x, stream = xp.ones(1000, "float32"), xp.cuda.Stream(non_blocking=True)
        xp.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            try:
                comm.all_reduce(x)
                said = "no error"
            except ringcoll.Error as error:
                said = f"{type(error).__name__}: {error}"
            x *= 2
            graph = stream.end_capture()
            graph.launch()
            comm.all_reduce(x)
        comm.synchronize()
        checks.true(said, said.startswith("LaunchRefused") and "graph" in said)
        checks.true("after it", bool(np.all(x.get() == 2 * comm.nranks)))


def late(comm, checks, _gpus) -> None:
    """A rank that never comes is named, the device stays usable, and the others go on."""
    child = comm.split(0)
    x = comm.xp.ones(3_000_000, "float32")
    said = "DeadlineError"
    if comm.rank != 1:
        try:
            child.all_reduce(x, timeout=1.0)
            child.synchronize()
            said = "no error"
        except ringcoll.Error as error:
            said = f"{type(error).__name__}: {error}"
    comm.barrier()
    comm.synchronize()
    child.abort("over")
    child.close()
    checks.true(said, said.startswith("DeadlineError"))
    x[:] = 1
    comm.all_reduce(x)
    comm.synchronize()
    checks.true("on it goes", bool((x == comm.nranks).all()))


def main() -> None:
    checks = Checks()
    for module, name, value in (
        (gpus, "Plain", DeviceBuffer),
        (gpus, "run", run),
        (gpus, "FAKE", False),
        # So that what is small enough to be checked closely has layers and slices.
        (measured, "LAYERS_BYTES", replace(measured.LAYERS_BYTES, value=30_000)),
        (layers, "_SHORT", 2048),
    ):
        setattr(module, name, value)
    parts = {
        **gpus.PARTS,
        **{part.__name__: part for part in (large, captured, late)},
    }
    with ringcoll.init(device="cuda", timeout=30) as comm:
        comm._settle()
        for name in sys.argv[1:-1]:
            parts[name](comm, checks, None)
        comm.barrier()
        comm.synchronize()
    say(comm.rank, count=checks.count, failures=checks.failures[:5])


if __name__ == "__main__":
    main()
