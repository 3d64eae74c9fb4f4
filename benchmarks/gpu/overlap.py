"""A GEMM on one stream beside an all_reduce on another: what each costs the other.

::

    python -m benchmarks.gpu.overlap [--ranks N] [--bytes 256M] [--edge 8192] [--seconds 45]
        [--commit HASH] [--out FOLDER]

One process a GPU. torch multiplies square matrices of bfloat16 on one stream; on the other an
all_reduce runs again and again: ringcoll's with several options, on symmetric and on plain memory,
and NCCL's. Every repetition times for each way in turn the GEMMs alone, the all_reduces alone, and
both at once. Both batches take about as long; of both at once only the calls count that ended while
the other stream was busy. The slowest rank counts, and the median of the repetitions. A slowdown is
the time beside the other divided by the time alone.

Before and after the repetitions an all_reduce runs beside a GEMM, and every element of both is
compared. Outputs hold poison before; in place, each rank's contribution.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.gpu.deterministic import fill, unequal
from benchmarks.gpu.processes import Link, run_ranks
from benchmarks.gpu.report import Report, size_text
from benchmarks.gpu.timer import Line, Timer
from benchmarks.needs import require
from benchmarks.record import add_out
from ringcoll.errors import LaunchRefused
from ringcoll.units import parse_bytes

__all__ = ["WAYS", "Way", "beside", "main", "row_of", "table"]

GEMMS = 6
HOLD_NS = 5_000_000
"""Longer than the host takes to enqueue a batch."""
SETTLE = 3.0
"""Seconds in which kernels are compiled and plain memory is registered before anything counts."""
GRACE = 12.0
"""Seconds beyond the budget before ranks that hang are killed."""
Calls = Mapping[str, tuple[Callable[[], object], int]]


@dataclass(frozen=True, slots=True)
class Way:
    """An all_reduce that runs beside the GEMM.

    Attributes:
        lib: "ringcoll" or "nccl".
        memory: "symmetric" or "plain".
        in_place: the output is the input.
        options: of ringcoll's call.

    """

    lib: str
    memory: str
    in_place: bool
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the table calls it."""
        options = (f"{key}={value}" for key, value in self.options.items())
        place = "in place" if self.in_place else "out of place"
        return ", ".join((self.lib, *options, self.memory, place))


def ways() -> Iterator[Way]:
    """Everything that is timed."""
    for options in ({}, {"max_sms": 16}, {"engine": "copy"}):
        for memory in ("symmetric", "plain"):
            for in_place in (True, False):
                yield Way("ringcoll", memory, in_place, options)
    yield Way("nccl", "plain", True)


WAYS = tuple(ways())


def beside(own: Sequence[float], other: Sequence[float]) -> float:
    """The time of a call while another stream is busy.

    Args:
        own: when each call of the batch ended, since the batch began.
        other: the same of the batch on the other stream.

    """
    within = [end for end in own if end <= other[-1]] or own[:1]
    return within[-1] / len(within)


