"""``ringcoll model --per-node``: how times grow with the nodes, and which algorithm is fastest."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence

from ringcoll.algorithms import ALGORITHMS, name_of
from ringcoll.algorithms.load import find_all
from ringcoll.cli.links import describe_links, figures_of, links_of, unknown_costs
from ringcoll.cli.output import bold, progress, say_written, write_json
from ringcoll.errors import ArgumentError, PlanError
from ringcoll.model.closed_form import bus_factor
from ringcoll.model.links import Links
from ringcoll.model.machine import node_figures
from ringcoll.model.scale import Growth, Point, Span, fastest, winners
from ringcoll.topology.presets import preset
from ringcoll.units import format_bytes, format_seconds

_ALGORITHMS = ("ring", "tree", "hierarchical")
_NODES = [1 << power for power in range(12)]
_SIZES = tuple(1 << power for power in range(10, 31, 4))
_MOST = 16384
"""Ranks up to which this has been tried."""

_Table = Mapping[tuple[int, int], tuple[Point, ...]]
"""By nodes and bytes, the point of each algorithm."""


def main(args: argparse.Namespace) -> int:
    """Run ``ringcoll model --per-node``."""
    quiet = args.json == "-"
    args, sources = _completed(args)
    numbers, sizes = args.nodes or _NODES, sorted(set(args.bytes or _SIZES))
    if args.collective == "barrier":
        raise ArgumentError("--per-node: a barrier moves nothing")
    growths = _growths(args)
    if not quiet:
        # At once: the first table takes seconds.
        head = f"{args.collective} on nodes of {args.per_node}: {_figures(args)}"
        print(head, *sources, *unknown_costs(args, _links(args, 2)), sep="\n", flush=True)
        if args.network_latency is None and not figures_of(args) and max(numbers) > 1:
            print(
                "no latency between nodes known, that of a node assumed: many nodes look faster "
                "than they are (--network-latency)"
            )
    table: dict[tuple[int, int], tuple[Point, ...]] = {}
    refused: dict[str, str] = {}
    spans: dict[int, tuple[Span, ...]] = {}
    with progress("predicting", len(sizes) * len(numbers) + len(numbers)) as shown:
        for nbytes in sizes:
            for nodes in numbers:
                shown.step(f"{format_bytes(nbytes)} on {nodes * args.per_node} ranks")
                table[nodes, nbytes] = _best_points(growths, args, nodes, nbytes, refused)
            if not quiet:
                shown.print("", *_block(args, table, numbers, nbytes, growths))
        shown.print(*(f"left out: {text}" for text in refused.values()), file=sys.stderr)
        for nodes in numbers:
            shown.step(f"the fastest on {nodes * args.per_node} ranks")
            spans[nodes] = _spans(growths, args, nodes, sizes, table)
    if not quiet and len(growths) > 1 and len(sizes) > 1:
        print("\n" + "\n".join(_crossovers(args, spans)))
    points = [point for found in table.values() for point in found]
    if args.plot is not None:
        _plot(args, points)
    write_json(args.json, _as_json(args, points, spans))
    return 0


def _completed(args: argparse.Namespace) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """The options, with a preset's figures where none are given, and where these are from."""
    if args.ranks is not None:
        raise ArgumentError("--ranks: --per-node and --nodes say how many ranks there are")
    if args.preset is None:
        return args, ()
    machine = node_figures(preset(args.preset))
    values = dict(vars(args))
    given = {
        "per_node": machine.gpus,
        "network_bandwidth": machine.network,
        "bandwidth": machine.bandwidth if args.figures is None else None,
    }
    overheads = {
        "alpha": (machine.alpha, "alpha"),
        "latency": (machine.latency, "L"),
        "network_alpha": (machine.network_alpha, "alpha between nodes"),
        "network_latency": (machine.network_latency, "L between nodes"),
    }
    if figures_of(args) is not None:  # alpha and L were measured
        overheads = {name: overheads[name] for name in ("network_alpha", "network_latency")}
    sources = []
    for name, (known, what) in overheads.items():
        if values[name] is None and known.seconds is not None:
            given[name] = known.seconds
            sources.append(known.describe(what))
    values.update({name: value for name, value in given.items() if values[name] is None})
    if values["network_bandwidth"] is None:
        raise ArgumentError(
            f"--preset {args.preset}: this machine has no network ports; give --network-bandwidth"
        )
    return argparse.Namespace(**values), tuple(sources)


def _figures(args: argparse.Namespace) -> str:
    return describe_links(_links(args, 2)).replace("; 2 nodes", "")


def _links(args: argparse.Namespace, nodes: int) -> Links:
    values = {**vars(args), "nodes": [nodes]}
    return links_of(argparse.Namespace(**values), nodes * args.per_node)


