"""What parsed flags of ``ringcoll bench`` stand for, or why they cannot be.

Nothing heavy is loaded here: whether this process is going to measure is not known yet.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

from ringcoll.bench.environment import gpus, wanted_device
from ringcoll.bench.settings import Pace, Settings
from ringcoll.errors import ArgumentError
from ringcoll.folders import pip_install
from ringcoll.units import parse_bandwidth, parse_bytes, parse_seconds

__all__ = ["read"]

_PICTURES = (".png", ".svg", ".pdf")

# Flags of nccl-tests that change nothing here, and why.
_IGNORED = {
    "stream_null": "GPU ranks are timed on streams of their own, CPU ranks have none",
    "parallel_init": "ranks always begin in parallel",
    "cta_policy": "there is no such policy; RINGCOLL_MAX_SMS bounds the blocks of GPU ranks",
    "device_cta_count": "there is no device API",
    "memory_report": "memory is not reported",
}
# Flags that would change what is measured, and cannot be had.
_REFUSED = {"device_implementation": "-D: there is no device API; leave it out"}

# What is measured on host memory; a device must not be chosen by chance then.
_HOST_PEERS = ("mpi", "gloo")


def read(args: argparse.Namespace, *, given: bool) -> Settings:
    """The settings that parsed flags stand for.

    Args:
        args: what the parser made of the command line.
        given: whether there was anything on it.

    Raises:
        ArgumentError: a flag has a value that cannot be, or asks for what the ranks lack.

    """
    for name, message in _REFUSED.items():
        if getattr(args, name):
            raise ArgumentError(message)
    device = _settled(args)
    if args.layout == "osu":
        _like_omb(args)
    factor = args.stepfactor or 1
    first, last, step = _sizes(args)
    json = args.json if args.json is not None else args.output_file
    _check_file("--json", json)
    _check_file("--plot", args.plot)
    threads = args.nthreads * args.ngpus
    if args.ranks is not None and threads > 1:
        raise ArgumentError("either --ranks (processes) or -g and -t (threads)")
    skip = args.per_iter_skip
    if args.iters is not None and skip >= args.iters:
        raise ArgumentError(f"-K {skip} leaves nothing of -n {args.iters}")
    return Settings(
        collective=args.collective or "all_reduce",
        tour=not given,
        ranks=args.ranks,
        threads=threads,
        min_bytes=first,
        max_bytes=last,
        step_bytes=step,
        step_factor=factor,
        iterations=args.iters,
        warmup=args.warmup_iters,
        aggregate=args.agg_iters,
        cycles=args.run_cycles,
        checks=args.check,
        ops=_names(args.op),
        dtypes=_names(args.datatype or "float"),
        roots=None if args.root == "all" else _numbers(args.root, "-r", 0),
        blocking=args.blocking,
        cpu_time=bool(args.report_cputime),
        average=args.average,
        register=args.local_register,
        timeout=_timeout(args.timeout),
        timestamps=bool(args.report_timestamps),
        unalign=args.unalign,
        per_iteration=bool(args.per_iter_timing),
        per_iteration_skip=skip,
        algorithms=(None,) if args.algorithm is None else _names(args.algorithm),
        slices=(None,) if args.slices is None else _numbers(args.slices, "--slices", 1),
        pace=_pace(args.pace, args.links),
        peer=args.peer,
        json=json,
        plot=args.plot,
        layout=args.layout,
        device=device,
        graphs=args.cudagraph,
        seed=args.seed,
        notes=tuple(
            f"--{name} is ignored: {why}"
            for name, why in _IGNORED.items()
            if getattr(args, name) not in (None, 0)
        ),
    )


def _like_omb(args: argparse.Namespace) -> None:
    """Fill in what the OSU Micro-Benchmarks take where nothing is said.

    Raises:
        ArgumentError: a flag asks for another loop.

    """
    others = {"-G": args.cudagraph, "-I": args.per_iter_timing, "-m": args.agg_iters - 1}
    for flag, given in others.items():
        if given:
            raise ArgumentError(f"{flag}: --format osu measures in OMB's loop, which has no such")
    reduces = args.collective in (None, "all_reduce", "reduce", "reduce_scatter")
    defaults = {"datatype": "float" if reduces else "uint8", "maxbytes": "1M", "stepfactor": 2}
    if args.minbytes is None:
        defaults["minbytes"] = "4" if reduces else "1"
    elif parse_bytes(args.minbytes) > 1 << 20:
        defaults["maxbytes"] = args.minbytes
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def _settled(args: argparse.Namespace) -> str:
    """The device, "cpu" where a flag means host memory or the model of a link."""
    device: str = args.device
    of_cpu = {"--pace": args.pace, "--peer": args.peer if args.peer in _HOST_PEERS else None}
    for flag, value in of_cpu.items():
        if value is None:
            continue
        if device not in ("auto", "cpu"):
            raise ArgumentError(f"{flag} {value} is of CPU ranks; --device cpu")
        device = "cpu"
    if args.cudagraph and args.per_iter_timing:
        raise ArgumentError("-G times whole graphs, -I single calls; take one")
    wanted = wanted_device(device, os.environ)
    if args.cudagraph and (wanted == "cpu" or (wanted == "auto" and not gpus())):
        raise ArgumentError("-G: CPU ranks have no CUDA graphs; leave it out, or --device cuda")
    return device


def _check_file(flag: str, path: str | None) -> None:
    """Refuse before the measurement what could not be written after it."""
    if path is None or (path == "-" and flag == "--json"):
        return
    where = Path(path).absolute()
    what = f"{flag} {path}"
    if not where.parent.is_dir():
        raise ArgumentError(f"{what}: there is no such folder")
    if where.is_dir() or not os.access(where if where.exists() else where.parent, os.W_OK):
        raise ArgumentError(f"{what}: it cannot be written")
    if flag == "--plot" and where.suffix not in _PICTURES:
        raise ArgumentError(f"{what}: the name ends in one of {', '.join(_PICTURES)}")
    if flag == "--plot" and importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError(f"{what}: there is no matplotlib; {pip_install('plot')}")


def _sizes(args: argparse.Namespace) -> tuple[int, int, int]:
    first = parse_bytes(args.minbytes) if args.minbytes is not None else None
    last = parse_bytes(args.maxbytes) if args.maxbytes is not None else None
    if first is None:
        first = min(32 << 20, last) if last is not None else 32 << 20
    if last is None:
        last = max(32 << 20, first)
    step = parse_bytes(args.stepbytes)
    if first > last:
        raise ArgumentError(f"-b {first} is more than -e {last}")
    if first < last and args.stepfactor in (None, 1) and step == 0:
        raise ArgumentError("-i 0 never comes to the last size; use -f 2")
    return first, last, step


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ArgumentError(f"{text!r} is no list of names")
    return names


def _numbers(text: str, flag: str, least: int) -> tuple[int, ...]:
    """``1,4,16`` and ``1-8``."""
    numbers: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise ArgumentError(f"{flag} {text!r}: numbers from {least}, as 1,4,16 or 1-8")
    return tuple(numbers)


def _pace(text: str | None, links: str | None) -> Pace | None:
    if text is None:
        if links is not None:
            raise ArgumentError(f"--links {links} says what --pace holds; add --pace BYTES_PER_S")
        return None
    bandwidth, _, alpha = text.partition(",")
    pace = parse_bandwidth(bandwidth), parse_seconds(alpha or "0")
    return (*pace, links) if links == "pairs" else pace


def _timeout(text: str | None) -> float | None:
    if text is None:
        return None
    seconds = parse_seconds(text)
    # nccl-tests: 0 waits for ever.
    return seconds or float("inf")
