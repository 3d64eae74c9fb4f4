"""``Communicator.explain``: what a call of a size runs and why, and what other sizes run.

It shows the choice that a call of this size gets. The range of sizes of a choice is found by
choosing for other sizes, so no threshold stands twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ringcoll.algorithms import name_of
from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES, Collective
from ringcoll.config import Config
from ringcoll.dtypes import dtype_of, op_of
from ringcoll.errors import Error
from ringcoll.launch import ALL_MAPPED, Launch
from ringcoll.plan import Buffer, Plan
from ringcoll.tuner.choice import Choice, Limits, limits_of
from ringcoll.tuner.cpu import waits_for_hellos
from ringcoll.tuner.measured import NETWORK, STAGED_CALLS
from ringcoll.tuner.predicted import predicted
from ringcoll.tuner.proof import prove_algorithm

if TYPE_CHECKING:
    from ringcoll.communicator.cpu.rank_calls import RankCalls
    from ringcoll.communicator.cuda.state import CudaState

_MOST_BYTES = 1 << 36
"""The largest size for which a choice is searched."""

_DTYPE = dtype_of("float32")

_TITLES = ("buffers of comm.empty", "buffers of plain memory")
_KINDS = ALL_MAPPED, frozenset[Buffer]()

Chooser = Callable[[int], Choice]
"""Chooses for a size, in units: the smallest size that all ranks can share."""


def call_of(collective: str, nbytes: int, nranks: int) -> Call:
    """A call of this size, as its rank 0 makes it; its count is rounded down."""
    op = op_of("sum") if COLLECTIVES[collective].reduces else None
    count = 0 if collective == "barrier" else nbytes // _unit(collective, nranks)
    return Call(collective, 0, None, None, count, _DTYPE, op, nbytes=nbytes)


def _unit(collective: str, nranks: int) -> int:
    """Bytes of the smallest call: an element for each segment of the larger buffer."""
    kind = Collective(collective, nranks)
    return _DTYPE.itemsize * max(1, kind.segments("INPUT"), kind.segments("OUTPUT"))


def explain_cpu(call: Call, state: RankCalls, config: Config) -> str:
    """The candidates of CPU ranks, and what runs for buffers of both kinds, in lines of text."""
    titles: tuple[str, ...] = ("buffers of any kind",)
    where = "staged, without a handshake"
    if waits_for_hellos(call, limits_of(call, config, state.config)):
        titles, where = _TITLES, "by a handshake, staged where need be"
    title = f"{call.collective}, {call.nbytes} bytes, {_ranks(state, 'CPU')}: {where}"
    return "\n".join([title, *_on_host(call, state, config, titles)])


def explain_pieces(call: Call, piece: Call, most: int, state: RankCalls, config: Config) -> str:
    """How GPU ranks on several nodes carry a call, and what its first piece runs between them."""
    title = (
        f"{call.collective}, {call.nbytes} bytes, {_ranks(state, 'GPU')}; between them in pinned "
        f"host memory, in pieces of at most {most} bytes, each by:"
    )
    titles = (f"a piece of {piece.nbytes} bytes",)
    return "\n".join([title, *_on_host(piece, state, config, titles)])


def _ranks(state: RankCalls, kind: str) -> str:
    nodes, text = state.fabric.nodes, f"{state.fabric.nranks} {kind} ranks"
    if not nodes:
        return text
    sizes = "+".join(str(nodes.count(node)) for node in range(max(nodes) + 1))
    return f"{text} on {max(nodes) + 1} nodes ({sizes}), messages between them by MPI"


def _on_host(call: Call, state: RankCalls, config: Config, titles: Sequence[str]) -> Iterator[str]:
    """What is compared, and what runs: of the titles the first is for symmetric memory."""
    machine, limits = state.machine, limits_of(call, config, state.config)
    if state.topology.system is not None:
        yield from state.topology.format_use(call.collective, config.channels)
    if machine.nodes:
        network = NETWORK.value.bandwidth / 1e9
        yield f"a network of {network:g} GB/s a rank is assumed, not measured"
    if limits.algorithm is not None:
        given = config.algorithm
        shown = name_of(given) if callable(given) else repr(given)
        yield f"algorithm={shown} is set; the tuner compares:"
    elif machine.table is not None and any(
        machine.table.options(call, replace(limits, mapped=mapped)) for mapped in _KINDS
    ):
        yield "a tuning table decides; the timing model says:"
    compared = predicted(call.collective, call.nbytes, machine, limits)
    yield from (f"  {reason}" for reason in compared.reasons)
    for title, mapped in zip(titles, _KINDS, strict=False):
        try:
            found = state.choice(call, config, mapped)
        except Error as error:
            yield f"{title}: refused: {error}"
            continue
        yield f"{title}: {_name(found)}, S = {found.launch.slices}, {_reached(found)}"
        if found.why != compared.reasons:  # by a table
            yield from (f"  {reason}" for reason in found.why)


def format_choice(call: Call, found: Choice, limits: Limits) -> str:
    """What a call of CPU ranks runs, as one line for the log."""
    given, channels = limits.algorithm, limits.channels
    if callable(given):
        by = f"{name_of(given)} (algorithm= is a function)"
    elif given is not None:
        by = f"{given} (algorithm={given!r})"
    else:
        how = "the tuner's choice" if channels is None else f"channels={channels}"
        by = f"{found.algorithm} ({how})"
    return (
        f"{call.tagged(call.signature())}, {call.nbytes} bytes: {by}, S = {found.launch.slices}, "
        f"{_reached(found)}"
    )


def explain_gpu(collective: str, nbytes: int, state: CudaState, config: Config) -> str:
    """Algorithm, protocol, slices and blocks for buffers of both kinds, in lines of text.

    ``nbytes`` is rounded down to a whole number of float32 for each rank.
    """
    machine = state.cuda.machine
    unit = _unit(collective, machine.nranks)
    units = nbytes // unit if collective != "barrier" else 0
    call = call_of(collective, units * unit, machine.nranks)
    limits = limits_of(call, config, state.config)
    prove_algorithm(call, machine.nranks, limits)
    lines = [
        f"{collective}, {nbytes} bytes (as float32), {machine.nranks} GPU ranks, "
        f"at most {machine.blocks} CUDA blocks each"
    ]
    lines += state.topology.format_use(collective, limits.channels)
    lines += _settings(limits)
    parts = []
    for mapped in (reachable(call), frozenset[Buffer]()):

        def chooser(units: int, mapped: frozenset[Buffer] = mapped) -> Choice:
            return state.choice(call_of(collective, units * unit, machine.nranks), config, mapped)

        try:
            found = chooser(units)
        except Error as error:
            parts.append([f"refused: {error}"])
        else:
            parts.append(list(_lines(found, chooser, units, unit)))
    titles = ("buffers of any kind",) if parts[0] == parts[1] else _TITLES
    for title, part in zip(titles, parts, strict=False):
        lines += [f"{title}:", *(f"  {line}" for line in part)]
    return "\n".join(lines)


def reachable(call: Call) -> frozenset[Buffer]:
    """The buffers of GPU ranks that all know to be mapped where all are of ``comm.empty``."""
    uneven = COLLECTIVES[call.collective].uneven
    return frozenset(b for b in ALL_MAPPED if call.count and b.name.lower() != uneven)


def _settings(limits: Limits) -> Iterator[str]:
    """The options that are set, a line each."""
    for name in ("algorithm", "protocol", "slices", "channels", "blocks", "engine"):
        value = getattr(limits, name)
        if value is not None:
            shown = "a function of yours" if callable(value) else value
            yield f"{'max_sms' if name == 'blocks' else name}={shown!r} is set"


def _lines(found: Choice, chooser: Chooser, units: int, unit: int) -> Iterator[str]:
    """What runs, and the sizes for which it is chosen."""
    launch = found.launch
    blocks = f"{found.grid.blocks} {'block' if found.grid.blocks == 1 else 'blocks'}"
    if found.engine == "copy":
        blocks = f"{blocks if found.grid.blocks else 'no block'} beside them"
    yield (
        f"{_name(found)} by {_means(found)}, S = {launch.slices}, "
        f"{blocks} of {found.grid.threads} threads"
    )
    if launch.in_band:
        yield "signals ride in the data, so the call has one slice"
    elif launch.mapped:
        yield f"signals are words of their own; {_reached(found)} without a copy"
        if found.direct is not None:
            other, kind = found.direct, found.plan.collective.kind
            yield (
                f"if the root's {kind.rooted.upper()} is of comm.empty too, by its hello: "
                f"S = {other.launch.slices}, {other.grid.blocks} of the blocks; {_reached(other)} "
                f"without a copy"
            )
    else:
        yield (
            "signals are words of their own; what peers exchange goes through SCRATCH, in slices "
            "that fit it"
        )
        if found.direct is not None:
            other = found.direct
            yield (
                f"from the fourth use of the buffers' memory on, which is registered "
                f"automatically: {_name(other)}, S = {other.launch.slices}, {other.grid.blocks} of "
                f"the blocks; {_reached(other)} without a copy"
            )
    if found.large_scratch:
        yield (
            f"SCRATCH is that of large calls, which ranks allocate after {STAGED_CALLS} that were "
            f"staged; until then there are more slices"
        )
    if found.plan.collective.name == "barrier":
        return
    yield from found.why
    limit = _MOST_BYTES // unit
    least, most = _edge(chooser, units, 0), _edge(chooser, units, max(limit, units))
    upper = f"{most * unit} bytes" if most < limit else "any size"
    yield f"chosen from {least * unit} bytes to {upper}"
    for side, beyond in (("below", least - 1), ("above", most + 1)):
        if 0 <= beyond <= limit:
            with contextlib.suppress(Error):
                other = chooser(beyond)
                yield (f"{side}: {_name(other)} by {_means(other)}, S = {other.launch.slices}")


def _reached(found: Choice) -> str:
    """The buffers that peers read or write directly."""
    if not found.launch.mapped:
        return "staged"
    return f"peers reach {' and '.join(sorted(buffer.name for buffer in found.launch.mapped))}"


def _means(found: Choice) -> str:
    """The protocol, or "copy engines"."""
    return "copy engines" if found.engine == "copy" else found.launch.protocol


def _edge(chooser: Chooser, units: int, limit: int) -> int:
    """The size between ``units`` and ``limit`` up to which the same is chosen.

    Distances double until the choice differs, then bisection finds the edge.
    """

    def kind(found: Choice) -> list[tuple[Launch, Plan]]:
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


def _name(found: Choice) -> str:
    """The algorithm, and the number of its rings."""
    rings = len(found.channels.rings) if found.channels is not None else 1
    name = found.algorithm or "your algorithm"
    return name if rings == 1 else f"{name} on {rings} rings"
