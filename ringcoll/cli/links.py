"""The options that say what the links are, for all commands that predict."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, get_args

from ringcoll.cli.ranges import parse_ints
from ringcoll.cli.sizes import format_seconds, parse_bandwidth, parse_seconds
from ringcoll.errors import ArgumentError
from ringcoll.timing.links import Links, Topology, Wire, equal_nodes

__all__ = ["add_link_arguments", "describe_links", "links_of", "typed", "write_json"]

_Parsed = TypeVar("_Parsed")


def typed(parse: Callable[[str], _Parsed]) -> Callable[[str], _Parsed]:
    """A parser of ours as the ``type=`` of an option: argparse shows its message."""

    def parsed(text: str) -> _Parsed:
        try:
            return parse(text)
        except ArgumentError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def add_link_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--bandwidth``, ``--alpha``, ``--latency``, ``--links``, ``--nodes`` and the like."""
    option = parser.add_argument_group("links").add_argument
    bandwidth, seconds = typed(parse_bandwidth), typed(parse_seconds)
    option(
        "--bandwidth",
        type=bandwidth,
        default=10e9,
        metavar="B",
        help="bytes a second of each link and direction, such as 10e9 or 10G (default 10G)",
    )
    option(
        "--alpha",
        type=seconds,
        default=0.0,
        metavar="SECONDS",
        help="what each message occupies a link besides its bytes, such as 2e-6 or 2us (default 0)",
    )
    option(
        "--latency",
        type=seconds,
        default=0.0,
        metavar="SECONDS",
        help="flight: how much later data arrive, while the link is free again (default 0)",
    )
    option(
        "--links",
        choices=get_args(Topology),
        default="switch",
        help="switch: one port a rank and direction (default); pairs: a wire for each ordered "
        "pair of ranks; memory: all share one memory",
    )
    option(
        "--local-bandwidth",
        type=bandwidth,
        default=math.inf,
        metavar="B",
        help="bytes a second of copies within a rank (default: they cost nothing)",
    )
    option(
        "--nodes",
        type=typed(parse_ints),
        default=[1],
        metavar="COUNT|LIST",
        help="how many equal nodes the ranks sit on, or how many ranks each node has (default 1)",
    )
    option(
        "--network-bandwidth",
        type=bandwidth,
        metavar="B",
        help="bytes a second of the port each rank has to other nodes (default: as --bandwidth)",
    )
    option("--network-alpha", type=seconds, metavar="SECONDS", help="α between nodes")
    option("--network-latency", type=seconds, metavar="SECONDS", help="L between nodes")


def links_of(args: argparse.Namespace, nranks: int) -> Links:
    """The links that the options describe, for so many ranks.

    Raises:
        ArgumentError: the nodes do not fit the ranks.

    """
    nodes: tuple[int, ...] = ()
    if len(args.nodes) > 1:
        nodes = tuple(node for node, size in enumerate(args.nodes) for _ in range(size))
        if len(nodes) != nranks:
            raise ArgumentError(f"--nodes: {args.nodes} hold {len(nodes)} ranks, not {nranks}")
    elif args.nodes != [1]:
        nodes = equal_nodes(nranks, args.nodes[0])
    given = args.network_bandwidth, args.network_alpha, args.network_latency
    network = None
    if any(figure is not None for figure in given):
        usual = args.bandwidth, args.alpha, args.latency
        network = Wire(*(u if g is None else g for g, u in zip(given, usual, strict=True)))
    return Links(
        args.bandwidth,
        args.alpha,
        args.latency,
        args.links,
        args.local_bandwidth,
        nodes,
        network,
    )


def describe_links(links: Links) -> str:
    """The figures in a line."""
    text = f"{links.topology} of " + _wire(links.inside)
    if links.nodes:
        text += f"; {len(set(links.nodes))} nodes"
        if links.network is not None:
            text += f", between them {_wire(links.network)}"
    return text


def _wire(wire: Wire) -> str:
    alpha, latency = format_seconds(wire.alpha), format_seconds(wire.latency)
    return f"B = {wire.bandwidth / 1e9:.4g} GB/s, alpha = {alpha}, L = {latency}"


def write_json(target: str | None, text: str) -> None:
    """Write JSON to a file, or to stdout for ``-``.

    Raises:
        ArgumentError: the file cannot be written.

    """
    if target == "-":
        sys.stdout.write(text + "\n")
    elif target is not None:
        try:
            Path(target).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ArgumentError(f"--json {target}: {error.strerror or error}") from None
