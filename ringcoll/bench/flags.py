"""The flags of ``ringcoll bench``: those of nccl-tests, and our own.

Nothing heavy is loaded here: whether this process is going to measure is not known yet.
"""

from __future__ import annotations

import argparse

from ringcoll.bench.settings import COLLECTIVES, PEERS

__all__ = ["add_arguments"]


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
    flag(
        "--algorithm",
        metavar="NAMES",
        help="algorithms, each measured: ring,two_shot, or your own: FILE.py:FUNCTION",
    )
    flag("--slices", metavar="LIST", help="slices a chunk, each measured: 1,4,16 or 1-8")
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
    flag("--peer", choices=PEERS, help="measure this too, in turns, on the same arrays")
    flag("--json", metavar="FILE", help="write the rows here; - is standard output")
    flag("--plot", metavar="FILE", help="draw bandwidth over size here (.png, .svg)")
    flag(
        "--format",
        choices=("nccl", "osu"),
        default="nccl",
        dest="layout",
        help="of the table (nccl); osu measures in OMB's loop, 4 or 1 byte to 1M without -b and -e",
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


def _device(text: str) -> str:
    if text not in ("auto", "cpu", "cuda") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"invalid device {text!r}: auto, cpu, cuda or a number")
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
