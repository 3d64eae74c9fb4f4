"""What GPU ranks run by protocol Simple: one program, or two of which the hellos select one."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.encode import encode
from ringcoll.errors import LaunchRefused
from ringcoll.launch import ALL_MAPPED, Launch
from ringcoll.plan import Buffer
from ringcoll.tuner.candidates import WINDOW, candidate_of, fitted
from ringcoll.tuner.choice import Choice, Fits, GpuRanks, Grid, Limits
from ringcoll.tuner.measured import (
    BLOCK_BYTES,
    FUSED_BLOCKS,
    FUSED_BYTES,
    PIPELINED,
    SIMPLE_ALGORITHMS,
)

ALIGN = 16
"""Bytes on whose multiples chunks of GPU ranks begin."""


def in_place(call: Call) -> bool:
    """Whether the launch is in place.

    Of a rooted call only the root could know, of exscan not rank 0. In place adds order to a plan
    that reduces, which is right for all ranks; the other plans at most copy the root's input to its
    output, which does no harm where both are one.
    """
    kind = COLLECTIVES[call.collective]
    return kind.reduces if kind.uneven != "none" else call.in_place


def choose_simple(call: Call, machine: GpuRanks, limits: Limits, fits: Fits) -> Choice:
    """The choice for protocol Simple."""
    if limits.hellos_decide and not COLLECTIVES[call.collective].has_root:
        return _choose_dual(call, machine, limits, fits)
    nranks, where = machine.nranks, f"{call.collective} on rank {call.rank}"
    most = min(limits.blocks or machine.blocks, machine.blocks)
    default = _default_algorithm(call, machine, limits, most)
    candidate = candidate_of(call, machine, limits, default)
    # A barrier has nothing to slice, even if the communicator's options set slices.
    barrier = call.collective == "barrier"
    slices = 1 if barrier else limits.slices or slices_of(call, limits, default)
    launch = Launch("Simple", slices, WINDOW, limits.mapped, in_place(call))
    found = fitted(call, candidate, launch, ALIGN, fits, "sm", _why(call, limits, default))
    lanes = max(1, *(len(found.program.of(rank)) for rank in range(nranks)))
    if lanes > machine.blocks:  # a block would wait for one that cannot start
        raise LaunchRefused(
            f"{where}: this algorithm needs {lanes} CUDA blocks on a rank, {machine.blocks} are "
            f"resident at once; use another algorithm"
        )
    if candidate.channels and not fits.parameters(call, (found,), machine.together):
        raise LaunchRefused(
            f"{where}: the parameters of a launch do not hold the steps of "
            f"{len(candidate.channels.rings)} rings; use fewer channels"
        )
    pieces = -(-found.layout.width() * call.dtype.itemsize // BLOCK_BYTES.value)
    replicas = max(1, min(machine.replicas, most // lanes, pieces))
    found = found.on(Grid(replicas, replicas * lanes, machine.threads))
    return _with_direct(found, call, machine, limits, fits)


def _default_algorithm(call: Call, machine: GpuRanks, limits: Limits, blocks: int) -> str:
    """The algorithm without an option."""
    lanes, known = machine.nranks - 1, machine.known
    alike = limits.channels is None and (known is None or known.all_pairs)
    many = lanes > 1 and blocks >= FUSED_BLOCKS.value * lanes
    short = many and call.nbytes < FUSED_BYTES.value
    if call.collective == "broadcast" and limits.mapped and alike and short:
        return "scatter_gather_fused"
    return SIMPLE_ALGORITHMS.of(call.collective)[bool(limits.mapped)]


def _why(call: Call, limits: Limits, default: str) -> tuple[str, ...]:
    if limits.algorithm is not None or limits.channels is not None or call.collective == "barrier":
        return ()
    kind = "mapped" if limits.mapped else "plain"
    return (f"{default} for large {kind} buffers: measured on {SIMPLE_ALGORITHMS.source}",)


def slices_of(call: Call, limits: Limits, default: str) -> int:
    """Slices of a pipelined algorithm; in the others all ranks move data at once, in one slice."""
    algorithm = limits.algorithm or default
    pipelined = None if callable(algorithm) else PIPELINED.of(algorithm)
    if pipelined is None:
        return 1
    nbytes, least, most = pipelined
    return max(least, min(most, call.nbytes // nbytes))


def _with_direct(
    found: Choice, call: Call, machine: GpuRanks, limits: Limits, fits: Fits
) -> Choice:
    """The same with the program for a mapped buffer of the root, if that is another program.

    Only kernels that read the hellos first can choose between two.
    """
    mapped, rooted = limits.mapped, COLLECTIVES[call.collective].rooted
    every = mapped | {buffer for buffer in Buffer if buffer.name.lower() == rooted}
    if not mapped or every == mapped:
        return found
    with contextlib.suppress(LaunchRefused):
        if encode(found.plan, replace(found.launch, mapped=every)) == found.program:
            return found
        other = choose_simple(call, machine, replace(limits, mapped=every), fits)
        return _combined(found, other, call, machine, fits)
    return found


def _choose_dual(call: Call, machine: GpuRanks, limits: Limits, fits: Fits) -> Choice:
    """The programs for mapped and for unmapped buffers; the hellos select one.

    The unmapped one is the exception and takes no more blocks, since all of a launch are resident.
    """
    limits = replace(limits, hellos_decide=False, mapped=ALL_MAPPED)
    direct = choose_simple(call, machine, limits, fits)
    limits = replace(limits, mapped=frozenset(), blocks=direct.grid.blocks)
    staged = choose_simple(call, machine, limits, fits)
    return _combined(staged, direct, call, machine, fits)


def _combined(staged: Choice, direct: Choice, call: Call, machine: GpuRanks, fits: Fits) -> Choice:
    """Both programs in one launch if they fit; else the first."""
    if not fits.parameters(call, (staged, direct), machine.together):
        return staged
    blocks = max(staged.grid.blocks, direct.grid.blocks)
    return replace(staged, grid=replace(staged.grid, blocks=blocks), direct=direct)
