"""Time the hand-written LL all_reduce kernels of ``yardstick.cu``.

::

    python -m benchmarks.gpu.yardstick [--mode processes|process|together] [--ranks 2,4]
        [--out FILE]

``processes`` (what is reported): one process a GPU, memory shared by CUDA IPC. ``process``: all
GPUs in one process. ``together``: all ranks on one GPU, in one launch. ``auto`` is processes where
there are several GPUs, else together. Every kernel is checked to the bit on fresh random inputs
with poisoned outputs, eagerly and replayed, before and after it is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.gpu import device
from benchmarks.gpu.calls import (
    ARENA,
    DTYPES,
    HOST_WORDS,
    INPUT,
    OUTPUT,
    SIZES,
    Point,
    defines,
    failure,
    pack_call,
    parameters,
    points,
)
from benchmarks.gpu.device import runtime
from benchmarks.gpu.processes import Link, run_ranks
from benchmarks.gpu.report import Report, Row, attempt, median_us, print_table
from benchmarks.needs import require
from benchmarks.record import add_out

__all__ = ["main"]

CALLS = 50
REPLAYS = 20
WARM = 3
DEADLINE_NS = 15 * 10**9
TYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
KERNELS = tuple(f"{algorithm}_{dtype}" for algorithm in SIZES for dtype in DTYPES)


class Team:
    """The ranks that this process drives, and how a call of all of them is enqueued.

    Attributes:
        gpus: one for each launch; with ``together`` a single one for all ranks.
        ranks: the ranks of this process.
        nranks: all ranks.

    """

    def __init__(self, gpus: Sequence[Any], ranks: Sequence[int], nranks: int) -> None:
        self.gpus, self.ranks, self.nranks = list(gpus), list(ranks), nranks
        self.together = len(self.gpus) < len(self.ranks)
        names = [name + ("_together" if self.together else "") for name in KERNELS]
        self._functions = []
        self.own: dict[int, int] = {}
        self.hosts = {rank: device.HostRecord(HOST_WORDS) for rank in self.ranks}
        for gpu in self.gpus:
            cubin = device.build("yardstick.cu", gpu.architecture, defines(nranks))
            self._functions.append(gpu.load(cubin, names))
        for rank in self.ranks:
            self.gpu_of(rank).use()
            self.own[rank] = int(runtime.malloc(ARENA))
            runtime.memset(self.own[rank], 0, ARENA)
            runtime.deviceSynchronize()
        self.arenas: list[int] = []
        self._launches = 0

    def gpu_of(self, rank: int) -> Any:
        """The GPU of a rank of this process."""
        return self.gpus[0 if self.together else self.ranks.index(rank)]

    def function(self, point: Point, index: int = 0) -> int:
        """The kernel of a point on one of the GPUs."""
        return self._functions[index][point.kernel + ("_together" if self.together else "")]

    def most_blocks(self) -> int:
        """Blocks of a rank that are sure to be resident together, whatever the kernel."""
        shared = len(self.ranks) if self.together else 1
        functions = self._functions[0].values()
        return min(self.gpus[0].resident(name, 512 + 32) for name in functions) // shared

    def prepare(self, point: Point) -> list[Callable[[], None]]:
        """For each GPU a function that enqueues one call of its ranks."""
        self._launches += 1
        calls = [
            pack_call(
                point,
                rank,
                self.arenas,
                self.hosts[rank].address,
                deadline_ns=DEADLINE_NS,
                launch=self._launches,
            )
            for rank in self.ranks
        ]
        if self.together:
            unused = b"\0" * len(calls[0]) * (8 - len(calls))
            calls = [b"".join(calls) + unused]
        enqueue = []
        for index, (gpu, call) in enumerate(zip(self.gpus, calls, strict=True)):
            enqueue.append(self._launcher(gpu, self.function(point, index), point, call))
        return enqueue

    def _launcher(self, gpu: Any, function: int, point: Point, call: bytes) -> Callable[[], None]:
        address, keep = parameters(call)
        grid = (point.blocks, len(self.ranks) if self.together else 1)

        def launch(keep: object = keep) -> None:
            gpu.use()
            gpu.launch(function, grid, point.threads, address)

        return launch

    def synchronize(self) -> None:
        """Wait for all GPUs of this process.

        Raises:
            RuntimeError: a kernel gave up; says who waited for whom.

        """
        for gpu in self.gpus:
            gpu.use()
            gpu.stream.synchronize()
        for record in self.hosts.values():
            reason = failure(record.read())
            if reason:
                raise RuntimeError(reason)


def inputs(point: Point, nranks: int, seed: int) -> list[np.ndarray]:
    """What every rank contributes; every rank can draw all of them."""
    dtype = TYPES[point.dtype]
    count = point.nbytes // dtype.itemsize
    drawn = [np.random.default_rng((seed, r)).standard_normal(count, "f4") for r in range(nranks)]
    return [values.astype(dtype) for values in drawn]


def expected(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The sum in the order of the ranks, in float32, rounded once."""
    total = arrays[0].astype(np.float32)
    for array in arrays[1:]:
        total = total + array.astype(np.float32)
    return total.astype(arrays[0].dtype)


def checked(team: Team, point: Point, wanted: np.ndarray, enqueue: Callable[[], None]) -> int:
    """Poison the outputs, run, and count the elements that are not right to the bit."""
    for rank in team.ranks:
        team.gpu_of(rank).use()
        runtime.memset(team.own[rank] + OUTPUT, 0xFF, point.nbytes)
        runtime.deviceSynchronize()
    enqueue()
    team.synchronize()
    bits = np.dtype(f"u{wanted.dtype.itemsize}")
    wrong = 0
    for rank in team.ranks:
        team.gpu_of(rank).use()
        got = device.download(team.own[rank] + OUTPUT, point.nbytes)
        wrong += int(np.count_nonzero(got.view(bits) != wanted.view(bits)))
    return wrong


