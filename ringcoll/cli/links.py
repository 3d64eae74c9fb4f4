"""The options of all commands that predict: the call, and the links it runs over."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, get_args

from ringcoll.algorithms import ALGORITHMS
from ringcoll.errors import ArgumentError
from ringcoll.model.figures import Figures, measured_figures, read_figures
from ringcoll.model.links import Links, Topology, Wire, equal_nodes
from ringcoll.units import format_seconds, parse_bandwidth, parse_ints, parse_seconds

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


def add_call_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``COLLECTIVE``, ``--window`` and ``--root``."""
    parser.add_argument(
        "collective", choices=list(ALGORITHMS), metavar="COLLECTIVE", help=", ".join(ALGORITHMS)
    )
    option = parser.add_argument
    option("--window", type=int, default=2, metavar="W", help="slots of SCRATCH (default 2)")
    option("--root", type=int, default=0, metavar="RANK", help="root of the call (default 0)")


def add_link_arguments(parser: argparse.ArgumentParser, *, alpha: str = "0") -> None:
    """Add ``--bandwidth``, ``--alpha``, ``--latency``, ``--links``, ``--nodes`` and the like.

    ``alpha`` is what the command assumes where nothing gives it.
    """
    option = parser.add_argument_group("links").add_argument
    bandwidth, seconds = typed(parse_bandwidth), typed(parse_seconds)
    option(
        "--bandwidth",
        type=typed(_bandwidth),
        metavar="B",
        help="bytes a second of each link and direction, such as 10e9 or 10G (default 10G); "
        "`measured`: B, alpha and L of the newest timing run on this machine",
    )
    option("--figures", metavar="FILE", help="take B, alpha and L from this JSON of a timing run")
    option(
        "--alpha",
        type=seconds,
        metavar="SECONDS",
        help="time that each message occupies a link beside its bytes, such as 2us "
        f"(default {alpha})",
    )
    option(
        "--latency",
        type=seconds,
        metavar="SECONDS",
        help="L, the time of flight, in which the link carries the next message (default 0)",
    )
    option(
        "--links",
        choices=[kind for kind in get_args(Topology) if kind != "machine"],
        help="switch: one port a rank and direction (default); pairs: a link for each ordered "
        "pair of ranks; memory: one memory that all ranks share",
    )
    option(
        "--local-bandwidth",
        type=bandwidth,
        metavar="B",
        help="bytes a second of copies within a rank (default: no limit)",
    )
    option(
        "--nodes",
        type=typed(parse_ints),
        metavar="COUNT|LIST",
        help="number of equal nodes, or the ranks of each node, such as 4,2 (default 1)",
    )
    option(
        "--network-bandwidth",
        type=bandwidth,
        metavar="B",
        help="bytes a second of each rank's port to other nodes (default: --bandwidth)",
    )
    option(
        "--per-port",
        type=int,
        default=1,
        metavar="RANKS",
        help="ranks of a node that share such a port (default 1)",
    )
    for name in ("alpha", "latency"):
        text = f"the same between nodes (default: --{name})"
        option(f"--network-{name}", type=seconds, metavar="SECONDS", help=text)


def links_of(args: argparse.Namespace, nranks: int) -> Links:
    """The links that the options describe, for so many ranks."""
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
    """The links of one node: measured figures under those that the options give."""
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
    """The measured figures that the options name; None where they name none."""
    if args.figures is not None:
        if args.bandwidth not in (None, MEASURED):
            raise ArgumentError(
                f"--figures {args.figures} and --bandwidth {args.bandwidth:g} exclude each other; "
                f"leave one of them out"
            )
        return read_figures(args.figures)
    if args.bandwidth == MEASURED:
        from ringcoll.config import from_environment  # it loads numpy

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


def unknown_costs(args: argparse.Namespace, links: Links) -> tuple[str, ...]:
    """A warning where α or L is 0 because it is not known; none elsewhere."""
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
