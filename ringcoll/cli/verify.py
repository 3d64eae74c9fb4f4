"""``ringcoll verify``: prove every built-in algorithm, and doubt every proof with mutants."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from ringcoll.algorithms import ALGORITHMS
from ringcoll.cli.links import typed
from ringcoll.cli.output import write_json
from ringcoll.units import parse_ints
from ringcoll.verifier.examine import Case, Outcome, examine

__all__ = ["add_arguments", "main"]

DEFAULT_RANKS = "1-8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``ringcoll verify``."""
    algorithms = sorted({name for builders in ALGORITHMS.values() for name in builders})
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--ranks",
        type=typed(parse_ints),
        default=parse_ints(DEFAULT_RANKS),
        metavar="LIST",
        help=f"numbers of ranks, such as 1-8 or 2,4,16 (default {DEFAULT_RANKS})",
    )
    either.add_argument(
        "--nodes",
        type=typed(parse_ints),
        metavar="LIST",
        help="ranks of each node, such as 2,2, instead of --ranks: what crosses nodes goes by "
        "message",
    )
    parser.add_argument(
        "--collective",
        action="append",
        choices=list(ALGORITHMS),
        metavar="NAME",
        help="only this collective; may be repeated",
    )
    parser.add_argument(
        "--algorithm",
        action="append",
        choices=algorithms,
        metavar="NAME",
        help="only this algorithm; may be repeated",
    )
    parser.add_argument(
        "--mutants",
        choices=("sample", "all", "none"),
        default="sample",
        help="all: every mutant of every launch; sample: all up to 3 ranks, of more ranks some of "
        "each kind (default)",
    )
    parser.add_argument(
        "--slices",
        type=typed(parse_ints),
        default=[1, 3],
        metavar="LIST",
        help="S, in how many slices a chunk is pipelined with a window of 2 (default 1,3; up to 3 "
        "ranks all S are proven)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default 0)")
    parser.add_argument(
        "--jobs", type=int, default=0, help="processes (default: one for each core)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - is stdout")


def main(args: argparse.Namespace) -> int:
    """Run ``ringcoll verify``; 0 if everything is proven and every mutant is accounted for."""
    cases = list(_cases(args))
    if not cases:
        print("no algorithm fits --collective and --algorithm", file=sys.stderr)
        return 2
    quiet = args.json == "-"
    if not quiet:
        print(_row("collective", "algorithm", "ranks", *_COLUMNS), flush=True)
    total = Outcome()
    with _pool(args.jobs, len(cases)) as run:
        for case, outcome in zip(cases, run(cases), strict=True):
            total = total.join(outcome)
            if not quiet and outcome.plans:
                print(_report(case.collective, case.algorithm, case.nranks, outcome), flush=True)
    if not quiet:
        print(_report("total", "", "", total))
        for failure in total.failures:
            print("FAILED " + ", ".join(f"{key} {value}" for key, value in failure.items()))
    write_json(args.json, total.as_json())
    return 1 if total.failures else 0


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    for collective, builders in ALGORITHMS.items():
        if args.collective and collective not in args.collective:
            continue
        for algorithm in builders:
            if args.algorithm and algorithm not in args.algorithm:
                continue
            slices = tuple(args.slices)
            nodes: tuple[int, ...] = ()
            if args.nodes:
                nodes = tuple(n for n, ranks in enumerate(args.nodes) for _ in range(ranks))
            for nranks in [len(nodes)] if nodes else args.ranks:
                yield Case(collective, algorithm, nranks, slices, args.mutants, args.seed, nodes)


@contextmanager
def _pool(jobs: int, cases: int) -> Iterator[Any]:
    """A ``map`` over processes, or over none where one is enough."""
    jobs = min(jobs or _cores(), cases)
    if jobs < 2:
        yield lambda todo: map(examine, todo)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield lambda todo: _largest_first(pool, todo)


def _largest_first(pool: ProcessPoolExecutor, cases: Sequence[Case]) -> Iterable[Outcome]:
    """Results in the order of the cases; the long ones start first, so that none is left over."""
    by_size = sorted(range(len(cases)), key=lambda i: -cases[i].nranks)
    futures = {i: pool.submit(examine, cases[i]) for i in by_size}
    try:
        for i in range(len(cases)):
            yield futures[i].result()
    finally:
        for future in futures.values():
            future.cancel()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


_COLUMNS = ("plans", "steps", "mutants", "rejected", "equivalent", "failures")


def _report(collective: str, algorithm: str, nranks: int | str, outcome: Outcome) -> str:
    made, rejected, equivalent = outcome.mutants()
    return _row(
        collective,
        algorithm,
        nranks,
        outcome.plans,
        outcome.steps,
        made,
        rejected,
        equivalent,
        len(outcome.failures),
    )


def _row(collective: str, algorithm: str, nranks: int | str, *numbers: int | str) -> str:
    return f"{collective:<15}{algorithm:<20}{nranks:>5}" + "".join(f"{n:>11}" for n in numbers)
