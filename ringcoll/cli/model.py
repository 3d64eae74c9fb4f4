"""``ringcoll model``: predict how long a collective takes."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from ringcoll.algorithms import ALGORITHMS, Algorithm, name_of
from ringcoll.algorithms.load import find_all
from ringcoll.cli.links import (
    add_call_arguments,
    add_link_arguments,
    describe_links,
    figures_of,
    links_of,
    typed,
    unknown_costs,
)
from ringcoll.cli.output import (
    Progress,
    bold,
    check_target,
    progress,
    say_unproven,
    say_written,
    write_json,
)
from ringcoll.errors import ArgumentError, PlanError
from ringcoll.model.closed_form import (
    CHAINS,
    bus_factor,
    chain_best_slices,
    chain_limits,
    closed_form,
)
from ringcoll.model.fastest import best_slices, plan_for
from ringcoll.model.limits import Answer, answer
from ringcoll.model.links import KINDS, Links
from ringcoll.model.plot import check_plot, plot_curves
from ringcoll.model.predict import Clock
from ringcoll.units import format_bytes, format_seconds, parse_ints, parse_sizes

EXAMPLES = """\
ringcoll model all_reduce --ranks 8 --alpha 2us --latency 1us
ringcoll model broadcast --algorithm chain --ranks 2-8 --slices 1-64 --plot chain.svg
ringcoll model all_reduce --algorithm ring,star.py:star --bytes 1K-1G
ringcoll model all_reduce --preset dgx-h100 --nodes 1,16,2048
"""


@dataclass(frozen=True, slots=True)
class _Case:
    """One algorithm for one number of ranks and one size."""

    collective: str
    algorithm: str
    nranks: int
    nbytes: int
    links: Links
    clock: Clock

    def __str__(self) -> str:
        return f"{self.algorithm}, {self.nranks} ranks, {format_bytes(self.nbytes)}"


@dataclass(frozen=True, slots=True)
class _Point:
    case: _Case
    answer: Answer

    @property
    def slices(self) -> int:
        return self.answer.slices


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``ringcoll model``."""
    add_call_arguments(parser)
    option = parser.add_argument
    option(
        "--algorithm",
        metavar="LIST",
        help="names, FILE.py:FUNCTION or MODULE:FUNCTION, separated by commas (default: all)",
    )
    option(
        "--ranks",
        type=typed(parse_ints),
        metavar="LIST",
        help="numbers of ranks, such as 4, 1-8 or 2,4,16 (default 4)",
    )
    option(
        "--bytes",
        type=typed(parse_sizes),
        metavar="LIST",
        help="bytes of the larger buffer, such as 64M or 1K,1M; 1K-1M doubles (default 64M)",
    )
    option(
        "--slices",
        type=typed(parse_ints),
        metavar="LIST",
        help="numbers of slices (default 1,2,4,16,64,256; above 1,024 ranks 1,4,16)",
    )
    add_link_arguments(parser)
    add_scale_arguments(parser)
    option("--plot", metavar="FILE", help="draw time over slices; .png or .svg")
    option("--json", metavar="FILE", help="write the points as JSON; - is stdout")


