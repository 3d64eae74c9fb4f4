"""The launch of a call whose signals are words of their own, protocol Simple.

The thresholds are measured on 4 H200 over NVSwitch.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.encode import Program, encode
from ringcoll.errors import LaunchRefused
from ringcoll.executors.cuda.chosen import Chosen
from ringcoll.executors.cuda.either import carried, fits
from ringcoll.executors.cuda.planned import Planned, in_place, planned
from ringcoll.executors.cuda.simple import THREADS, scratch_bytes
from ringcoll.executors.cuda.wishes import Resources, Wishes
from ringcoll.launch import ALL_MAPPED, Launch, Layout
from ringcoll.plan import Buffer

__all__ = ["BLOCK_BYTES", "USUAL", "chain_slices", "in_words", "sliced"]

USUAL = {
    "all_reduce": ("all_pairs", "two_shot"),
    "broadcast": ("scatter_gather", "chain"),
    "reduce": ("all_pairs", "scatter_gather"),
    "all_gather": ("all_pairs", "all_pairs_fused"),
    "reduce_scatter": ("all_pairs", "one_shot"),
    "all_to_all": ("all_pairs", "all_pairs"),
    "gather": ("all_pairs", "one_shot"),
    "scatter": ("all_pairs", "all_pairs"),
    "barrier": ("all_pairs", "all_pairs"),
}
"""Algorithms of large messages: of plain buffers, and of those that all ranks can reach. 4 H200,
64 MiB: all_reduce took 308 µs by two_shot, 1023 by ring; broadcast 248 by chain, 253 by
scatter_gather in 8 slices; reduce 244 by scatter_gather (402 where the root's array is staged), 555
by one_shot, 590 by chain."""

CHAIN_BYTES = 4 << 20
"""Bytes of a slice of a chain, of which there are 8 to 64. Broadcast, 4 H200: 16 MiB took 97.8 µs
with 4 slices, 94.7 with 8; 64 MiB 250 with 8, 248 with 16, 266 with 32; 512 MiB 1566 with 64, 1590
with 128. Several rings side by side changed nothing."""

BLOCK_BYTES = 16 << 10
"""Bytes of a slice that a CUDA block moves at least."""

_WINDOW = 2
_LEAST_SLICES, _MOST_SLICES = 8, 64


def in_words(call: Call, resources: Resources, mapped: frozenset[Buffer], wishes: Wishes) -> Chosen:
    """What runs by protocol Simple; arguments are those of ``choose``.

    Raises:
        LaunchRefused: SCRATCH, the blocks or a launch cannot carry it.
        ArgumentError: an algorithm that there is not.

    """
    if wishes.asked and not COLLECTIVES[call.collective].has_root:
        return _asked(call, resources, wishes)
    arena, nranks = resources.arena, resources.nranks
    default = USUAL[call.collective][bool(mapped)]
    source = planned(call, resources, wishes, default)
    slices = wishes.slices or chain_slices(call, wishes, default)
    launch, layout, program = sliced(call, source, mapped, slices, arena.scratch_half)
    blocks = min(wishes.blocks or resources.blocks, resources.blocks)
    lanes = max(1, *(len(program.of(rank)) for rank in range(nranks)))
    if lanes > resources.blocks:  # a block would wait for one that cannot start
        raise LaunchRefused(
            f"{call.collective} on rank {call.rank}: this algorithm has {lanes} lanes on a rank, "
            f"and {resources.blocks} CUDA blocks are sure to run at once; use another algorithm"
        )
    scales = call.op is not None and call.op.scales
    together = resources.together
    if source.channels and not carried(source.plan, launch, scales=scales, together=together):
        raise LaunchRefused(
            f"{call.collective} on rank {call.rank}: a launch does not carry the steps of "
            f"{len(source.channels.rings)} rings; use fewer channels"
        )
    most = min(arena.replicas, max(1, blocks // lanes))
    nbytes = layout.width() * call.dtype.itemsize
    replicas = min(most, max(1, -(-nbytes // BLOCK_BYTES)))
    blocks = replicas * lanes
    found = Chosen(source.plan, program, launch, layout, replicas, blocks, THREADS, source=source)
    return _either(found, call, resources, mapped, wishes)


def _either(
    found: Chosen, call: Call, resources: Resources, mapped: frozenset[Buffer], wishes: Wishes
) -> Chosen:
    """The same with what runs where peers reach the root's own buffer, if that is another program.

    Only kernels that look at the hellos first can choose between two.
    """
    rooted = COLLECTIVES[call.collective].rooted
    every = mapped | {buffer for buffer in Buffer if buffer.name.lower() == rooted}
    if not mapped or every == mapped:
        return found
    with contextlib.suppress(LaunchRefused):
        if encode(found.plan, replace(found.launch, mapped=every)) == found.program:
            return found
        other = in_words(call, resources, every, wishes)
        return _both(found, other, call, resources)
    return found


def _asked(call: Call, resources: Resources, wishes: Wishes) -> Chosen:
    """What runs where peers reach all buffers, and what runs instead where hellos deny it.

    The latter is the exception, and takes no more blocks: all of a launch have to find a place.
    """
    wishes = replace(wishes, asked=False)
    reached = in_words(call, resources, ALL_MAPPED, wishes)
    staged = in_words(call, resources, frozenset(), replace(wishes, blocks=reached.blocks))
    return _both(staged, reached, call, resources)


def _both(staged: Chosen, reached: Chosen, call: Call, resources: Resources) -> Chosen:
    """One launch for both, if it carries so much; else the first."""
    scales, together = call.op is not None and call.op.scales, resources.together
    if not fits(staged.program, reached.program, scales=scales, together=together):
        return staged
    return replace(staged, blocks=max(staged.blocks, reached.blocks), reached=reached)


def chain_slices(call: Call, wishes: Wishes, default: str) -> int:
    """How finely a chain is pipelined; elsewhere all ranks move data at once."""
    if wishes.plan is not None or (wishes.algorithm or default) != "chain":
        return 1
    return max(_LEAST_SLICES, min(_MOST_SLICES, call.nbytes // CHAIN_BYTES))


def sliced(
    call: Call, source: Planned, mapped: frozenset[Buffer], slices: int, room: int
) -> tuple[Launch, Layout, Program]:
    """Launch, layout and program of at least so many slices: as many as SCRATCH asks for."""
    while True:
        launch = Launch(slices=slices, window=_WINDOW, mapped=mapped, in_place=in_place(call))
        layout = source.layout(call, slices)
        program = encode(source.plan, launch)
        if scratch_bytes(program, layout, call.dtype) <= room:
            return launch, layout, program
        if layout.width() <= layout.align:
            raise LaunchRefused(
                f"{call.collective}: {program.scratch} SCRATCH chunks do not fit {room} bytes; "
                f"use another algorithm"
            )
        slices *= 2
