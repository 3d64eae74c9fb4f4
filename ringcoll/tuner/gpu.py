"""What GPU ranks of one node run: LL or LL128 for small calls, Simple or copy engines for large.

Options come first, then measured thresholds; on machines whose pairs are not alike the timing model
compares the result with rings.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from ringcoll.algorithms import ALGORITHMS
from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.errors import ArgumentError, LaunchRefused
from ringcoll.launch import IN_BAND, PROTOCOLS, Launch, Protocol
from ringcoll.tuner import measured
from ringcoll.tuner.candidates import WINDOW, candidate_of, fitted
from ringcoll.tuner.choice import Choice, Fits, GpuRanks, Grid, Limits
from ringcoll.tuner.predicted import faster_along_rings
from ringcoll.tuner.simple import (
    alike,
    choose_copies,
    choose_simple,
    default_algorithm,
    in_place,
    may_chain,
    slices_of,
)


def choose_gpu(call: Call, machine: GpuRanks, limits: Limits, fits: Fits) -> Choice:
    """The choice, along as many of the machine's rings as blocks and a launch carry."""
    if limits.large_scratch == "copy" and limits.engine is None:
        # Whatever peers map: hosts know no address of theirs but SCRATCH.
        limits = replace(limits, mapped=frozenset(), hellos_decide=False)
        return choose_copies(call, machine, limits, fits)
    known = machine.known
    if known is None or alike(machine):
        return _choose(call, machine, limits, fits)
    compared, why = _compared(call, machine, limits)
    most = machine.blocks if limits.blocks is None or limits.channels else limits.blocks
    channels = known.channels
    while True:
        last = channels is None or len(channels.rings) == 1
        with contextlib.suppress(LaunchRefused):
            there = replace(machine, known=replace(known, channels=channels))
            found = _choose(call, there, compared, fits)
            if last or found.grid.blocks <= most:
                return replace(found, why=why) if why else found
        if channels is None or last:
            return _choose(call, machine, limits, fits)
        channels = channels.first(len(channels.rings) // 2)


def _compared(call: Call, machine: GpuRanks, limits: Limits) -> tuple[Limits, tuple[str, ...]]:
    """The options with the faster algorithm on the machine's links, and the reasons."""
    named = limits.algorithm is not None or limits.channels is not None
    if named or limits.engine == "copy" or limits.orders(call.collective):
        return limits, ()
    protocol, _ = protocol_of(call, machine, limits)
    if protocol in IN_BAND:
        default = _ll_algorithm(call, machine, limits, protocol)
    else:
        default = default_algorithm(call, machine, limits)
    slices = limits.slices or slices_of(call, "chain", machine.nranks)
    algorithm, why = faster_along_rings(call, machine, default, slices)
    if why:
        why = "the clock on this machine's links:", *(f"  {reason}" for reason in why)
    return limits if algorithm == default else replace(limits, algorithm=algorithm), why


def _choose(call: Call, machine: GpuRanks, limits: Limits, fits: Fits) -> Choice:
    """The choice along all rings of the machine."""
    name, given = call.collective, limits.protocol
    where = f"{name} on rank {call.rank}"
    if given not in (None, *PROTOCOLS):
        raise ArgumentError(
            f"{where}: protocol={given!r}; GPU ranks run {', '.join(map(repr, PROTOCOLS))}"
        )
    if limits.engine == "copy" and name != "barrier" and machine.nranks > 1:
        return choose_copies(call, machine, limits, fits)
    if given and PROTOCOLS[given].nvlink and not machine.nvlink:
        raise LaunchRefused(
            f"{where}: protocol={given!r} needs NVLink between all ranks, which keeps its lines "
            f"whole; nvidia-ml-py reports none here: leave protocol out"
        )
    if given in IN_BAND and (limits.slices or 1) > 1:
        raise ArgumentError(
            f"{where}: slices={limits.slices}, but protocol={given!r} has one slice; leave "
            f"slices out or take protocol='Simple'"
        )
    protocol, why = protocol_of(call, machine, limits)
    if protocol != "Simple":
        try:
            return _choose_ll(call, machine, limits, fits, protocol, why)
        except LaunchRefused:
            # A user's plan may need signals of its own, and some dtypes need too many lines.
            if given:
                raise
    return choose_simple(call, machine, limits, fits)


def protocol_of(call: Call, machine: GpuRanks, limits: Limits) -> tuple[str, tuple[str, ...]]:
    """The protocol that an option names, or thresholds; and why, if they do."""
    name = call.collective
    if name == "barrier" or (limits.slices or 1) > 1:
        return "Simple", ()
    if limits.protocol:
        return limits.protocol, ()
    legal = [each for each in measured.PROTOCOL_SIZES if _is_legal(PROTOCOLS[each], call, machine)]
    for protocol in legal:
        threshold = measured.PROTOCOL_SIZES[protocol].up_to
        if legal == ["LL"]:
            threshold = measured.LL_ALONE_BYTES
        if protocol == "LL128" and machine.most(limits) <= measured.FEW_BLOCKS.value:
            threshold = measured.FEW_LL128_BYTES
        if call.nbytes <= threshold.of(name):
            why = f"{protocol} up to {threshold.of(name)} bytes: measured on {threshold.source}"
            return protocol, (why,)
    return "Simple", ()


def _is_legal(protocol: Protocol, call: Call, machine: GpuRanks) -> bool:
    """Whether a protocol's lines stay whole on this machine and carry elements of the call."""
    whole = machine.nvlink or not protocol.nvlink
    return whole and call.dtype.itemsize <= protocol.most_itemsize


def _ll_algorithm(call: Call, machine: GpuRanks, limits: Limits, protocol: str) -> str:
    """The default algorithm of LL or LL128."""
    name, n = call.collective, machine.nranks
    if COLLECTIVES[name].prefix:
        return "chain" if limits.deterministic else "recursive_doubling"
    if name == "all_reduce":
        # One hop sends (n - 1) buffers, two send 2 (n - 1)/n; in lines of LL bytes count twice.
        extra = (2 if protocol == "LL" else 1) * call.nbytes * (n - 1) * (1 - 2 / n)
        return "one_shot_push" if extra <= measured.HOP_BYTES.value else "all_pairs"
    if n > 2 and call.nbytes > measured.DIRECT_BYTES[protocol].of(name):
        if call.nbytes > measured.CHAIN_BYTES.of(name) and may_chain(call, machine, limits):
            return "chain"
        return "scatter_gather" if name == "broadcast" else "scatter_gather_push"
    return "all_pairs"


def _choose_ll(
    call: Call,
    machine: GpuRanks,
    limits: Limits,
    fits: Fits,
    protocol: str,
    why: tuple[str, ...],
) -> Choice:
    """The choice for LL or LL128."""
    most_itemsize = PROTOCOLS[protocol].most_itemsize
    if call.dtype.itemsize > most_itemsize:
        raise LaunchRefused(
            f"{call.collective} on rank {call.rank}: protocol={protocol!r} carries elements of at "
            f"most {most_itemsize} bytes, {call.dtype.name} has {call.dtype.itemsize}; use "
            f"protocol='LL'"
        )
    default = _ll_algorithm(call, machine, limits, protocol)
    candidate = candidate_of(call, machine, limits, default)
    launch = Launch(protocol, 1, WINDOW, frozenset(), in_place(call))
    found = fitted(call, candidate, launch, fits, "sm", why)
    packs = fits.packs(call, launch, found.layout)
    return found.on(ll_grid(machine, limits).of(packs))


@dataclass(frozen=True, slots=True)
class LLGrid:
    """The CUDA blocks of LL or LL128: few wide ones only where many narrow ones are too few."""

    most: int
    """CUDA blocks of a rank."""
    few: int
    """CUDA blocks up to which those of fewer threads are taken."""
    widths: tuple[int, ...]
    """Threads of a block that move data, the fewest first; the last ones suffice for any size."""
    sync: int
    """Threads of a block beside them."""

    def of(self, packs: int) -> Grid:
        """The grid; ``packs``: the parts of lines that threads move, of the longest chunk."""
        workers = self.widths[-1]
        for width in self.widths:
            if -(-packs // width) <= self.few:
                workers = width
                break
        blocks = -(-packs // workers) or 1
        return Grid(1, blocks if blocks < self.most else self.most, workers + self.sync)


def ll_grid(machine: GpuRanks, limits: Limits) -> LLGrid:
    """The grids that a machine and options allow."""
    most = machine.most(limits)
    widths = *measured.LL_WORKERS.value, machine.workers
    return LLGrid(most, min(most, measured.LL_BLOCKS.value), widths, machine.sync_threads)


def in_two_layers(call: Call, limits: Limits) -> bool:
    """Whether a call of GPU ranks on several nodes, if it can, runs in layers; else in pieces."""
    named = limits.algorithm == "hierarchical" and "hierarchical" in ALGORITHMS[call.collective]
    free = (limits.algorithm is None or named) and not (limits.slices or limits.channels)
    proven = limits.verify or limits.orders(call.collective)
    return call.nbytes >= measured.LAYERS_BYTES.value and free and not proven
