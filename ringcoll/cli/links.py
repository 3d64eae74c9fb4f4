"""The options that say what the links are, for all commands that predict."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, get_args

from ringcoll.config import from_environment
from ringcoll.errors import ArgumentError
from ringcoll.model.figures import Figures, measured_figures, read_figures
from ringcoll.model.links import Links, Topology, Wire, equal_nodes
from ringcoll.units import format_seconds, parse_bandwidth, parse_ints, parse_seconds

__all__ = [
    "MEASURED",
    "add_link_arguments",
    "describe_links",
    "figures_of",
    "free_messages",
    "links_of",
    "typed",
]

MEASURED = "measured"
"""The bandwidth of a machine that a timing run has seen."""

_BANDWIDTH = 10e9

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
        type=typed(_bandwidth),
        metavar="B",
        help="bytes a second of each link and direction, such as 10e9 or 10G (default 10G), or "
        "`measured`: B, alpha and L of the newest timing run on this machine",
    )
    option(
        "--figures",
        metavar="FILE",
        help="B, alpha and L of the timing run that has written this JSON",
    )
    option(
        "--alpha",
        type=seconds,
        metavar="SECONDS",
        help="what each message occupies a link besides its bytes, such as 2e-6 or 2us (default 0)",
    )
    option(
        "--latency",
        type=seconds,
        metavar="SECONDS",
        help="flight: how much later data arrive, while the link is free again (default 0)",
    )
    option(
        "--links",
        choices=[kind for kind in get_args(Topology) if kind != "machine"],
        help="switch: one port a rank and direction (default); pairs: a wire for each ordered "
        "pair of ranks; memory: all share one memory",
    )
    option(
        "--local-bandwidth",
        type=bandwidth,
        metavar="B",
        help="bytes a second of copies within a rank (default: they cost nothing)",
    )
    option(
        "--nodes",
        type=typed(parse_ints),
        metavar="COUNT|LIST",
        help="how many equal nodes the ranks sit on, or how many ranks each node has (default 1)",
    )
    option(
        "--network-bandwidth",
        type=bandwidth,
        metavar="B",
        help="bytes a second of the port each rank has to other nodes (default: as --bandwidth)",
    )
    option(
        "--per-port",
        type=int,
        default=1,
        metavar="RANKS",
        help="how many ranks of a node share such a port (default 1)",
    )
    option("--network-alpha", type=seconds, metavar="SECONDS", help="α between nodes")
    option("--network-latency", type=seconds, metavar="SECONDS", help="L between nodes")


def links_of(args: argparse.Namespace, nranks: int) -> Links:
    """The links that the options describe, for so many ranks.

    Raises:
        ArgumentError: the nodes do not fit the ranks, or nothing was measured.

    """
    usual = _usual(args)
    nodes: tuple[int, ...] = ()
    sizes = args.nodes or [1]
    if len(sizes) > 1:
        nodes = tuple(node for node, size in enumerate(sizes) for _ in range(size))
        if len(nodes) != nranks:
            raise ArgumentError(f"--nodes: {sizes} hold {len(nodes)} ranks, not {nranks}")
    elif sizes != [1]:
        nodes = equal_nodes(nranks, sizes[0])
    given = args.network_bandwidth, args.network_alpha, args.network_latency
    network = None
    if any(figure is not None for figure in given):
        inside = usual.bandwidth, usual.alpha, usual.latency
        network = Wire(*(u if g is None else g for g, u in zip(given, inside, strict=True)))
    return replace(usual, nodes=nodes, network=network, per_port=args.per_port)


def _usual(args: argparse.Namespace) -> Links:
    """The links of one node: what was measured, where that is asked for, and what is given."""
    figures = figures_of(args)
    links = Links(_BANDWIDTH) if figures is None else figures.links()
    given = {
        "bandwidth": args.bandwidth if isinstance(args.bandwidth, float) else None,
        "alpha": args.alpha,
        "latency": args.latency,
        "topology": args.links,
        "local_bandwidth": args.local_bandwidth,
    }
    return replace(links, **{name: value for name, value in given.items() if value is not None})


def figures_of(args: argparse.Namespace) -> Figures | None:
    """The measured figures that the options ask for; None where they ask for none.

    Raises:
        ArgumentError: there are none, or a bandwidth is given too.

    """
    if args.figures is not None:
        if args.bandwidth not in (None, MEASURED):
            raise ArgumentError(
                f"--figures {args.figures}: --bandwidth {args.bandwidth:g} says something else; "
                f"leave one of them out"
            )
        return read_figures(args.figures)
    if args.bandwidth == MEASURED:
        _, settings = from_environment(os.environ)
        return measured_figures(settings.cache_dir)
    return None


def _bandwidth(text: str) -> float | str:
    return MEASURED if text.strip() == MEASURED else parse_bandwidth(text)


def describe_links(links: Links) -> str:
    """The figures in a line."""
    text = f"{_KINDS[links.topology]} of {_wire(links.inside)}"
    if links.nodes:
        text += f"; {len(set(links.nodes))} nodes"
        if links.network is not None:
            text += f", between them {_wire(links.network)}"
        if links.per_port > 1:
            text += f", {links.per_port} ranks a port"
    return text


_KINDS: dict[Topology, str] = {
    "switch": "a switch",
    "pairs": "links between pairs",
    "memory": "a shared memory",
    "machine": "the links of a machine",
}


def free_messages(args: argparse.Namespace, links: Links) -> tuple[str, ...]:
    """A warning for people where α or L is 0 since nobody knows it; none elsewhere."""
    unknown = [
        name
        for name in ("alpha", "latency")
        if getattr(args, name) is None and not getattr(links, name)
    ]
    if not unknown:
        return ()
    faster = {"alpha": "many slices", "latency": "small sizes"}
    what = " and ".join(faster[name] for name in reversed(unknown))
    options = " and ".join(f"--{name}" for name in unknown)
    return (
        f"no {' and no '.join(unknown)} known, 0 assumed: {what} look faster than they are "
        f"({options})",
    )


def _wire(wire: Wire) -> str:
    alpha, latency = format_seconds(wire.alpha), format_seconds(wire.latency)
    return f"B = {wire.bandwidth / 1e9:.4g} GB/s, alpha = {alpha}, L = {latency}"
