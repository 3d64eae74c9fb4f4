"""What ranks run for a size, and why: the same choice that a call makes, and its neighbours.

The thresholds are nowhere repeated: how far a choice holds is found by asking for other sizes.
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
"""Sizes beyond are not asked for."""

_DTYPE = dtype_of("float32")

Chooser = Callable[[int], KernelChoice]
"""What runs for so many units of the smallest size that all ranks can share."""


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
        lines.append(f"algorithm={config.algorithm!r} is set; the tuner would look at:")
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

    ``nbytes`` is rounded down to a whole number of float32 for each rank. ``check`` raises where
    the options refuse what was chosen.
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
    rooted = COLLECTIVES[collective].rooted
    shared = frozenset(b for b in ALL_MAPPED if units and b.name.lower() != rooted)
    said = []
    for mapped in (shared, frozenset[Buffer]()):
        asked = _asking(collective, unit, resources, options, mapped)
        try:
            found = asked(units)
            check(found)
        except Error as error:
            said.append([f"refused: {error}"])
        else:
            said.append(list(_lines(found, asked, units, unit)))
    titles = ("buffers of comm.empty", "buffers of plain memory")
    for title, part in zip(
        ("buffers of any kind",) if said[0] == said[1] else titles, said, strict=False
    ):
        lines += [f"{title}:", *(f"  {line}" for line in part)]
    return "\n".join(lines)


def _settings(options: KernelOptions) -> Iterator[str]:
    """The options that go before the library's own choice."""
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


def _asking(
    collective: str,
    unit: int,
    resources: Resources,
    options: KernelOptions,
    mapped: frozenset[Buffer],
) -> Chooser:
    """What a call of so many units would run, of buffers that peers can reach or not."""
    op = op_of("sum") if COLLECTIVES[collective].reduces else None

    def asked(units: int) -> KernelChoice:
        nbytes = units * unit
        call = Call(collective, 0, None, None, units, _DTYPE, op, nbytes=nbytes)
        return choose(call, resources, mapped=mapped, options=options)

    return asked


def _lines(found: KernelChoice, asked: Chooser, units: int, unit: int) -> Iterator[str]:
    """What runs, how, and from where to where."""
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
                f"if the root's {kind.rooted.upper()} is of comm.empty too, as its hello says: "
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
    least, most = _edge(asked, units, 0), _edge(asked, units, max(limit, units))
    upper = f"{most * unit} bytes" if most < limit else "any size"
    yield f"chosen from {least * unit} bytes to {upper}"
    for side, beyond in (("below", least - 1), ("above", most + 1)):
        if 0 <= beyond <= limit:
            with contextlib.suppress(Error):
                other = asked(beyond)
                yield (f"{side}: {_name(other)} by {_means(other)}, S = {other.launch.slices}")


def _reached(found: KernelChoice) -> str:
    """What nobody copies for its peers."""
    names = " and ".join(sorted(buffer.name for buffer in found.launch.mapped))
    return f"peers reach {names} without a copy"


def _means(found: KernelChoice) -> str:
    """The protocol, or what moves data instead of kernels."""
    return "copy engines" if found.engine == "copy" else found.launch.protocol


def _edge(asked: Chooser, units: int, limit: int) -> int:
    """The size farthest from ``units`` that gets the same, on the way to ``limit``.

    Distances double until something else is chosen; the edge between is found by halving.
    """

    def kind(found: KernelChoice) -> list[tuple[Launch, Plan]]:
        return [(variant.launch, variant.plan) for variant in found.variants]

    wanted = kind(asked(units))

    def same(size: int) -> bool:
        with contextlib.suppress(Error):
            return kind(asked(size)) == wanted
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
    """The algorithm whose plan it is, and on how many rings."""
    source = found.source
    if source is None or not source.algorithm:
        return "your algorithm"
    rings = len(source.channels.rings) if source.channels is not None else 1
    return source.algorithm if rings == 1 else f"{source.algorithm} on {rings} rings"
