"""What GPU ranks of one node run: LL or LL128 for small calls, Simple or copy engines for large.

Options come first, then measured thresholds; on machines whose pairs are not alike the timing model
compares the result with rings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from ringcoll.algorithms.channels import Channels
from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.errors import ArgumentError, LaunchRefused
from ringcoll.launch import PROTOCOLS, Launch
from ringcoll.tuner.candidates import candidate_of
from ringcoll.tuner.choice import Choice, Fits, GpuRanks, Grid, Limits
from ringcoll.tuner.copies import choose_copies
from ringcoll.tuner.measured import (
    DIRECT_BYTES,
    HOP_BYTES,
    LL128_BYTES,
    LL_ALONE_BYTES,
    LL_BLOCKS,
    LL_BYTES,
    LL_WORKERS,
    SIMPLE_ALGORITHMS,
    Measured,
)
from ringcoll.tuner.predicted import faster_along_rings
from ringcoll.tuner.proof import prove, prove_algorithm
from ringcoll.tuner.simple import ALIGN, choose_simple, in_place, slices_of

_WORD = 8
"""The most bytes of an element that LL128 carries."""


def choose_gpu(call: Call, machine: GpuRanks, limits: Limits, fits: Fits) -> Choice:
    """The choice of GPU ranks; LaunchRefused if the options cannot carry the call."""
    prove_algorithm(call, machine.nranks, limits)
    choice = _on_machine(call, machine, limits, fits)
    for found in choice.variants if limits.proves else ():
        # In at most 2 W + 2 slices, after which the rows repeat.
        slices = min(found.launch.slices, 2 * found.launch.window + 2)
        prove(found.plan, replace(found.launch, slices=slices), limits)
    return choice


def _on_machine(call: Call, machine: GpuRanks, limits: Limits, fits: Fits) -> Choice:
    """The choice, along as many of the machine's rings as blocks and a launch carry."""
    known = machine.known
    if known is None or (known.all_pairs and known.channels is None):
        return _choose(call, machine, limits, fits)
    compared, why = _compared(call, machine, limits)
    most = machine.blocks if limits.blocks is None or limits.channels else limits.blocks
    for channels in _narrower(known.channels):
        with contextlib.suppress(LaunchRefused):
            there = machine
            if channels is not known.channels:
                there = replace(machine, known=replace(known, channels=channels))
            found = _choose(call, there, compared, fits)
            if found.grid.blocks <= most or channels is None or len(channels.rings) == 1:
                return replace(found, why=why, predicted=True) if why else found
    return _choose(call, machine, limits, fits)


def _compared(call: Call, machine: GpuRanks, limits: Limits) -> tuple[Limits, tuple[str, ...]]:
    """The options with the faster algorithm on the machine's links, and the reasons."""
    kind = COLLECTIVES[call.collective]
    named = limits.algorithm is not None or limits.channels is not None
    if named or limits.engine == "copy" or (limits.deterministic and kind.reduces):
        return limits, ()
    lines = limits.protocol
    if lines is None and (limits.slices or 1) == 1:
        lines, _ = _lines(call, machine)
    default = SIMPLE_ALGORITHMS.of(call.collective)[bool(limits.mapped)]
    if lines in PROTOCOLS[1:]:
        default = _ll_algorithm(call, machine.nranks, lines)
    slices = limits.slices or slices_of(call, limits, "chain")
    algorithm, why = faster_along_rings(call, machine, default, slices)
    return limits if algorithm == default else replace(limits, algorithm=algorithm), why


