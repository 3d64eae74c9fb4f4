"""What ``deterministic=True`` costs: all_reduce with it and without, in turns.

::

    python -m benchmarks.gpu.deterministic [--ranks N] [--seconds S] [--commit HASH] [--out FILE]

One process a GPU, in place, ``comm.empty`` arrays. Latency is a CUDA graph's, as in ``bars``: a
barrier and a gate let all begin at once, the slowest rank counts, and the median of the replays.
Both ways are timed twice, in turns; the table shows the faster time of each. Inputs are small whole
numbers, whose sums are exact in any order: every element is compared before it is timed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.library import as_bits, bits_of, pattern
from benchmarks.gpu.processes import Link, run_ranks
from benchmarks.gpu.report import Report, print_table
from benchmarks.gpu.timer import Line, Timer, calls_of
from benchmarks.needs import require
from benchmarks.record import add_out

__all__ = ["main"]

SIZES = (*(256 << 2 * step for step in range(11)), 512 << 20)
"""Bytes of the array: 256 to 256 MiB by fours, and 512 MiB."""
DTYPES = {"bfloat16": 2, "float32": 4}
WAYS: dict[str, dict[str, Any]] = {"default": {}, "deterministic": {"deterministic": True}}
TURNS = 2


class Among:
    """A bootstrap of ranks that talk through their parent."""

    def __init__(self, link: Link) -> None:
        self.rank, self.nranks, self._link = link.rank, link.nranks, link

    def allgather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order."""
        return [bytes.fromhex(said) for said in self._link.exchange(payload.hex())]


def fill(x: Any, rank: int, seed: int) -> None:
    """This rank's contribution."""
    numbers = pattern(rank, x.size, seed)
    if x.itemsize == 2:
        bits_of(x)[:] = as_bits(numbers)
    else:
        x[:] = numbers


def unequal(x: Any, nranks: int, seed: int) -> int:
    """Elements that are not the sum."""
    import cupy

    total = pattern(0, x.size, seed)
    for rank in range(1, nranks):
        total += pattern(rank, x.size, seed)
    if x.itemsize == 4:
        return int(cupy.count_nonzero(x != total))
    got, right = bits_of(x), as_bits(total)
    return int(cupy.count_nonzero((got != right) & ~((got | right) == 0x8000)))  # two zeros are one


def work(link: Link, line: str) -> None:
    """What one rank measures; a message a row."""
    import cupy

    import ringcoll

    rank, nranks = link.rank, link.nranks
    cupy.cuda.Device(rank).use()
    among = Among(link)
    comm = ringcoll.init(among, device="cuda", timeout=30.0)
    timer = Timer(among, Line(line, rank, nranks))
    timer.align = lambda stream: comm.barrier(stream=stream.ptr)
    stream = cupy.cuda.Stream(non_blocking=True)
    for dtype, itemsize in DTYPES.items():
        for nbytes in SIZES:
            x: Any = comm.empty(nbytes // itemsize, dtype)
            graphs, rows, calls = {}, {}, calls_of(nbytes)
            for seed, (way, options) in enumerate(WAYS.items()):
                with stream:
                    fill(x, rank, seed)
                    comm.all_reduce(x, **options)
                    wrong = unequal(x, nranks, seed)
                    x.data.memset_async(0, x.nbytes, stream)  # zero, however often it is summed
                    stream.begin_capture()
                    for _ in range(calls):
                        comm.all_reduce(x, **options)
                    graphs[way] = stream.end_capture()
                comm.synchronize()
                rows[way] = {"way": way, "dtype": dtype, "bytes": nbytes, "wrong": wrong}
            for _ in range(TURNS):
                for way, graph in graphs.items():
                    with stream:
                        us = timer.median(lambda g=graph: g.launch(stream), calls, stream)  # type: ignore[misc]
                    link.send({**rows[way], "us": round(us, 2)})
            comm.synchronize()
            del graphs, x
    comm.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit status is 1 if a part failed or an element is wrong."""
    parser = argparse.ArgumentParser(description="The cost of deterministic=True on GPUs.")
    parser.add_argument("--ranks", type=int, default=0, help="0: all GPUs")
    parser.add_argument("--seconds", type=float, default=300.0, help="after which it is ended")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git")
    add_out(parser, file=True)
    options = parser.parse_args(argv)
    there = require(parser, gpus=options.ranks or 1)
    ranks = options.ranks or there
    report = Report(options.out, "deterministic")
    if options.commit:
        report.note("commit", options.commit)

    def keep(messages: list[dict[str, Any]]) -> None:
        first = messages[0]
        report.add(
            {
                "name": first["way"],
                "collective": "all_reduce",
                "dtype": first["dtype"],
                "bytes": first["bytes"],
                "ranks": ranks,
                "in_place": True,
                "us": first["us"],
                "wrong": sum(message["wrong"] for message in messages),
            }
        )

    with tempfile.NamedTemporaryFile(prefix="ringcoll-line-", dir="/dev/shm") as line:
        line.truncate(4096)
        report.fail("ranks", run_ranks(work, ranks, (line.name,), options.seconds, keep))
    print_table(report.rows)
    return 1 if report.errors or any(row["wrong"] for row in report.rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
