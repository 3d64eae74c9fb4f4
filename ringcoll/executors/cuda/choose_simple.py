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
from ringcoll.executors.cuda.dual_program import carried, fits
from ringcoll.executors.cuda.limits import Resources, Wishes
from ringcoll.executors.cuda.planned import Planned, in_place, planned
from ringcoll.executors.cuda.simple import THREADS, scratch_bytes
from ringcoll.launch import ALL_MAPPED, Launch, Layout
from ringcoll.plan import Buffer

__all__ = ["BLOCK_BYTES", "USUAL", "in_words", "sliced", "slices_of"]

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
64 MiB: all_reduce took 308 µs by two_shot, 1023 by ring; reduce 247 by scatter_gather (402 where
the root's array is staged), 555 by one_shot, 750 by chain in 64 slices; where all write to who adds
instead of being read, through SCRATCH, 345 to 438 in 8 to 32 slices by 64 and by 132 blocks."""

FUSED_BYTES, FUSED_BLOCKS = 128 << 20, 32
"""A broadcast of fewer bytes goes by scatter_gather_fused where all pairs are alike and so many
CUDA blocks are there for each lane of the root. 4 H200, so and by chain: 16 MiB took 75 and 94 µs,
32 MiB 128 and 148, 64 MiB 229 and 247, 128 MiB 431 and 429, 512 MiB 1622 and 1556."""

SLICES = {"chain": (4 << 20, 8, 64), "scatter_gather_fused": (2 << 20, 4, 24)}
"""Bytes of a slice of what is pipelined, and how many slices there are at least and at most.
Broadcast by chain, 4 H200: 16 MiB took 97.8 µs with 4 slices, 94.7 with 8; 64 MiB 250 with 8, 248
with 16, 266 with 32; 512 MiB 1566 with 64, 1590 with 128; several rings side by side changed
nothing. By scatter_gather_fused: 16 MiB 76.2 with 4, 75.2 with 8, 80.2 with 16; 64 MiB 233 with 8,
232 with 16, 229 with 24."""

BLOCK_BYTES = 16 << 10
"""Bytes of a slice that a CUDA block moves at least; ``Arena.replicas`` blocks share one at most.
all_reduce on 4 H200 by 48, 64, 96 and 128 blocks: 8 MiB took 48.6, 48.2, 49.0 and 50.8 µs, 64 MiB
320, 313, 307 and 309, 512 MiB 2470, 2388, 2368 and 2345. The last two percent are left: of 64
blocks four communicators' calls fit a GPU at the same time, of 128 two."""

_WINDOW = 2


def in_words(call: Call, resources: Resources, mapped: frozenset[Buffer], wishes: Wishes) -> Chosen:
    """What runs by protocol Simple; arguments are those of ``choose``.

    Raises:
        LaunchRefused: SCRATCH, the blocks or a launch cannot carry it.
        ArgumentError: an algorithm that there is not.

    """
    if wishes.asked and not COLLECTIVES[call.collective].has_root:
        return _asked(call, resources, wishes)
    arena, nranks = resources.arena, resources.nranks
    most = min(wishes.blocks or resources.blocks, resources.blocks)
    default = _usual(call, resources, mapped, wishes, most)
    source = planned(call, resources, wishes, default)
    slices = wishes.slices or slices_of(call, wishes, default)
    launch, layout, program = sliced(call, source, mapped, slices, arena.scratch_half)
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
    nbytes = layout.width() * call.dtype.itemsize
    replicas = max(1, min(arena.replicas, most // lanes, -(-nbytes // BLOCK_BYTES)))
    sizes = replicas, replicas * lanes, THREADS
    found = Chosen(source.plan, program, launch, layout, *sizes, source=source)
    return _either(found, call, resources, mapped, wishes)


def _usual(
    call: Call, resources: Resources, mapped: frozenset[Buffer], wishes: Wishes, blocks: int
) -> str:
    """The algorithm where no option names one."""
    lanes, machine = resources.nranks - 1, resources.machine
    alike = wishes.channels is None and (machine is None or machine.all_pairs)
    fused = lanes > 1 and blocks >= FUSED_BLOCKS * lanes and call.nbytes < FUSED_BYTES
    if call.collective == "broadcast" and mapped and alike and fused:
        return "scatter_gather_fused"
    return USUAL[call.collective][bool(mapped)]


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


def slices_of(call: Call, wishes: Wishes, default: str) -> int:
    """How finely what is handed on is pipelined; elsewhere all ranks move data at once."""
    algorithm = wishes.algorithm or default
    if wishes.plan is not None or algorithm not in SLICES:
        return 1
    nbytes, least, most = SLICES[algorithm]
    return max(least, min(most, call.nbytes // nbytes))


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
