"""The flags of ``ringcoll bench``: those of nccl-tests, and our own.

Nothing heavy is loaded here: whether this process is going to measure is not known yet.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from ringcoll.bench.environment import gpus, wanted_device
from ringcoll.cli.sizes import parse_bandwidth, parse_bytes, parse_seconds
from ringcoll.errors import ArgumentError

__all__ = ["COLLECTIVES", "PEERS", "Settings", "add_arguments", "read"]

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "gather",
    "scatter",
    "sendrecv",
    "barrier",
)
"""What can be measured."""

PEERS = ("mpi", "gloo", "nccl")
"""What can be measured beside it."""

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


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure and how.

    Args:
        collective: one of :data:`COLLECTIVES`.
        tour: nothing was asked for: show what there is.
        ranks: how many rank processes to start; None: one for each core, up to four.
        threads: ranks that are threads of one process.
        min_bytes: the first size, in bytes as nccl-tests counts them.
        max_bytes: the last size.
        step_bytes: what is added from size to size, where ``step_factor`` is 1.
        step_factor: what sizes are multiplied by.
        iterations: timed calls a size; None: as many as fit a quarter of a second.
        warmup: untimed calls before them; None: 1, in OMB's loop 100 or 10.
        aggregate: calls an iteration.
        cycles: how often the whole is measured; 0: until it is interrupted.
        checks: how often the result of a size is checked; 0: never.
        ops: operators by name; "all" stands for every legal one.
        dtypes: element types by name; "all" stands for every one.
        roots: roots; None stands for all of them.
        blocking: 1: a barrier after each timed call.
        cpu_time: report the time that this rank's thread ran, not the clock on the wall.
        average: over ranks: 0 takes rank 0, 1 the mean, 2 the fastest, 3 the slowest.
        register: memory of the buffers: 0 plain, 1 registered, 2 symmetric.
        timeout: seconds a wait may take; None: the library's own.
        timestamps: print when a row was measured.
        unalign: elements that the buffers are shifted by.
        per_iteration: report the spread of single iterations too.
        per_iteration_skip: iterations that are left out of the spread.
        algorithms: by name; None: the library's choice.
        slices: S; None: the library's choice.
        pace: bytes a second and seconds a message that a link takes; None: as fast as it goes.
        peer: what to measure beside ringcoll: "mpi" and "gloo" on CPU ranks, "nccl" on GPUs.
        json: file for the rows, "-" for standard output.
        plot: file for the picture.
        layout: "nccl" or "osu", the look of the table; "osu" measures in OMB's loop too.
        device: "auto", "cpu", "cuda", or the number of the GPU that all ranks share.
        graphs: launches of a CUDA graph of each block of calls; 0: calls are eager.
        seed: of the inputs; None: a new one each run.
        notes: what the user should be told about ignored flags.

    """

    collective: str = "all_reduce"
    tour: bool = False
    ranks: int | None = None
    threads: int = 1
    min_bytes: int = 32 << 20
    max_bytes: int = 32 << 20
    step_bytes: int = 1 << 20
    step_factor: int = 1
    iterations: int | None = None
    warmup: int | None = None
    aggregate: int = 1
    cycles: int = 1
    checks: int = 1
    ops: tuple[str, ...] = ("sum",)
    dtypes: tuple[str, ...] = ("float32",)
    roots: tuple[int, ...] | None = (0,)
    blocking: int = 0
    cpu_time: bool = False
    average: int = 3
    register: int = 2
    timeout: float | None = None
    timestamps: bool = False
    unalign: int = 0
    per_iteration: bool = False
    per_iteration_skip: int = 0
    algorithms: tuple[str | None, ...] = (None,)
    slices: tuple[int | None, ...] = (None,)
    pace: tuple[float, float] | None = None
    peer: str | None = None
    json: str | None = None
    plot: str | None = None
    layout: str = "nccl"
    device: str = "auto"
    graphs: int = 0
    seed: int | None = None
    notes: tuple[str, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` every flag of the command."""
    parser.add_argument(
        "collective",
        nargs="?",
        type=lambda text: text.removesuffix("_perf"),
        choices=COLLECTIVES,
        help="what to measure (all_reduce)",
    )
    _add_nccl(parser)
    own = parser.add_argument_group("beyond nccl-tests")
    flag = own.add_argument
    flag("--ranks", type=_at_least(1), metavar="N", help="processes to start (4, or the cores)")
    flag("--algorithm", metavar="NAMES", help="algorithms, each measured: ring,two_shot")
    flag("--slices", metavar="LIST", help="slices a chunk, each measured: 1,4,16 or 1-8")
    flag("--pace", metavar="BYTES_PER_S[,ALPHA_S]", help="slow the links down to this")
    flag("--peer", choices=PEERS, help="measure this too, in turns, on the same arrays")
    flag("--json", metavar="FILE", help="write the rows here; - is standard output")
    flag("--plot", metavar="FILE", help="draw bandwidth over size here (.png, .svg)")
    flag(
        "--format",
        choices=("nccl", "osu"),
        default="nccl",
        dest="layout",
        help="of the table; osu measures in OMB's loop, 4 or 1 to 1M bytes if nothing is said",
    )
    flag(
        "--device",
        type=_device,
        default="auto",
        metavar="auto|cpu|cuda|N",
        help="of the ranks; N: of all of them, which -g counts (auto: GPUs where there are any)",
    )
    flag("--seed", type=_at_least(0), help="of the random inputs (a new one each run)")
    own.add_argument("--output", help=argparse.SUPPRESS)
    own.add_argument("--member", help=argparse.SUPPRESS)


def _add_nccl(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("flags of nccl-tests")

    def flag(short: str, long: str, default: object, kind: object, text: str) -> None:
        shown = f"{text} ({default})" if default is not None else text
        group.add_argument(
            f"-{short}",
            f"--{long}",
            default=default,
            type=kind,  # type: ignore[arg-type]
            metavar=short.upper(),
            help=shown,
        )

    count, positive = _at_least(0), _at_least(1)
    flag("t", "nthreads", 1, positive, "threads a process, each with -g ranks")
    flag("g", "ngpus", 1, positive, "ranks a thread; more than 1: ranks are threads of one process")
    flag("b", "minbytes", None, str, "first size (32M)")
    flag("e", "maxbytes", None, str, "last size (32M, or the first)")
    flag("i", "stepbytes", "1M", str, "from size to size, added")
    flag("f", "stepfactor", None, positive, "from size to size, multiplied (1)")
    flag("n", "iters", None, positive, "timed calls a size (5 to 1000, as many as fit 0.25 s)")
    flag("w", "warmup_iters", None, count, "untimed calls before them (1)")
    flag("m", "agg_iters", 1, positive, "calls an iteration")
    flag("N", "run_cycles", 1, count, "rounds of everything; 0: until interrupted")
    flag("c", "check", 1, count, "checked calls a size; 0: none")
    flag("o", "op", "sum", str, "operators, or all")
    flag("d", "datatype", None, str, "element types, or all (float)")
    flag("r", "root", "0", str, "root, or all")
    flag("z", "blocking", 0, _at_least(0, 3), "1: a barrier after each call; calls always block")
    flag("y", "stream_null", None, int, "ignored: GPU ranks have streams of their own")
    flag("p", "parallel_init", None, int, "ignored: ranks begin in parallel")
    flag("G", "cudagraph", 0, count, "launches of a CUDA graph of the calls; GPU ranks only")
    flag("C", "report_cputime", 0, _at_least(0, 1), "1: time on the processor, not on the wall")
    flag("a", "average", 3, _at_least(0, 3), "over ranks: 0 rank 0, 1 mean, 2 fastest, 3 slowest")
    flag("R", "local_register", 2, _at_least(0, 2), "arrays: 0 plain, 1 registered, 2 symmetric")
    flag("x", "cta_policy", None, int, "ignored: there is no such policy")
    flag("D", "device_implementation", 0, count, "refused: there is no device API")
    flag("V", "device_cta_count", None, int, "ignored: there is no device API")
    flag("T", "timeout", None, str, "seconds that a wait may take (60)")
    flag("S", "report_timestamps", 0, _at_least(0, 1), "1: when each row was measured")
    flag("J", "output_file", None, str, "the same as --json")
    flag("M", "memory_report", None, int, "ignored: memory is not reported")
    flag("u", "unalign", 0, count, "elements that arrays are shifted by")
    flag("I", "per_iter_timing", 0, _at_least(0, 1), "1: the spread of single iterations")
    flag("K", "per_iter_skip", 0, count, "iterations left out of the spread")


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
        pace=_pace(args.pace),
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


def _device(text: str) -> str:
    if text not in ("auto", "cpu", "cuda") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"invalid device {text!r}: auto, cpu, cuda or a number")
    return text


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
        raise ArgumentError(f"{what}: there is no matplotlib; pip install 'ringcoll[plot]'")


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


def _pace(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    bandwidth, _, alpha = text.partition(",")
    return parse_bandwidth(bandwidth), parse_seconds(alpha or "0")


def _timeout(text: str | None) -> float | None:
    if text is None:
        return None
    seconds = parse_seconds(text)
    # nccl-tests: 0 waits for ever.
    return seconds or float("inf")


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