def measure(team: Team, point: Point, seed: int, barrier: Callable[[], None]) -> Row:
    """Check and time one point: what this process knows of it."""
    arrays = inputs(point, team.nranks, seed)
    wanted = expected(arrays)
    for rank in team.ranks:
        team.gpu_of(rank).use()
        device.upload(team.own[rank] + INPUT, arrays[rank])
    calls = team.prepare(point)

    def once() -> None:
        for call in calls:
            call()

    def thrice() -> None:
        for _ in range(3):
            once()

    wrong = checked(team, point, wanted, thrice)
    graphs = []
    for gpu, call in zip(team.gpus, calls, strict=True):
        graphs.append(gpu.capture(lambda call=call: [call() for _ in range(CALLS)]))

    def replay() -> None:
        for gpu, graph in zip(team.gpus, graphs, strict=True):
            gpu.use()
            graph.launch(gpu.stream)

    wrong += checked(team, point, wanted, replay)
    times: list[list[float]] = [[] for _ in team.gpus]
    for number in range(WARM + REPLAYS):
        barrier()
        for gpu, call, graph in zip(team.gpus, calls, graphs, strict=True):
            # The gate lets the host finish enqueueing, then the call lines the GPUs up.
            gpu.hold()
            call()
            gpu.start()
            graph.launch(gpu.stream)
            gpu.stop()
        for own, gpu in zip(times, team.gpus, strict=True):
            seconds = gpu.elapsed()
            if number >= WARM:
                own.append(seconds)
    team.synchronize()
    wrong += checked(team, point, wanted, once)
    return {"point": dataclasses.asdict(point), "times": times, "wrong": wrong}


def row(nranks: int, mode: str, parts: Sequence[Row]) -> Row:
    """The row of a point from what every process knows of it."""
    point = Point(**parts[0]["point"])
    times = [replays for part in parts for replays in part["times"]]
    return {
        "name": f"yardstick {point.algorithm}" + ("" if mode == "processes" else f" ({mode})"),
        "collective": "all_reduce",
        "dtype": point.dtype,
        "bytes": point.nbytes,
        "ranks": nranks,
        "mode": mode,
        "blocks": point.blocks,
        "workers": point.workers,
        **median_us(times, CALLS),
        "wrong": sum(part["wrong"] for part in parts),
    }


def rank_work(link: Link, seed: int) -> None:
    """What each process runs when every GPU has its own."""
    gpu = device.Gpu(link.rank)
    team = Team([gpu], [link.rank], link.nranks)
    handles = link.exchange(runtime.ipcGetMemHandle(team.own[link.rank]).hex())
    team.arenas = [
        team.own[rank] if rank == link.rank else runtime.ipcOpenMemHandle(bytes.fromhex(text))
        for rank, text in enumerate(handles)
    ]
    link.barrier()
    for number, point in enumerate(points(link.nranks, most_blocks=team.most_blocks())):
        link.send(measure(team, point, seed + number, link.barrier))
    # Nobody unmaps memory that another still writes.
    link.barrier()


def in_processes(report: Report, nranks: int, seed: int, seconds: float) -> None:
    """Time all points with one process a GPU."""

    def keep(messages: list[Row]) -> None:
        report.add(row(nranks, "processes", messages))

    report.fail(f"{nranks} ranks", run_ranks(rank_work, nranks, (seed,), seconds, keep))


def in_this_process(report: Report, nranks: int, seed: int, *, together: bool) -> None:
    """Time all points with all ranks here: on one GPU, or one GPU each."""
    gpus = [device.Gpu(index) for index in range(1 if together else nranks)]
    device.enable_peers(gpus)
    team = Team(gpus, range(nranks), nranks)
    team.arenas = [team.own[rank] for rank in range(nranks)]
    mode = "together" if together else "process"
    for number, point in enumerate(points(nranks, most_blocks=team.most_blocks())):
        part = measure(team, point, seed + number, lambda: None)
        report.add(row(nranks, mode, [part]))


def time_ranks(
    report: Report, nranks: int, mode: str, gpus: int, seed: int, seconds: float
) -> None:
    """Time all points with one number of ranks."""
    if mode != "together" and nranks > gpus:
        raise ValueError(f"{nranks} ranks need as many GPUs, and there are {gpus}")
    if mode == "processes":
        in_processes(report, nranks, seed, seconds)
    else:
        in_this_process(report, nranks, seed, together=mode == "together")


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="Time the hand-written LL all_reduce kernels.")
    parser.add_argument(
        "--mode", choices=("auto", "processes", "process", "together"), default="auto"
    )
    parser.add_argument("--ranks", default="", help="as in 2,4,8; default: all GPUs, or 2,4,8")
    parser.add_argument("--seconds", type=float, default=120, help="for each number of ranks")
    add_out(parser, file=True)
    options = parser.parse_args(argv)

    gpus = require(parser)
    mode = options.mode
    if mode == "auto":
        mode = "processes" if gpus > 1 else "together"
    default = "2,4,8" if mode == "together" else str(gpus)
    ranks = [int(word) for word in (options.ranks or default).split(",")]
    report = Report(options.out, "yardstick")
    seed = int.from_bytes(os.urandom(4), "little")
    report.note("seed", seed)
    for nranks in ranks:
        work = functools.partial(time_ranks, report, nranks, mode, gpus, seed, options.seconds)
        attempt(report, f"{nranks} ranks", work)
    print_table(report.rows)
    return 1 if report.errors or any(row["wrong"] for row in report.rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
