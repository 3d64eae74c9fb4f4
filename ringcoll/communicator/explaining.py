"""``Communicator.explain``: what a call of a size runs and why, and what other sizes run.

The range of sizes of a choice is found by choosing for other sizes, so no threshold stands twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES, Collective
from ringcoll.communicator.across import NETWORK
from ringcoll.communicator.selection import AGREED_BYTES, tuned
from ringcoll.communicator.topology import Topology
from ringcoll.config import Config
from ringcoll.dtypes import dtype_of, op_of
from ringcoll.errors import Error
from ringcoll.executors.cuda.choose import choose
from ringcoll.executors.cuda.kernel_choice import KernelChoice
from ringcoll.executors.cuda.limits import KernelOptions, Resources
from ringcoll.launch import ALL_MAPPED, Launch
from ringcoll.plan import Buffer, Plan

_MOST_BYTES = 1 << 36
"""The largest size for which a choice is searched."""

_DTYPE = dtype_of("float32")

Chooser = Callable[[int], KernelChoice]
"""Chooses for a size, in units: the smallest size that all ranks can share."""


def explain_cpu(
    collective: str,
    nbytes: int,
    nranks: int,
    nodes: tuple[int, ...],
    topology: Topology,
    config: Config,
) -> str:
    """Which algorithm CPU ranks run for a size, and the tuner's candidates, in lines of text."""
    choice = tuned(
        collective,
        nranks,
        nbytes,
        deterministic=bool(config.deterministic),
        nodes=nodes,
        machine=topology.machine,
    )
    where = "staged at once" if nbytes <= AGREED_BYTES else "agreed first, zero-copy if it can be"
    ranks = f"{nranks} CPU ranks"
    if nodes:
        sizes = "+".join(str(nodes.count(node)) for node in range(max(nodes) + 1))
        ranks += f" on {max(nodes) + 1} nodes ({sizes}), messages between them by MPI"
    lines = [f"{collective}, {nbytes} bytes, {ranks}: {where}"]
    if topology.system is not None:
        lines += topology.format_use(collective, config.channels)
    if nodes:
        lines.append(
            f"a network of {NETWORK.bandwidth / 1e9:g} GB/s a rank is assumed, not measured"
        )
    if config.algorithm is not None:
        lines.append(f"algorithm={config.algorithm!r} is set; the tuner compares:")
    return "\n".join([*lines, *(f"  {reason}" for reason in choice.reasons)])


def explain_gpu(
    collective: str,
    nbytes: int,
    resources: Resources,
    *,
    topology: Topology,
    options: KernelOptions,
    check: Callable[[KernelChoice], None],
) -> str:
    """Algorithm, protocol, slices and blocks for buffers of both kinds, in lines of text.

    ``nbytes`` is rounded down to a whole number of float32 for each rank. ``check`` raises an
    Error for a choice that the options do not allow.
    """
    nranks = resources.nranks
    kind = Collective(collective, nranks)
    unit = _DTYPE.itemsize * max(1, kind.segments("INPUT"), kind.segments("OUTPUT"))
    units = nbytes // unit if collective != "barrier" else 0
    lines = [
        f"{collective}, {nbytes} bytes (as float32), {nranks} GPU ranks, "
        f"at most {resources.blocks} CUDA blocks each"
    ]
    lines += topology.format_use(collective, options.channels)
    lines += _settings(options)
    uneven = COLLECTIVES[collective].uneven
    shared = frozenset(b for b in ALL_MAPPED if units and b.name.lower() != uneven)
    parts = []
    for mapped in (shared, frozenset[Buffer]()):
        chooser = _chooser(collective, unit, resources, options, mapped)
        try:
            found = chooser(units)
            check(found)
        except Error as error:
            parts.append([f"refused: {error}"])
        else:
            parts.append(list(_lines(found, chooser, units, unit)))
    titles = ("buffers of comm.empty", "buffers of plain memory")
    for title, part in zip(
        ("buffers of any kind",) if parts[0] == parts[1] else titles, parts, strict=False
    ):
        lines += [f"{title}:", *(f"  {line}" for line in part)]
    return "\n".join(lines)