def add_scale_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--per-node`` and ``--preset``."""
    option = parser.add_argument_group("many nodes").add_argument
    option(
        "--per-node",
        type=int,
        metavar="RANKS",
        help="predict how times grow with the number of nodes, each of this many ranks: --nodes "
        "lists the numbers (default 1,2,4,...,2048) in place of --ranks, --plot draws time and "
        "busbw over them",
    )
    option(
        "--preset",
        metavar="NAME",
        help="nodes like this machine of `ringcoll topo --preset list`: its GPUs, links and "
        "network, where no option gives them",
    )


def main(args: argparse.Namespace) -> int:
    """Run ``ringcoll model``."""
    if args.plot is not None:
        check_plot(args.plot)
    check_target("--json", args.json)
    if args.per_node is not None or args.preset is not None:
        from ringcoll.cli.scale import main as scale

        return scale(args)
    names = args.algorithm or ",".join(ALGORITHMS[args.collective])
    algorithms = find_all(args.collective, names)
    wide = max(20, *(len(name_of(algorithm)) + 1 for algorithm in algorithms))
    quiet = args.json == "-"
    points: list[_Point] = []
    if not quiet:
        links, figures = links_of_any(args), figures_of(args)
        print(f"{args.collective} over {describe_links(links)}")
        if figures is not None:
            print(f"measured {figures.date}, {figures.source}")
        print(f"{links.topology}: {KINDS[links.topology]} (--links takes {', '.join(_KINDS)})")
        print(*unknown_costs(args, links), bold(_head(wide)), sep="\n")
    with progress("predicting") as shown:
        for case in _cases(args, algorithms, shown):
            few = _FEW_SLICES if case.nranks > _MANY_RANKS else _SLICES
            some = list(_points(case, args.slices or few, shown))
            points += some
            if not quiet:
                shown.print(*(_row(point, wide) for point in some))
    if not points:
        raise ArgumentError(f"{args.collective}: there is nothing that these options predict")
    if not quiet:
        print(_LEGEND)
    best: dict[_Case, Answer] = {}
    cases = dict.fromkeys(point.case for point in points)
    with progress("searching the best S", len(cases)) as shown:
        for case in cases:
            shown.step(str(case))
            if not quiet or args.plot is not None:
                best[case] = _best(case)
            if not quiet:
                shown.print("", *_summary(case, best[case]))
    if args.plot is not None:
        _plot(args, points, best)
    write_json(args.json, {"points": [_as_json(point) for point in points]})
    return 0


def links_of_any(args: argparse.Namespace) -> Links:
    """The links without their nodes, which differ from one number of ranks to the next."""
    return links_of(argparse.Namespace(**{**vars(args), "nodes": [1]}), 1)


def _cases(
    args: argparse.Namespace, algorithms: Sequence[Algorithm], shown: Progress
) -> Iterator[_Case]:
    for algorithm in algorithms:
        for nranks in args.ranks or [4]:
            if args.collective == "send" and nranks != 2:
                raise ArgumentError(f"--ranks {nranks}: a send has 2 ranks")
            links, name = links_of(args, nranks), name_of(algorithm)
            shown.part = f"{name}, {nranks} ranks"
            try:
                plan = plan_for(
                    args.collective,
                    algorithm,
                    nranks,
                    root=args.root,
                    nodes=links.nodes,
                    per_port=links.per_port,
                )
                clock = Clock(plan, links, window=args.window)
                clock.graph(1)
                if callable(algorithm):
                    say_unproven("model", plan, shown.print)
            except PlanError as error:
                shown.print(f"{name}, {nranks} ranks: left out: {error}", file=sys.stderr)
                continue
            # A barrier moves nothing, whatever --bytes says.
            sizes = args.bytes or (64 << 20,)
            for nbytes in sizes if args.collective != "barrier" else (0,):
                yield _Case(args.collective, name, nranks, nbytes, links, clock)


def _points(case: _Case, slices: list[int], shown: Progress) -> Iterator[_Point]:
    for count in slices if _is_sliced(case) else [1]:
        try:
            point = _Point(case, answer(case.clock, case.nbytes, count))
        except PlanError as error:
            shown.print(f"{case}, {count} slices: left out: {error}", file=sys.stderr)
            continue
        yield point


def _is_sliced(case: _Case) -> bool:
    """Plans with signals of their own have one slice, and so has a barrier."""
    return case.collective != "barrier" and not case.clock.plan.synchronised


_SLICES, _FEW_SLICES = [1, 2, 4, 16, 64, 256], [1, 4, 16]
_MANY_RANKS = 1024
"""Ranks above which a prediction takes seconds: fewer of them are made."""

_FEW_STEPS = 500
"""Steps of a plan up to which each S is searched, not powers of two alone."""

_MOST_NODES = 500_000
"""Steps, of all slices, beyond which no S is tried."""

_LEGEND = (
    "limit: the bytes of the busiest link at full rate; ramp: filling and draining the pipeline;\n"
    "overhead: alpha of every message; latency: L of every hop"
)

_KINDS = tuple(kind for kind in KINDS if kind != "machine")


def _head(wide: int) -> str:
    """The head of a table whose column of algorithms is so wide."""
    return (
        f"{'algorithm':<{wide}}{'ranks':>6}{'bytes':>10}{'slices':>7}{'time':>12}"
        f"{'algbw':>9}{'busbw':>9}{'speed-up':>9}{'times':>10}  most costs,\n"
        f"{'':<{wide + 35}}{'(GB/s)':>9}{'(GB/s)':>9}{'of S = 1':>9}{'its limit':>10}"
        "  beside bytes"
    )


def _row(point: _Point, wide: int) -> str:
    case, seconds = point.case, point.answer.seconds
    algbw = case.nbytes / seconds / 1e9 if seconds else math.nan
    once = case.clock.predict(case.nbytes).seconds
    text = (
        f"{case.algorithm:<{wide}}{case.nranks:>6}{format_bytes(case.nbytes):>10}{point.slices:>7}"
        f"{format_seconds(seconds):>12}"
    )
    if not seconds:
        return f"{text}{'-':>9}{'-':>9}{'-':>9}{'-':>10}  nothing"
    busbw = algbw * bus_factor(case.collective, case.nranks)
    times = f"{point.answer.times:>10.3g}" if point.answer.limit else f"{'-':>10}"
    text += f"{algbw:>9.3f}{busbw:>9.3f}{once / seconds:>9.2f}{times}"
    return f"{text}  {point.answer.costs_text}"


def _best(case: _Case) -> Answer:
    """The answer of the best S."""
    slices = 1
    if _is_sliced(case):
        steps = len(case.clock.plan.order)
        most = 2 if case.nranks > _MANY_RANKS else max(64, _MOST_NODES // max(1, steps))
        slices, _ = best_slices(case.clock, case.nbytes, most=most, only_powers=_is_rough(case))
    return answer(case.clock, case.nbytes, slices)


def _is_rough(case: _Case) -> bool:
    return len(case.clock.plan.order) > _FEW_STEPS


def _summary(case: _Case, best: Answer) -> Iterator[str]:
    yield bold(f"{case}:")
    links = case.links
    yield f"  limit: {best.limit_text}"
    if _is_sliced(case):
        among = "among powers of two" if _is_rough(case) else "searched"
        text = f"  best S {among}: {best.slices} takes {format_seconds(best.seconds)}"
        if best.limit:
            text += f", {best.times:.2f} times the limit"
        yield text + (f"; most costs {best.costs_text}" if best.costs else "")
    if (case.collective, case.algorithm) in CHAINS and not links.nodes and case.nranks > 1:
        figures = case.nranks, case.nbytes, links.bandwidth
        paper = chain_best_slices(*figures, links.alpha)
        value = "infinite, as alpha = 0" if paper == math.inf else f"{paper:.1f}"
        yield f"  best S by sqrt((k - 2)*N/(alpha*B)), at least 1: {value}"
        limits = chain_limits(*figures)
        one, many = format_seconds(limits.one), format_seconds(limits.many)
        yield f"  without alpha and L: S = 1 takes (k - 1)*N/B = {one}, S -> inf N/B = {many}"
    elif not links.nodes and links.topology == "switch":
        form = closed_form(case.collective, case.algorithm, case.nranks)
        if form is not None:
            terms = f"{form.messages}*alpha + {form.share:.4g}*N/B + {form.hops}*L"
            yield f"  S = 1 takes {terms} on a switch"


def _plot(args: argparse.Namespace, points: list[_Point], best: Mapping[_Case, Answer]) -> None:
    curves: dict[str, dict[int, float]] = {}
    for point in points:
        curves.setdefault(str(point.case), {})[point.slices] = point.answer.seconds
    for case, found in best.items():
        curves[str(case)][found.slices] = found.seconds
    title = f"{args.collective}, {describe_links(links_of_any(args))}"
    plot_curves(
        {name: sorted(curve.items()) for name, curve in curves.items()},
        title,
        args.plot,
        limits={a.limit_text.partition(",")[0]: a.limit for a in best.values() if a.limit},
    )
    say_written(args.plot)


def _as_json(point: _Point) -> dict[str, object]:
    return {
        "algorithm": point.case.algorithm,
        "ranks": point.case.nranks,
        "bytes": point.case.nbytes,
        "slices": point.slices,
        "seconds": point.answer.seconds,
        "limit": point.answer.limit,
        "wire": point.answer.wire,
        "terms": asdict(point.answer.terms),
    }
