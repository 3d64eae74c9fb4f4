"""The bars of GPU ranks: ringcoll beside NCCL, torch's symmetric memory and kernels by hand.

::

    python -m benchmarks.gpu.bars [--ranks N] [--seconds S] [--dtype float32] [--first 1]
        [--with OPTIONS]... [--out FOLDER]

One process a GPU. ringcoll comes twice: with symmetric memory, and with plain tensors of torch,
which earlier calls have used; and again with each ``--with``, such as ``engine=copy,slices=4``,
unless that is refused. Latency is that of a CUDA graph of 50 calls (fewer of large messages): the
ranks meet, a barrier and a gate on the stream let all begin at once, and the slowest rank counts;
the median of the replays. bfloat16, or what ``--dtype`` says, sums of small whole numbers, which
are exact: every element is compared before anything is timed. With ``--first`` arrays miss an
aligned address.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu.library import WORDS, Ringcoll
from benchmarks.gpu.timer import Line, Rendezvous, Timer
from benchmarks.gpu.torch_peers import Torch
from benchmarks.needs import require
from benchmarks.record import add_out, now
from ringcoll.errors import ArgumentError, LaunchRefused
from ringcoll.units import parse_bytes, parse_ints, parse_sizes

__all__ = ["main", "statuses_of"]

KIB, MIB = 1 << 10, 1 << 20
ALL_REDUCE = (256, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 8 * MIB, 64 * MIB, 512 * MIB)
OTHERS = (4 * KIB, 64 * KIB, MIB)
COLLECTIVES = ("all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all")

WINDOWS = ("all_gather", "reduce_scatter")
"""What else NCCL has kernels for that use symmetric windows."""

BEYOND, GRACE = 120.0, 5.0
"""Seconds that ranks may take besides measuring, and to end after one has failed."""


def wanted_calls(collectives: str, sizes: str) -> Iterator[tuple[str, int]]:
    """What is called with how many bytes: all that is named, or what the bars name.

    Args:
        collectives: names, separated by commas; "": all.
        sizes: as for :func:`sweep`; "": those of the bars.

    """
    names = collectives.split(",") if collectives else ["all_reduce", *COLLECTIVES]
    for name in names:
        usual = ALL_REDUCE if name == "all_reduce" else OTHERS
        for nbytes in sweep(sizes) if sizes else usual:
            yield name, nbytes


def sweep(text: str) -> tuple[int, ...]:
    """Sizes: ``4K,1M``, or ``256:512M:4``, from the first to the last, each 4 times the one before.

    Raises:
        ArgumentError: not such sizes.

    """
    first, colon, rest = text.partition(":")
    if not colon:
        return parse_sizes(text)
    last, _, factor = rest.partition(":")
    size, end, times = parse_bytes(first), parse_bytes(last), parse_ints(factor or "4", least=2)[0]
    if not 0 < size <= end:
        raise ArgumentError(f"sizes {text!r}: the first must be above 0 and not above the last")
    found = []
    while size < end:
        found.append(size)
        size *= times
    return (*found, end)


def alternatives() -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Other ways to run some calls, by which the thresholds of the library are set."""
    direct = {
        "all_reduce": ("one_shot_push", "all_pairs"),
        "broadcast": ("all_pairs", "scatter_gather"),
        "reduce": ("all_pairs", "scatter_gather_push"),
    }
    for name in ("all_reduce", *COLLECTIVES):
        for shift in range(14, 24):
            nbytes = 1 << shift
            for algorithm in direct.get(name, ("all_pairs",)):
                for protocol in ("LL", "LL128"):
                    yield name, nbytes, {"protocol": protocol, "algorithm": algorithm}
            if nbytes >= 512 * KIB:
                yield name, nbytes, {"protocol": "Simple"}
    for nbytes in (64 * MIB, 512 * MIB):
        for slices in (1, 2, 4, 8):
            yield "all_reduce", nbytes, {"algorithm": "two_shot", "slices": slices}
        for algorithm in ("two_shot_fused", "ring", "all_pairs"):
            yield "all_reduce", nbytes, {"algorithm": algorithm}