def _settings(options: KernelOptions) -> Iterator[str]:
    """The options that are set, a line each."""
    given = {
        "algorithm": options.algorithm,
        "protocol": options.protocol,
        "slices": options.slices,
        "channels": options.channels,
        "max_sms": options.blocks,
        "engine": options.engine,
    }
    if options.plan is not None:
        given["algorithm"] = "a function of yours"
    for name, value in given.items():
        if value is not None:
            yield f"{name}={value!r} is set"


def _chooser(
    collective: str,
    unit: int,
    resources: Resources,
    options: KernelOptions,
    mapped: frozenset[Buffer],
) -> Chooser:
    """Chooses for calls whose buffers in ``mapped`` peers can reach."""
    op = op_of("sum") if COLLECTIVES[collective].reduces else None

    def chooser(units: int) -> KernelChoice:
        nbytes = units * unit
        call = Call(collective, 0, None, None, units, _DTYPE, op, nbytes=nbytes)
        return choose(call, resources, mapped=mapped, options=options)

    return chooser


def _lines(found: KernelChoice, chooser: Chooser, units: int, unit: int) -> Iterator[str]:
    """What runs, and the sizes for which it is chosen."""
    launch = found.launch
    blocks = f"{found.blocks} {'block' if found.blocks == 1 else 'blocks'}"
    if found.engine == "copy":
        blocks = f"{blocks if found.blocks else 'no block'} beside them"
    yield (
        f"{_name(found)} by {_means(found)}, S = {launch.slices}, "
        f"{blocks} of {found.threads} threads"
    )
    if launch.in_band:
        yield "signals ride in the data, so the call has one slice"
    elif launch.mapped:
        yield f"signals are words of their own; {_reached(found)}"
        if found.direct is not None:
            other, kind = found.direct, found.plan.collective.kind
            yield (
                f"if the root's {kind.rooted.upper()} is of comm.empty too, by its hello: "
                f"S = {other.launch.slices}, {other.blocks} of the blocks; {_reached(other)}"
            )
    else:
        yield (
            "signals are words of their own; what peers exchange goes through SCRATCH, in slices "
            "that fit it"
        )
    if found.plan.collective.name == "barrier":
        return
    if found.why:
        yield "the clock on this machine's links:"
        yield from (f"  {reason}" for reason in found.why)
    limit = _MOST_BYTES // unit
    least, most = _edge(chooser, units, 0), _edge(chooser, units, max(limit, units))
    upper = f"{most * unit} bytes" if most < limit else "any size"
    yield f"chosen from {least * unit} bytes to {upper}"
    for side, beyond in (("below", least - 1), ("above", most + 1)):
        if 0 <= beyond <= limit:
            with contextlib.suppress(Error):
                other = chooser(beyond)
                yield (f"{side}: {_name(other)} by {_means(other)}, S = {other.launch.slices}")


def _reached(found: KernelChoice) -> str:
    """The buffers that peers read or write directly."""
    names = " and ".join(sorted(buffer.name for buffer in found.launch.mapped))
    return f"peers reach {names} without a copy"


def _means(found: KernelChoice) -> str:
    """The protocol, or "copy engines"."""
    return "copy engines" if found.engine == "copy" else found.launch.protocol


def _edge(chooser: Chooser, units: int, limit: int) -> int:
    """The size between ``units`` and ``limit`` up to which the same is chosen.

    Distances double until the choice differs, then bisection finds the edge.
    """

    def kind(found: KernelChoice) -> list[tuple[Launch, Plan]]:
        return [(variant.launch, variant.plan) for variant in found.variants]

    wanted = kind(chooser(units))

    def same(size: int) -> bool:
        with contextlib.suppress(Error):
            return kind(chooser(size)) == wanted
        return False

    inside, distance = units, 1
    while inside != limit:
        down = limit < units
        tried = max(limit, inside - distance) if down else min(limit, inside + distance)
        if not same(tried):
            break
        inside, distance = tried, 2 * distance
    else:
        return limit
    while abs(tried - inside) > 1:
        middle = (tried + inside) // 2
        if same(middle):
            inside = middle
        else:
            tried = middle
    return inside


def _name(found: KernelChoice) -> str:
    """The algorithm, and the number of its rings."""
    source = found.source
    if source is None or not source.algorithm:
        return "your algorithm"
    rings = len(source.channels.rings) if source.channels is not None else 1
    return source.algorithm if rings == 1 else f"{source.algorithm} on {rings} rings"
