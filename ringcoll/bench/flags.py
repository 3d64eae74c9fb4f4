"""The flags of ``ringcoll bench``, those of nccl-tests and our own, and what they stand for.

Nothing heavy is loaded here: whether this process is going to measure is not known yet.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from ringcoll.bench.environment import gpus, wanted_device
from ringcoll.bench.settings import COLLECTIVES, NO_NCCL, PEERS, Pace, Settings
from ringcoll.errors import ArgumentError
from ringcoll.folders import pip_install
from ringcoll.units import parse_bandwidth, parse_bytes, parse_ints, parse_seconds

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
_TORCH_PEERS = ("gloo", "nccl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` every flag of the command."""
    parser.add_argument(
        "collective",
        nargs="?",
        type=lambda text: text.removesuffix("_perf"),
        choices=COLLECTIVES,
        help="collective to measure (all_reduce)",
    )
    _add_nccl(parser)
    own = parser.add_argument_group("beyond nccl-tests")
    flag = own.add_argument
    flag("--ranks", type=_at_least(1), metavar="N", help="rank processes (2 to 4, as cores)")
    flag(
        "--algorithm",
        metavar="NAMES",
        help="algorithms, each measured: ring,two_shot, or your own: FILE.py:FUNCTION",
    )
    flag("--slices", metavar="LIST", help="numbers of slices, each measured: 1,4,16")
    flag(
        "--pace",
        metavar="BYTES_PER_S[,ALPHA_S]",
        help="slow the links of CPU ranks down to this, and print the timing model's prediction",
    )
    flag(
        "--links",
        choices=("switch", "pairs"),
        help="what --pace holds: switch (default), one egress and one ingress port a rank, as "
        "`ringcoll model` has it, or pairs, a link for each ordered pair of ranks",
    )
    flag("--peer", choices=PEERS, help="library to measure in turns with it")
    flag("--json", metavar="FILE", help="write the rows to FILE; - is stdout")
    flag("--plot", metavar="FILE", help="draw latency and bandwidth over size")
    flag(
        "--format",
        choices=("nccl", "osu"),
        default="nccl",
        dest="layout",
        help="columns (nccl); osu: those and the loop of the OSU Micro-Benchmarks, which take 4 or "
        "1 byte to 1M without -b and -e",
    )
    flag(
        "--device",
        type=_device,
        default="auto",
        metavar="auto|cpu|cuda|N",
        help="device of the ranks; N: the GPU that all -g ranks share (auto: GPUs where there are)",
    )
    flag("--seed", type=_at_least(0), help="seed of the inputs (a new one each run)")
    own.add_argument("--output", help=argparse.SUPPRESS)
    own.add_argument("--member", help=argparse.SUPPRESS)
    own.add_argument("--supervisor", help=argparse.SUPPRESS)


# Flags of nccl-tests that say what a setting of another name says.
_SETTINGS = {
    "iters": "iterations",
    "warmup_iters": "warmup",
    "agg_iters": "aggregate",
    "run_cycles": "cycles",
    "check": "checks",
    "cudagraph": "graphs",
    "report_cputime": "cpu_time",
    "local_register": "register",
    "report_timestamps": "timestamps",
    "per_iter_timing": "per_iteration",
    "per_iter_skip": "per_iteration_skip",
}


