"""What the machine itself can do: the links between GPUs, a launch, a node of a graph.

::

    python -m benchmarks.gpu.links [--commit HASH] [--out FILE]

All GPUs copy to their neighbour at once, in a ring: by copy engine, and by a kernel that stores 16
bytes a thread. With one GPU the neighbour is itself, and the figures are its own memory's. Beside
them stands what ``ringcoll topo`` takes the machine for, from tables and with ``--measure``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.gpu import device
from benchmarks.gpu.calls import parameters
from benchmarks.gpu.device import runtime
from benchmarks.gpu.report import Report, Row, attempt
from benchmarks.needs import require
from benchmarks.record import add_out

__all__ = ["main"]

NBYTES = 256 << 20
COPIES = 8
REPEATS = 5
BLOCKS = (32, 64, 132)
THREADS = 512
HOLD_NS = 3_000_000
"""One thread serves all GPUs here, so the gate is longer than where each has a process."""

LAUNCHES = 200


def pattern(rank: int, words: np.ndarray) -> np.ndarray:
    """What a rank sends: random, and its own."""
    return words ^ np.uint64(0x9E3779B97F4A7C15 * (rank + 1) % (1 << 64))


def ring(
    gpus: Sequence[device.Gpu],
    sources: Sequence[int],
    targets: Sequence[int],
    enqueue: Callable[[int], None],
) -> Row:
    """Run ``enqueue(rank)`` for all ranks at once and time the slowest.

    Returns:
        Bytes a second of the slowest GPU, the median over repeats and all of them; how many of the
        neighbours hold something else than what was sent.

    """
    nranks = len(gpus)
    for gpu, target in zip(gpus, targets, strict=True):
        gpu.use()
        runtime.memset(target, 0xFF, NBYTES)
        runtime.deviceSynchronize()
    rates = []
    for _ in range(1 + REPEATS):
        for rank, gpu in enumerate(gpus):
            gpu.use()
            gpu.hold(HOLD_NS)
            gpu.start()
            for _ in range(COPIES):
                enqueue(rank)
            gpu.stop()
        slowest = max([gpu.elapsed() for gpu in gpus])
        rates.append(NBYTES * COPIES / slowest)
    wrong = 0
    for rank, gpu in enumerate(gpus):
        gpu.use()
        got = device.download(targets[rank], NBYTES)
        gpus[(rank - 1) % nranks].use()
        wrong += not np.array_equal(got, device.download(sources[(rank - 1) % nranks], NBYTES))
    return {"bytes_per_s": statistics.median(rates[1:]), "all": rates[1:], "wrong": wrong}


def bandwidths(report: Report, gpus: Sequence[device.Gpu]) -> None:
    """The rows of copy engine and kernel."""
    nranks = len(gpus)
    words = np.random.default_rng().integers(0, 1 << 64, NBYTES // 8, np.uint64)
    sources, targets = [], []
    for rank, gpu in enumerate(gpus):
        gpu.use()
        sources.append(int(runtime.malloc(NBYTES)))
        targets.append(int(runtime.malloc(NBYTES)))
        device.upload(sources[-1], pattern(rank, words))
        runtime.deviceSynchronize()

    def copy(rank: int) -> None:
        to = (rank + 1) % nranks
        runtime.memcpyPeerAsync(
            targets[to],
            gpus[to].index,
            sources[rank],
            gpus[rank].index,
            NBYTES,
            gpus[rank].stream.ptr,
        )

    head = {"ranks": nranks, "bytes": NBYTES}
    report.add({"name": "copy engine", **head, **ring(gpus, sources, targets, copy)})
    for blocks in BLOCKS:

        def push(rank: int, blocks: int = blocks) -> None:
            to = targets[(rank + 1) % nranks]
            values = (to, sources[rank], NBYTES // 16)
            address, _keep = parameters(*(value.to_bytes(8, "little") for value in values))
            gpus[rank].launch(gpus[rank].tools["push"], (blocks, 1), THREADS, address)

        figures = ring(gpus, sources, targets, push)
        report.add({"name": f"push, {blocks} blocks", **head, "blocks": blocks, **figures})


def launches(gpu: device.Gpu) -> dict[str, Any]:
    """Seconds of host time of a launch, and of device time of a graph's node."""
    address, _keep = parameters(bytes(120))
    gpu.use()

    def enqueue() -> None:
        for _ in range(LAUNCHES):
            gpu.launch(gpu.tools["nothing"], (1, 1), 32, address)

    host = []
    for _ in range(20):
        gpu.stream.synchronize()
        begun = time.perf_counter()
        enqueue()
        host.append((time.perf_counter() - begun) / LAUNCHES)
    graph = gpu.capture(enqueue)
    nodes = []
    for _ in range(20):
        gpu.hold()
        gpu.start()
        graph.launch(gpu.stream)
        gpu.stop()
        nodes.append(gpu.elapsed() / LAUNCHES)
    return {
        "launch_s": statistics.median(host),
        "launch_s_min": min(host),
        "graph_node_s": statistics.median(nodes),
    }


def topology(report: Report) -> None:
    """What the library takes the rings for."""
    for key, words in (("detected", ()), ("measured", ("--measure",))):
        argv = (sys.executable, "-m", "ringcoll", "topo", *words, "--json", "-")
        found = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
        report.note(key, json.loads(found.stdout))


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="Time the links between GPUs, and launching.")
    parser.add_argument("--commit", help="what is measured, where there is no git")
    add_out(parser, file=True)
    options = parser.parse_args(argv)
    there = require(parser)

    report = Report(options.out, "links")
    if options.commit:
        report.note("commit", options.commit)
    gpus = [device.Gpu(index) for index in range(there)]
    parts: dict[str, Callable[[], None]] = {
        "peer access": lambda: device.enable_peers(gpus),
        "launches": lambda: report.note("launches", launches(gpus[0])),
        "bandwidths": lambda: bandwidths(report, gpus),
        "topology": lambda: topology(report),
    }
    for name, part in parts.items():
        attempt(report, name, part)
    for row in report.rows:
        wrong = "  WRONG" if row["wrong"] else ""
        print(f"{row['name']:<20} {row['bytes_per_s'] / 1e9:8.1f} GB/s{wrong}")
    for key in ("detected", "measured"):
        if key in report.extra:
            print(f"{f'topo, {key}':<20} {report.extra[key]['total_bandwidth']:8.1f} GB/s")
    for name, seconds in report.extra.get("launches", {}).items():
        print(f"{name:<20} {seconds * 1e6:8.2f} us")
    return 1 if report.errors or any(row["wrong"] for row in report.rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
