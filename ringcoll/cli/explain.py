"""``ringcoll explain``: what a plan moves where and when, and why that launch."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass

from ringcoll.algorithms import Algorithm, name_of
from ringcoll.algorithms.load import find
from ringcoll.cli.links import (
    add_call_arguments,
    add_link_arguments,
    describe_links,
    figures_of,
    links_of,
    typed,
)
from ringcoll.cli.output import say_unproven, say_written, write_json
from ringcoll.errors import ArgumentError
from ringcoll.launch import Launch
from ringcoll.lower import lower
from ringcoll.model.explain import LEGEND, MOST_RANKS, space_time
from ringcoll.model.fastest import (
    Fastest,
    best_slices,
    candidate_for,
    candidates_for,
    fastest,
    plan_for,
)
from ringcoll.model.machine import NETWORK_ALPHA
from ringcoll.model.picture import plot_space_time
from ringcoll.model.plot import check_plot
from ringcoll.model.predict import Clock, Timed
from ringcoll.plan import Plan, format_plan
from ringcoll.units import format_bytes, format_seconds, parse_bytes

EXAMPLES = """\
ringcoll explain all_reduce                       the fastest on assumed links, and why
ringcoll explain all_reduce --bandwidth measured  on the links that a timing run has measured
ringcoll explain all_reduce --algorithm ring --slices 1 --plot ring.svg
ringcoll explain broadcast --algorithm chain --ranks 4 --slices 4
ringcoll explain all_reduce --algorithm star.py:star --lowered
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``ringcoll explain``."""
    add_call_arguments(parser)
    option = parser.add_argument
    option(
        "--algorithm",
        metavar="NAME",
        help="a name, FILE.py:FUNCTION or MODULE:FUNCTION (default: the fastest by the model)",
    )
    option(
        "--ranks",
        type=int,
        default=None,
        metavar="N",
        help="ranks of the call (default 4; send: 2)",
    )
    option(
        "--slices", type=int, metavar="S", help="slices of a chunk (default: the best by the model)"
    )
    option(
        "--bytes",
        type=typed(parse_bytes),
        default=1 << 20,
        metavar="N",
        help="bytes of the larger buffer, such as 64M (default 1M)",
    )
    add_link_arguments(parser, alpha="1us, that of NCCL's model for a network")
    option(
        "--width", type=int, metavar="COLUMNS", help="of the table (default: those of the terminal)"
    )
    option(
        "--lowered",
        action="store_true",
        help="also print the lowered plan: every slice with its waits and signals",
    )
    option("--plot", metavar="FILE", help="draw chunks, sums and directions; .png, .svg or .pdf")
    option("--json", metavar="FILE", help="write the steps as JSON; - is stdout")


@dataclass(frozen=True, slots=True)
class _Launched:
    algorithm: str
    plan: Plan
    slices: int
    seconds: float
    reasons: tuple[str, ...]
    timed: tuple[Timed, ...]


def main(args: argparse.Namespace) -> int:
    """Run ``ringcoll explain``."""
    if args.plot is not None:
        check_plot(args.plot)
    if args.ranks is None:
        args.ranks = 2 if args.collective == "send" else 4
    for name in ("ranks", "window"):
        if getattr(args, name) < 1:
            raise ArgumentError(f"--{name} {getattr(args, name)}: at least 1")
    assumed = _assume(args)
    launched = _launch(args)
    title = (
        f"{args.collective} of {format_bytes(args.bytes)} by {launched.algorithm}, "
        f"{args.ranks} ranks, S = {launched.slices}, W = {args.window}: "
        f"{format_seconds(launched.seconds)}"
    )
    if args.json != "-":
        print(title)
        print(f"over {describe_links(links_of(args, args.ranks))}{assumed}\n")
        width = args.width or shutil.get_terminal_size((100, 24)).columns
        panels = space_time(launched.timed, args.ranks, width=width).split("\n\n")
        print("\n\n".join(panels[:_PANELS]).rstrip() + "\n")
        if len(panels) > _PANELS:
            print(f"... {len(panels) - _PANELS} more such; --slices 4 draws a whole one\n")
        print(f"{LEGEND}; t is the shortest transfer, S the slices, W those staged at once\n")
        print("\n".join(launched.reasons))
        if args.lowered:
            launch = Launch(slices=launched.slices, window=args.window)
            print("\n" + format_plan(lower(launched.plan, launch)), end="")
    if args.plot is not None:
        _plot(args, launched)
    write_json(args.json, _as_json(args, launched))
    return 0


def _assume(args: argparse.Namespace) -> str:
    """Fill in an α that nothing gives, and say which figures are assumed; "" where none is."""
    if figures_of(args) is not None:
        return ""
    given = {"B": args.bandwidth, "alpha": args.alpha, "L": args.latency}
    names = [name for name, figure in given.items() if figure is None]
    if args.alpha is None:
        args.alpha = NETWORK_ALPHA.seconds
    if not names:
        return ""
    are = "is" if len(names) == 1 else "are"
    return (
        f"\n{', '.join(names)} {are} assumed, not measured: --bandwidth, --alpha, --latency or "
        f"--figures give others; comm.explain() in a program says what runs on this machine"
    )


def _plot(args: argparse.Namespace, launched: _Launched) -> None:
    """Draw the table, and say how long it takes over which links."""
    slices = "1 slice" if launched.slices == 1 else f"{launched.slices} slices"
    plot_space_time(
        launched.timed,
        args.ranks,
        f"{args.collective} by {launched.algorithm} on {args.ranks} ranks",
        args.plot,
        subtitle=f"{format_bytes(args.bytes)} in {slices}: {format_seconds(launched.seconds)} over "
        f"{describe_links(links_of(args, args.ranks))}",
    )
    say_written(args.plot)


_MOST_SLICES = 64
"""S that is searched for a table."""

_TIE = 1e-3
"""Parts of the least time within which others are as fast: the model is not that exact."""

_PANELS = 4
"""The table is cut into panels as wide as the terminal; so many are printed."""


def _launch(args: argparse.Namespace) -> _Launched:
    """The launch that the options give, or that the model chooses, and why."""
    if args.ranks > MOST_RANKS:
        raise ArgumentError(
            f"--ranks {args.ranks}: at most {MOST_RANKS} fit a table; use `ringcoll model`"
        )
    links = links_of(args, args.ranks)
    call = args.collective, args.ranks
    options = {"root": args.root, "nodes": links.nodes, "per_port": links.per_port}
    candidates = candidates_for(*call, **options)
    algorithm: Algorithm | None = None
    if args.algorithm is not None:
        algorithm = find(args.collective, args.algorithm)
    if callable(algorithm):
        candidates += (candidate_for(args.collective, algorithm, args.ranks, **options),)
    choice = fastest(*call, args.bytes, links=links, candidates=candidates, window=args.window)
    algorithm = algorithm or choice.algorithm
    plan = plan_for(args.collective, algorithm, args.ranks, **options)
    clock = Clock(plan, links, window=args.window)
    if args.slices is not None:
        slices = args.slices
    elif args.algorithm is None:
        slices = choice.slices
    else:
        slices, _ = best_slices(clock, args.bytes, most=_MOST_SLICES, only_powers=True)
    if plan.synchronised and slices > 1:
        raise ArgumentError(
            f"--slices {slices}: {name_of(algorithm)} has signals of its own and takes 1"
        )
    if callable(algorithm):
        say_unproven("explain", plan)
    seconds = clock.predict(args.bytes, slices).seconds
    reasons = _reasons(args, choice, name_of(algorithm), slices, seconds)
    timed = clock.trace(args.bytes, slices)
    return _Launched(name_of(algorithm), plan, slices, seconds, reasons, timed)


def _reasons(
    args: argparse.Namespace, choice: Fastest, algorithm: str, slices: int, seconds: float
) -> tuple[str, ...]:
    least = choice.seconds * (1 + _TIE)
    tied = [o.algorithm for o in choice.options if o.slices and not o.note and o.seconds <= least]
    how = "given" if args.algorithm is not None else "the fastest by the model"
    if args.algorithm is None and len(tied) > 1:
        how = f"the first of {len(tied)} that tie by the model: {', '.join(tied)}"
    said = "given" if args.slices is not None else "the best power of two by the model"
    return (
        f"launch: {algorithm} ({how}), S = {slices} ({said}), W = {args.window}: "
        f"{format_seconds(seconds)}",
        "by the model, at the best S of each:",
        *(f"  {reason}" for reason in choice.reasons),
    )


def _as_json(args: argparse.Namespace, launched: _Launched) -> dict[str, object]:
    return {
        "collective": args.collective,
        "algorithm": launched.algorithm,
        "ranks": args.ranks,
        "bytes": args.bytes,
        "slices": launched.slices,
        "window": args.window,
        "seconds": launched.seconds,
        "reasons": list(launched.reasons),
        "steps": [
            {
                "rank": t.block.rank,
                "channel": t.block.channel,
                "lane": t.block.lane,
                "slice": t.slice,
                "start": t.start,
                "end": t.end,
                "srcs": [str(chunk) for chunk in t.step.srcs],
                "dsts": [str(chunk) for chunk in t.step.dsts],
            }
            for t in launched.timed
        ],
    }