def _add_nccl(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("flags of nccl-tests")

    def flag(short: str, long: str, default: object, kind: Any, text: str) -> None:
        shown = f"{text} ({default})" if default is not None else text
        look: dict[str, Any] = {"metavar": short.upper(), "help": shown, "default": default}
        names = f"-{short}", f"--{long}"
        group.add_argument(*names, type=kind, dest=_SETTINGS.get(long, long), **look)

    count, positive, switch = _at_least(0), _at_least(1), _at_least(0, 1)
    flag("t", "nthreads", 1, positive, "threads a process, each with -g ranks")
    flag("g", "ngpus", 1, positive, "ranks a thread; more than 1: ranks are threads of one process")
    flag("b", "minbytes", None, str, "first size (32M)")
    flag("e", "maxbytes", None, str, "last size (32M, or the first)")
    flag("i", "stepbytes", "1M", str, "bytes added from size to size")
    flag("f", "stepfactor", None, positive, "factor from size to size (1)")
    flag("n", "iters", None, positive, "timed calls a size (5 to 1000, as many as fit 0.25 s)")
    flag("w", "warmup_iters", None, count, "untimed calls before them (1)")
    flag("m", "agg_iters", 1, positive, "calls an iteration")
    flag("N", "run_cycles", 1, count, "runs of the whole; 0: until interrupted")
    flag("c", "check", 1, count, "checked calls a size; 0: none")
    flag("o", "op", "sum", str, "operators, or all")
    flag("d", "datatype", None, str, "element types, or all (float)")
    flag("r", "root", "0", str, "root, or all")
    flag("z", "blocking", 0, _at_least(0, 3), "1: a barrier after each call; calls always block")
    flag("y", "stream_null", None, int, "ignored: GPU ranks have streams of their own")
    flag("p", "parallel_init", None, int, "ignored: ranks begin in parallel")
    flag("G", "cudagraph", 0, count, "launches of a CUDA graph of the calls; GPU ranks only")
    flag("C", "report_cputime", 0, switch, "1: CPU time of the rank, not wall time")
    flag("a", "average", 3, _at_least(0, 3), "over ranks: 0 rank 0, 1 mean, 2 fastest, 3 slowest")
    flag("R", "local_register", 2, _at_least(0, 2), "arrays: 0 plain, 1 registered, 2 symmetric")
    flag("x", "cta_policy", None, int, "ignored: there is no such policy")
    flag("D", "device_implementation", 0, count, "refused: there is no device API")
    flag("V", "device_cta_count", None, int, "ignored: there is no device API")
    flag("T", "timeout", None, str, "seconds that a wait may take (60)")
    flag("S", "report_timestamps", 0, switch, "1: print when each row was measured")
    flag("J", "output_file", None, str, "the same as --json")
    flag("M", "memory_report", None, int, "ignored: memory is not reported")
    flag("u", "unalign", 0, count, "elements that arrays are shifted by")
    flag("I", "per_iter_timing", 0, switch, "1: print the spread of single iterations")
    flag("K", "per_iter_skip", 0, count, "iterations left out of the spread")


def read(args: argparse.Namespace, *, given: bool) -> Settings:
    """The settings of parsed flags; ``given``: whether there were any on the command line."""
    for name, message in _REFUSED.items():
        if getattr(args, name):
            raise ArgumentError(message)
    device = _settled(args)
    if args.layout == "osu":
        _like_omb(args)
    first, last, step = _sizes(args)
    json = args.json if args.json is not None else args.output_file
    _check_file("--json", json)
    _check_file("--plot", args.plot)
    threads = args.nthreads * args.ngpus
    if args.ranks is not None and threads > 1:
        raise ArgumentError("--ranks starts processes, -g and -t start threads: give one of them")
    skip = args.per_iteration_skip
    if args.iterations is not None and skip >= args.iterations:
        raise ArgumentError(f"-K {skip} skips all -n {args.iterations} iterations; raise -n")
    # Where a flag says what its setting says, it is stored under the setting's name.
    said = {f.name: getattr(args, f.name) for f in fields(Settings) if f.name in args}
    said |= {name: bool(said[name]) for name in ("cpu_time", "timestamps", "per_iteration")}
    said |= {
        "collective": args.collective or "all_reduce",
        "tour": not given,
        "threads": threads,
        "min_bytes": first,
        "max_bytes": last,
        "step_bytes": step,
        "step_factor": args.stepfactor or 1,
        "ops": _names(args.op),
        "dtypes": _names(args.datatype or "float"),
        "roots": None if args.root == "all" else _numbers(args.root, "-r", 0),
        "timeout": _timeout(args.timeout),
        "algorithms": (None,) if args.algorithm is None else _names(args.algorithm),
        "slices": (None,) if args.slices is None else _numbers(args.slices, "--slices", 1),
        "pace": _pace(args.pace, args.links),
        "json": json,
        "device": device,
        "notes": tuple(
            f"--{name} is ignored: {why}"
            for name, why in _IGNORED.items()
            if getattr(args, name) not in (None, 0)
        ),
    }
    return Settings(**said)


def _like_omb(args: argparse.Namespace) -> None:
    """Fill in what the OSU Micro-Benchmarks take by default; refuse flags of another loop."""
    others = {"-G": args.graphs, "-I": args.per_iteration, "-m": args.aggregate - 1}
    for flag, given in others.items():
        if given:
            raise ArgumentError(f"{flag}: --format osu measures in OMB's loop; leave {flag} out")
    reduced = (None, "all_reduce", "reduce", "reduce_scatter", "scan", "exscan")
    reduces = args.collective in reduced
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
            raise ArgumentError(f"{flag} {value} needs CPU ranks; add --device cpu")
        device = "cpu"
    if args.graphs and args.per_iteration:
        raise ArgumentError("-G times whole graphs, -I single calls; leave one of them out")
    wanted = wanted_device(device, os.environ)
    if args.graphs or args.peer == "nccl":
        on_cpu = wanted == "cpu" or (wanted == "auto" and not gpus())
        if on_cpu and args.graphs:
            raise ArgumentError("-G: CPU ranks have no CUDA graphs; leave it out, or --device cuda")
        if on_cpu:
            raise ArgumentError(NO_NCCL)
    if args.peer in _TORCH_PEERS and importlib.util.find_spec("torch") is None:
        raise ArgumentError(f"--peer {args.peer} needs torch; pip install torch")
    return device


def _check_file(flag: str, path: str | None) -> None:
    """Refuse before the measurement what could not be written after it."""
    if path is None or (path == "-" and flag == "--json"):
        return
    where = Path(path).absolute()
    what = f"{flag} {path}"
    if not where.parent.is_dir():
        raise ArgumentError(f"{what}: there is no folder {where.parent}; make it first")
    if where.is_dir() or not os.access(where if where.exists() else where.parent, os.W_OK):
        raise ArgumentError(f"{what}: cannot be written; name another file")
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
        raise ArgumentError(f"-b {first} is above -e {last}; raise -e")
    if first < last and args.stepfactor in (None, 1) and step == 0:
        raise ArgumentError("-i 0 never reaches the last size; use -f 2")
    return first, last, step


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ArgumentError(f"{text!r}: write names with commas between them")
    return names


def _numbers(text: str, flag: str, least: int) -> tuple[int, ...]:
    """``1,4,16`` and ``1-8``."""
    try:
        return tuple(parse_ints(text, least=least))
    except ArgumentError as error:
        raise ArgumentError(f"{flag} {error}") from None


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


def _device(text: str) -> str:
    if text not in ("auto", "cpu", "cuda") and not text.isdecimal():
        from ringcoll.options import OPTION_TYPES

        hint = OPTION_TYPES["device"].hint(text)
        raise argparse.ArgumentTypeError(
            f"invalid device {text!r}: auto, cpu, cuda or a number{hint}"
        )
    return text


class _at_least:  # noqa: N801  # argparse shows the name in its messages
    """An integer from ``least`` to ``most``."""

    def __init__(self, least: int, most: int | None = None) -> None:
        self.least, self.most = least, most
        self.__name__ = f"integer from {least}" + (f" to {most}" if most is not None else "")

    def __call__(self, text: str) -> int:
        value = int(text)
        if value < self.least or (self.most is not None and value > self.most):
            raise ValueError
        return value