class Sides:
    """The two streams of one rank, and the memory of all ways."""

    def __init__(self, link: Link, line: str, store: str, edge: int, nbytes: int) -> None:
        import cupy
        import torch
        import torch.distributed as dist

        import ringcoll

        rank, nranks = link.rank, link.nranks
        cupy.cuda.Device(rank).use()
        torch.cuda.set_device(rank)
        self.torch, self.dist, self.link = torch, dist, link
        file = dist.FileStore(store, nranks)
        dist.init_process_group("nccl", store=file, rank=rank, world_size=nranks)
        self.comm: Any = ringcoll.init(link, device="cuda", timeout=20.0)
        self.timer = Timer(link, Line(line, rank, nranks))
        self.timer.align = lambda stream: self.comm.barrier(stream=stream.ptr)
        self.cupy_streams = {
            name: cupy.cuda.Stream(non_blocking=True) for name in ("all_reduce", "gemm")
        }
        self.streams = {
            name: torch.cuda.ExternalStream(stream.ptr)
            for name, stream in self.cupy_streams.items()
        }
        shape = {"dtype": torch.bfloat16, "device": "cuda"}
        self.a, self.b = (torch.randn(edge, edge, **shape) for _ in range(2))
        self.c = torch.empty(edge, edge, **shape)
        count = nbytes // 2
        self.given = torch.empty(count, **shape)
        fill(self.bits(self.given), rank, 0)
        self.memory = {
            "symmetric": [self.comm.empty(count, "bfloat16", like="torch") for _ in range(2)],
            "plain": [torch.empty(count, **shape) for _ in range(2)],
        }
        torch.cuda.synchronize()
        self.run({"gemm": (self.gemm, 1)})
        self.right = self.c.clone()

    def bits(self, tensor: Any) -> Any:
        """The memory of a tensor as CuPy's 16-bit words."""
        import cupy

        return cupy.asarray(tensor.view(self.torch.int16)).view(cupy.uint16)

    def gemm(self) -> None:
        """Enqueue a GEMM on torch's current stream."""
        self.torch.matmul(self.a, self.b, out=self.c)

    def all_reduce(self, way: Way) -> None:
        """Enqueue an all_reduce on torch's current stream."""
        x, y = self.memory[way.memory]
        if way.lib == "nccl":
            self.dist.all_reduce(x)
        else:
            self.comm.all_reduce(x, None if way.in_place else y, **way.options)

    def run(self, batches: Calls) -> dict[str, list[float]]:
        """Microseconds from the common begin of the batches to the end of each call."""
        torch = self.torch
        self.timer.set_out(self.cupy_streams["all_reduce"], HOLD_NS)
        begin = torch.cuda.Event(enable_timing=True)
        begin.record(self.streams["all_reduce"])
        ends: dict[str, list[Any]] = {}
        for name, (call, calls) in batches.items():
            with torch.cuda.stream(self.streams[name]):
                self.streams[name].wait_event(begin)
                for _ in range(calls):
                    call()
                    ends.setdefault(name, []).append(torch.cuda.Event(enable_timing=True))
                    ends[name][-1].record()
        torch.cuda.synchronize()
        return {name: [begin.elapsed_time(e) * 1e3 for e in of] for name, of in ends.items()}

    def wrong(self, way: Way) -> int:
        """Wrong elements of an all_reduce and of the GEMM beside it, on this rank."""
        torch = self.torch
        seed = int(self.link.exchange(os.urandom(2).hex())[0], 16)
        x, y = self.memory[way.memory]
        fill(self.bits(self.given), self.comm.rank, seed)
        self.bits(y)[:] = 0xA5A5
        torch.cuda.synchronize()
        x.copy_(self.given)
        self.c.fill_(float("nan"))
        torch.cuda.synchronize()
        self.run({"all_reduce": (partial(self.all_reduce, way), 1), "gemm": (self.gemm, 1)})
        near = torch.isclose(self.c, self.right, rtol=2**-6, atol=1.0)
        sums = unequal(self.bits(x if way.in_place else y), self.comm.nranks, seed)
        return sums + int((~near).sum())

    def sample(self, way: Way, gemms: int, calls: int) -> dict[str, float]:
        """One repetition of a way, in microseconds."""
        both: Calls = {"all_reduce": (partial(self.all_reduce, way), calls)}
        both = {**both, "gemm": (self.gemm, gemms)}
        found = []
        for names in (("gemm",), ("all_reduce",), tuple(both)):
            self.memory[way.memory][0].copy_(self.given)  # else sums in place would overflow
            self.torch.cuda.synchronize()
            found.append(self.run({name: both[name] for name in names}))
        alone, other, together = found
        ends = together["all_reduce"], together["gemm"]
        return {
            "us": other["all_reduce"][-1] / calls,
            "gemm_us": alone["gemm"][-1] / gemms,
            "beside_us": beside(*ends),
            "gemm_beside_us": beside(*reversed(ends)),
            "both_us": max(of[-1] for of in ends),
        }


def refused_or_wrong(sides: Sides, way: Way) -> int | str:
    """Wrong elements, or why all ranks alike refuse the way."""
    try:
        return sides.wrong(way)
    except LaunchRefused as error:
        return str(error)


def work(link: Link, line: str, store: str, edge: int, nbytes: int, until: float) -> None:
    """What one rank measures; a message a way at the end."""
    sides = Sides(link, line, store, edge, nbytes)

    def agreed(value: Any) -> Any:
        return json.loads(link.exchange(json.dumps(value))[0])

    checked = {number: refused_or_wrong(sides, way) for number, way in enumerate(WAYS)}
    for number, reason in checked.items():
        if isinstance(reason, str):
            link.send({"way": number, "refused": reason})
    wrong = {number: count for number, count in checked.items() if isinstance(count, int)}
    settled = time.monotonic() + SETTLE
    found: dict[int, dict[str, float]] = {}
    while agreed(time.monotonic() < settled):
        found = {number: sides.sample(WAYS[number], 1, 2) for number in wrong}
    calls = {
        number: max(2, agreed(round(GEMMS * of["gemm_us"] / of["us"])))
        for number, of in found.items()
    }
    samples: dict[int, list[dict[str, float]]] = {number: [] for number in wrong}
    goes_on = True
    while goes_on:
        for number, taken in samples.items():
            taken.append(sides.sample(WAYS[number], GEMMS, calls[number]))
        goes_on = agreed(time.monotonic() < until)
    for number, taken in samples.items():
        again = sides.wrong(WAYS[number])
        link.send(
            {
                "way": number,
                "calls": calls[number],
                "wrong": wrong[number] + again,
                "samples": taken,
            }
        )
    sides.comm.close()
    sides.dist.destroy_process_group()