def options_of(text: str) -> dict[str, Any]:
    """Options of a call as the command line has them: ``engine=copy,slices=4``."""
    pairs = (part.partition("=")[::2] for part in text.split(",") if part)
    return {key: int(value) if value.isdigit() else value for key, value in pairs}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What one rank measures, all in turns with the others."""
    import cupy

    from benchmarks.gpu.beside import Yardstick

    rank, nranks = args.rank, args.ranks
    cupy.cuda.Device(rank).use()
    rendezvous = Rendezvous(rank, nranks, args.port)
    timer = Timer(rendezvous, Line(args.line, rank, nranks), eagerly=args.eager)
    until = time.monotonic() + args.seconds
    ours = Ringcoll(rendezvous, timer, args.dtype, args.first)
    rows: list[dict[str, Any]] = []
    peers = Torch(rendezvous, timer, args.dtype, args.first)
    by_hand = Yardstick(rendezvous, timer)
    windows = peers.symmetric_windows()

    def goes_on() -> bool:
        return (
            json.loads(rendezvous.allgather(json.dumps(time.monotonic() < until).encode())[0])
            is True
        )

    def add(found: Sequence[dict[str, Any]]) -> None:
        rows.extend(found)
        if rank == 0:
            for row in found:
                print(json.dumps(row), flush=True)

    def try_ours(name: str, nbytes: int, **how: Any) -> None:
        try:
            add(list(ours.rows(name, nbytes, **how)))
        except (LaunchRefused, ArgumentError) as error:  # on all ranks alike
            if rank == 0:
                print(f"{name} of {nbytes} bytes is refused: {error}", flush=True)

    for name, nbytes, options in alternatives() if args.alternatives else ():
        if goes_on():
            try_ours(name, nbytes, **options)
    for name, nbytes in wanted_calls(args.collectives, args.sizes):
        if not goes_on():
            break
        for plain in (False, True):
            add(list(ours.rows(name, nbytes, plain=plain)))
            for text in args.more:
                try_ours(name, nbytes, plain=plain, **options_of(text))
        others = name == "all_reduce" and args.first == 0
        yardstick = by_hand.row(nbytes, args.dtype) if others else None
        if yardstick is not None:
            add([yardstick])
        add([peers.nccl(name, nbytes)])
        if windows is not None and (name == "all_reduce" or (args.sizes and name in WINDOWS)):
            add([peers.nccl(name, nbytes, windows)])
        if others:
            add(list(peers.symm_mem(nbytes)))
    cost = ours.host_cost()
    started = time.perf_counter()
    second = ours.comm.split(0)
    again = time.perf_counter() - started
    if second is not None:
        second.close()
    return {
        "rows": rows,
        "host_us": cost,
        "init_seconds": round(ours.init_seconds, 3),
        "second_communicator_seconds": round(again, 4),
        "nccl_init_seconds": round(peers.init_seconds, 3),
    }


def command(args: argparse.Namespace) -> str:
    """The command line that measures the same."""
    words = ["python", "-m", "benchmarks.gpu.bars", "--ranks", str(args.ranks)]
    words += ["--dtype", args.dtype] if args.dtype != "bfloat16" else []
    words += ["--first", str(args.first)] if args.first else []
    words += ["--sizes", args.sizes] if args.sizes else []
    words += ["--collectives", args.collectives] if args.collectives else []
    words += ["--eager"] * args.eager + ["--alternatives"] * args.alternatives
    return shlex.join([*words, *(word for text in args.more for word in ("--with", text))])


def file_name(args: argparse.Namespace) -> str:
    """Of the record, which pages read where arrays are aligned and of bfloat16."""
    dtype = "" if args.dtype == "bfloat16" else f"_{args.dtype}"
    return f"{args.name}{dtype}{f'_first_{args.first}' if args.first else ''}_{args.ranks}"


def about(args: argparse.Namespace) -> dict[str, Any]:
    """The machine and the versions, as every recorded measurement says them."""
    import cupy
    import torch

    from ringcoll import __version__
    from ringcoll.bench.environment import machine, versions

    nranks = args.ranks
    gpu = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "name": file_name(args),
        "date": now(),
        "command": command(args),
        "commit": args.commit,
        "machine": {**machine(nranks, threads=False, device="cuda"), "gpus": f"{nranks} {gpu}"},
        "versions": {
            **versions(__version__),
            "cupy": cupy.__version__,
            "nccl": nccl,
            "cuda_runtime": cupy.cuda.runtime.runtimeGetVersion(),
            "cuda_driver": cupy.cuda.runtime.driverGetVersion(),
        },
    }


def table(found: dict[str, Any]) -> str:
    """Microseconds by collective, size and library."""
    rows = found["rows"]
    libs = list(dict.fromkeys(row["lib"] for row in rows))
    lines = [f"{'':<28}" + "".join(f"{lib:>16}" for lib in ["in place", *libs])]
    for name, nbytes in dict.fromkeys((row["collective"], row["bytes"]) for row in rows):
        same = [r for r in rows if (r["collective"], r["bytes"]) == (name, nbytes)]
        inside = [r["us"] for r in same if r["lib"] == "ringcoll" and r["in_place"]]
        cells = [*(inside or [None])]
        for lib in libs:
            seen = [r["us"] for r in same if r["lib"] == lib]
            cells.append(seen[0] if seen else None)
        lines.append(
            f"{name:<16}{nbytes:>12}" + "".join(f"{'' if c is None else c:>16}" for c in cells)
        )
    wrong = sum(row.get("wrong") or 0 for row in rows)
    rest = {
        key: value for key, value in found.items() if key.endswith("seconds") or key == "host_us"
    }
    return "\n".join([*lines, f"wrong elements: {wrong}", json.dumps(rest)])


def statuses_of(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    """The ranks' exit statuses; after a failure the others, who only wait for it, are killed."""
    late = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < late:
        if any(process.poll() for process in processes):
            late = min(late, time.monotonic() + GRACE)
        time.sleep(0.05)
    for process in processes:
        process.kill()
    return [process.wait() for process in processes]