def _narrower(channels: Channels | None) -> Iterator[Channels | None]:
    """The rings of a machine, then fewer: blocks and the parameters of a launch are limited."""
    yield channels
    while channels is not None and len(channels.rings) > 1:
        channels = channels.first(len(channels.rings) // 2)
        yield channels


def _choose(call: Call, machine: GpuRanks, limits: Limits, fits: Fits) -> Choice:
    name, protocol = call.collective, limits.protocol
    where = f"{name} on rank {call.rank}"
    if protocol not in (None, *PROTOCOLS):
        raise ArgumentError(
            f"{where}: protocol={protocol!r}; GPU ranks run {', '.join(map(repr, PROTOCOLS))}"
        )
    if limits.engine == "copy" and name != "barrier" and machine.nranks > 1:
        return choose_copies(call, machine, limits, fits)
    if protocol == "LL128" and not machine.nvlink:
        raise LaunchRefused(
            f"{where}: protocol='LL128' needs NVLink between all ranks, which keeps its lines "
            f"whole; nvidia-ml-py reports none here: leave protocol out"
        )
    sliced = (limits.slices or 1) > 1
    if protocol in PROTOCOLS[1:] and sliced and name != "barrier":
        raise ArgumentError(
            f"{where}: slices={limits.slices}, but protocol={protocol!r} has one slice; leave "
            f"slices out or take protocol='Simple'"
        )
    if name == "barrier" or sliced or protocol == "Simple":
        return choose_simple(call, machine, limits, fits)
    if protocol:
        return _choose_ll(call, machine, limits, fits, protocol)
    lines, threshold = _lines(call, machine)
    if lines:
        # A user's plan may need signals of its own, and some dtypes need too many lines.
        with contextlib.suppress(LaunchRefused):
            why = f"{lines} up to {threshold.of(name)} bytes: measured on {threshold.source}"
            return _choose_ll(call, machine, limits, fits, lines, (why,))
    return choose_simple(call, machine, limits, fits)


def _lines(call: Call, machine: GpuRanks) -> tuple[str | None, Measured[int]]:
    """LL or LL128, None where Simple is faster; and the threshold that decides."""
    name, nbytes = call.collective, call.nbytes
    if not machine.nvlink or call.dtype.itemsize > _WORD:
        return "LL" if nbytes <= LL_ALONE_BYTES.of(name) else None, LL_ALONE_BYTES
    if nbytes <= LL_BYTES.of(name):
        return "LL", LL_BYTES
    return "LL128" if nbytes <= LL128_BYTES.of(name) else None, LL128_BYTES


def _ll_algorithm(call: Call, nranks: int, protocol: str, *, ordered: bool = False) -> str:
    """The default algorithm of LL or LL128; ``ordered``: one that sums in rank order."""
    name, n = call.collective, nranks
    if COLLECTIVES[name].prefix:
        return "chain" if ordered else "recursive_doubling"
    if name == "all_reduce":
        # One hop sends (n - 1) buffers, two send 2 (n - 1)/n; in lines of LL bytes count twice.
        extra = (2 if protocol == "LL" else 1) * call.nbytes * (n - 1) * (1 - 2 / n)
        return "one_shot_push" if extra <= HOP_BYTES.value else "all_pairs"
    if n > 2 and call.nbytes > DIRECT_BYTES[protocol].of(name):
        return "scatter_gather" if name == "broadcast" else "scatter_gather_push"
    return "all_pairs"


def _choose_ll(
    call: Call,
    machine: GpuRanks,
    limits: Limits,
    fits: Fits,
    protocol: str,
    why: tuple[str, ...] = (),
) -> Choice:
    default = _ll_algorithm(call, machine.nranks, protocol, ordered=limits.deterministic)
    candidate = candidate_of(call, machine, limits, default)
    launch = Launch(protocol=protocol, mapped=frozenset(), in_place=in_place(call))
    found = candidate.launched(call, launch, ALIGN, "sm", why)
    if protocol == "LL128" and call.dtype.itemsize > _WORD:
        raise LaunchRefused(
            f"{call.collective} on rank {call.rank}: protocol={protocol!r} carries elements of at "
            f"most 8 bytes, {call.dtype.name} has {call.dtype.itemsize}; use protocol='LL'"
        )
    need, there = fits.scratch(call, found)
    if need > there:
        raise LaunchRefused(
            f"{call.collective} on rank {call.rank}: protocol={protocol!r} would need {need} bytes "
            f"of lines, {there} are there; use protocol='Simple'"
        )
    packs = max(1, fits.packs(call, found))
    most = min(limits.blocks or machine.blocks, machine.blocks)
    few = min(most, LL_BLOCKS.value)
    widths = (*LL_WORKERS.value, machine.workers)
    workers = next((width for width in widths if -(-packs // width) <= few), machine.workers)
    blocks = min(most, -(-packs // workers))
    return found.on(Grid(1, blocks, workers + machine.sync_threads))