def row_of(messages: Sequence[Mapping[str, Any]], edge: int, nbytes: int) -> dict[str, Any]:
    """A row of the record.

    Args:
        messages: of all ranks, of one way.
        edge: of the GEMM's matrices.
        nbytes: of the all_reduce.

    """
    first = messages[0]
    way = WAYS[first["way"]]
    repetitions = list(zip(*(message["samples"] for message in messages), strict=True))
    slowest = {
        key: statistics.median(max(sample[key] for sample in of) for of in repetitions)
        for key in repetitions[0][0]
    }
    return {
        "name": way.name,
        "lib": way.lib,
        "memory": way.memory,
        "in_place": way.in_place,
        "options": dict(way.options),
        "collective": "all_reduce",
        "dtype": "bfloat16",
        "bytes": nbytes,
        "ranks": len(messages),
        "edge": edge,
        "calls": first["calls"],
        "gemms": GEMMS,
        "repetitions": len(repetitions),
        **{key: round(us, 1) for key, us in slowest.items()},
        "slowdown": round(slowest["beside_us"] / slowest["us"], 3),
        "gemm_slowdown": round(slowest["gemm_beside_us"] / slowest["gemm_us"], 3),
        "wrong": sum(message["wrong"] for message in messages),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line a way: microseconds alone and beside the other, and both slowdowns."""
    if not rows:
        return "nothing was timed"
    edge, size = rows[0]["edge"], size_text(rows[0]["bytes"])
    heads = ("all_reduce", "beside", "slowdown", "GEMM", "beside", "slowdown")
    lines = [f"GEMM {edge}^3 beside all_reduce of {size}, us a call; bfloat16"]
    lines.append(f"{'':<46}" + "".join(f"{head:>11}" for head in heads))
    for row in rows:
        line = f"{row['name']:<46}"
        for prefix in ("", "gemm_"):
            line += f"{row[f'{prefix}us']:>11.0f}{row[f'{prefix}beside_us']:>11.0f}"
            line += f"{row[f'{prefix}slowdown']:>11.2f}"
        lines.append(line + f"  WRONG: {row['wrong']}" * bool(row["wrong"]))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit status is 1 if a part failed or an element is wrong."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description="A GEMM beside an all_reduce, on GPUs.")
    parser.add_argument("--ranks", type=int, default=0, help="0: all GPUs")
    parser.add_argument("--bytes", type=parse_bytes, default=256 << 20, help="default: 256M")
    parser.add_argument("--edge", type=int, default=8192, help="of the matrices (%(default)s)")
    parser.add_argument("--seconds", type=float, default=45.0, help="begin nothing after them")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git")
    add_out(parser)
    options = parser.parse_args(argv)
    there = require(parser, gpus=options.ranks or 1, torch=True)
    ranks = options.ranks or there
    path = options.out and options.out / f"gpu_overlap_{ranks}.json"
    report = Report(path, "overlap")
    if options.commit:
        report.note("commit", options.commit)

    def keep(messages: list[dict[str, Any]]) -> None:
        if "refused" in messages[0]:
            report.fail(WAYS[messages[0]["way"]].name, messages[0]["refused"])
        else:
            report.add(row_of(messages, options.edge, options.bytes))

    with (
        tempfile.NamedTemporaryFile(prefix="ringcoll-line-", dir="/dev/shm") as line,
        tempfile.TemporaryDirectory() as folder,
    ):
        line.truncate(4096)
        until = begun + options.seconds
        args = (line.name, f"{folder}/store", options.edge, options.bytes, until)
        failed = run_ranks(work, ranks, args, options.seconds + GRACE, keep)
        report.fail("ranks", failed)
    if path is not None:
        print(path)
    print(table(report.rows))
    return 1 if report.errors or any(row["wrong"] for row in report.rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