def main(argv: Sequence[str] | None = None) -> int:
    """Start a process for each GPU, or be one of them."""
    parser = argparse.ArgumentParser(description="The bars of GPU ranks.")
    parser.add_argument("--ranks", type=int, default=0, help="0: all GPUs")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--line", default="", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=200.0, help="start nothing new after")
    parser.add_argument("--alternatives", action="store_true", help="other ways to run, too")
    parser.add_argument("--with", dest="more", action="append", default=[], metavar="OPTIONS")
    parser.add_argument("--commit", default="", help="what is measured")
    parser.add_argument("--sizes", default="", help="256:512M:4 or 4K,1M; default: the bars'")
    parser.add_argument("--collectives", default="", help="default: all of them")
    parser.add_argument("--dtype", choices=WORDS, default="bfloat16", help="(default: bfloat16)")
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="elements by which arrays begin behind an allocation; torch's symmetric memory and "
        "the kernels by hand are left out then",
    )
    parser.add_argument("--eager", action="store_true", help="without graphs, too")
    parser.add_argument("--name", default="gpu_bars", help=argparse.SUPPRESS)
    add_out(parser)
    args = parser.parse_args(argv)
    try:
        calls = list(wanted_calls(args.collectives, args.sizes))
    except ArgumentError as error:
        parser.error(str(error))
    if args.first < 0:
        parser.error(f"--first {args.first}: at least 0")
    unknown = {name for name, _ in calls} - {"all_reduce", *COLLECTIVES}
    if unknown:
        parser.error(f"no such collectives: {', '.join(sorted(unknown))}")
    if args.rank >= 0:
        found = measure(args)
        if args.rank == 0:
            print(table(found), flush=True)
            if args.out is not None:
                args.out.mkdir(parents=True, exist_ok=True)
                whole = {**about(args), **found}
                path = args.out / f"{file_name(args)}.json"
                path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        wrong = any(row.get("wrong") for row in found["rows"])
        os._exit(int(wrong))  # NCCL's threads need not be waited for
    there = require(parser, gpus=args.ranks or 1, torch=True)
    ranks = args.ranks or there
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "benchmarks.gpu.bars", "--ranks", str(ranks)]
    words += ["--port", str(port), "--seconds", str(args.seconds), "--commit", args.commit]
    words += ["--sizes", args.sizes, "--collectives", args.collectives, "--name", args.name]
    words += [] if args.out is None else ["--out", str(args.out)]
    words += ["--dtype", args.dtype, "--first", str(args.first), *["--eager"] * args.eager]
    words += ["--alternatives"] * args.alternatives
    words += [word for text in args.more for word in ("--with", text)]
    with tempfile.NamedTemporaryFile(prefix="ringcoll-line-", dir="/dev/shm") as line:
        line.truncate(4096)
        words += ["--line", line.name]
        processes = [subprocess.Popen([*words, "--rank", str(rank)]) for rank in range(ranks)]
        return max(statuses_of(processes, args.seconds + BEYOND), key=abs)


if __name__ == "__main__":
    sys.exit(main())