def _growths(args: argparse.Namespace) -> dict[str, Growth]:
    usual = [name for name in _ALGORITHMS if name in ALGORITHMS[args.collective]]
    names = args.algorithm or ",".join(usual)
    if not names:
        raise ArgumentError(
            f"{args.collective} has none of {', '.join(_ALGORITHMS)}; name one by --algorithm"
        )
    growths = {
        name_of(algorithm): Growth(
            args.collective,
            algorithm,
            args.per_node,
            lambda nodes: _links(args, nodes),
            root=args.root,
            window=args.window,
        )
        for algorithm in find_all(args.collective, names)
    }
    most = max(args.nodes or _NODES) * args.per_node
    if most > _MOST:
        raise ArgumentError(f"--nodes: {most} ranks; up to {_MOST} can be predicted")
    return growths


def _best_points(
    growths: Mapping[str, Growth],
    args: argparse.Namespace,
    nodes: int,
    nbytes: int,
    refused: dict[str, str],
) -> tuple[Point, ...]:
    """The best point of each algorithm that has one."""
    points = []
    for name, growth in growths.items():
        if name in refused:
            continue
        try:
            points.append(growth.best(nodes, nbytes, args.slices or ()))
        except PlanError as error:
            refused[name] = f"{name} from {nodes} nodes on: {error}"
    if not points:
        raise ArgumentError(f"{args.collective}: there is nothing that these options predict")
    return tuple(points)


def _spans(
    growths: Mapping[str, Growth],
    args: argparse.Namespace,
    nodes: int,
    sizes: Sequence[int],
    table: _Table,
) -> tuple[Span, ...]:
    known = {nbytes: fastest(table[nodes, nbytes]).algorithm for nbytes in sizes}

    def ask(nbytes: int) -> str:
        return fastest(_best_points(growths, args, nodes, nbytes, {})).algorithm

    return winners(ask, sizes, known)


def _block(
    args: argparse.Namespace,
    table: _Table,
    numbers: Sequence[int],
    nbytes: int,
    growths: Mapping[str, Growth],
) -> Iterator[str]:
    """The lines of one size: a line a number of nodes, a column an algorithm."""
    heads = "".join(f"{name:>14}" for name in growths)
    columns = f"{'algbw':>9}{'busbw':>9}{'x limit':>9}  most costs, beside bytes"
    yield f"{format_bytes(nbytes)}, GB/s of the fastest"
    yield bold(f"{'nodes':>6}{'ranks':>7}{heads}  {'fastest':<20}{columns}")
    for nodes in numbers:
        points = {point.algorithm: point for point in table[nodes, nbytes]}
        times = "".join(
            f"{format_seconds(points[name].seconds) if name in points else '-':>14}"
            for name in growths
        )
        best = fastest(table[nodes, nbytes])
        algbw, busbw = _bandwidths(args.collective, best)
        what = best.algorithm + (f" S={best.slices}" if best.slices > 1 else "")
        shown = f"{nodes:>6}{best.nranks:>7}{times}  {what:<20}"
        if not best.seconds:
            yield f"{shown}{'-':>9}{'-':>9}{'-':>9}  -"
            continue
        answer = growths[best.algorithm].answer(best)
        yield f"{shown}{algbw:>9.3f}{busbw:>9.3f}{answer.times:>9.3g}  {answer.costs_text}"


def _bandwidths(collective: str, point: Point) -> tuple[float, float]:
    """Bandwidths in GB/s, algbw and busbw; 0 of a call that takes no time."""
    algbw = point.nbytes / point.seconds / 1e9 if point.seconds else 0.0
    return algbw, algbw * bus_factor(collective, point.nranks)


def _crossovers(args: argparse.Namespace, spans: Mapping[int, Sequence[Span]]) -> Iterator[str]:
    yield "the fastest from which size on, to a factor of two"
    for nodes, found in spans.items():
        first, *others = found
        later = "".join(f", {span.algorithm} from {format_bytes(span.first)}" for span in others)
        yield f"{nodes:>6}{nodes * args.per_node:>7}  {first.algorithm}{later}"


def _plot(args: argparse.Namespace, points: Sequence[Point]) -> None:
    from ringcoll.model.plot import plot_scaling

    curves: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    for point in points:
        name = point.algorithm, format_bytes(point.nbytes)
        busbw = _bandwidths(args.collective, point)[1]
        curves.setdefault(name, []).append((point.nodes, point.seconds, busbw))
    title = f"{args.collective} on nodes of {args.per_node}\n{_figures(args)}"
    plot_scaling({name: sorted(curve) for name, curve in curves.items()}, title, args.plot)
    say_written(args.plot)


def _as_json(
    args: argparse.Namespace, points: Sequence[Point], spans: Mapping[int, Sequence[Span]]
) -> dict[str, object]:
    return {
        "points": [
            {
                "algorithm": point.algorithm,
                "nodes": point.nodes,
                "ranks": point.nranks,
                "bytes": point.nbytes,
                "slices": point.slices,
                "seconds": point.seconds,
                "algbw": algbw,
                "busbw": busbw,
            }
            for point in points
            for algbw, busbw in (_bandwidths(args.collective, point),)
        ],
        "fastest": [
            {
                "nodes": nodes,
                "algorithm": span.algorithm,
                "first_bytes": span.first,
                "last_bytes": span.last,
            }
            for nodes, found in spans.items()
            for span in found
        ],
    }
