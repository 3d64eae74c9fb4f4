"""Choose algorithm, slices and grid of a call by Simple; thresholds of 4 H200 over NVSwitch."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.encode import Program, encode
from ringcoll.errors import LaunchRefused
from ringcoll.executors.cuda.dual_program import fits_dual, fits_one
from ringcoll.executors.cuda.kernel_choice import KernelChoice, NamedPlan, in_place, named_plan
from ringcoll.executors.cuda.limits import KernelOptions, Resources
from ringcoll.executors.cuda.simple import THREADS, scratch_bytes
from ringcoll.launch import ALL_MAPPED, Launch, Layout
from ringcoll.plan import Buffer

DEFAULT_ALGORITHMS = {
    "all_reduce": ("all_pairs", "two_shot"),
    "broadcast": ("scatter_gather", "chain"),
    "reduce": ("all_pairs", "scatter_gather"),
    "all_gather": ("all_pairs", "all_pairs_fused"),
    "reduce_scatter": ("all_pairs", "one_shot"),
    "all_to_all": ("all_pairs", "all_pairs"),
    "gather": ("all_pairs", "one_shot"),
    "scatter": ("all_pairs", "all_pairs"),
    **dict.fromkeys(("scan", "exscan"), ("chain", "chain")),
    "barrier": ("all_pairs", "all_pairs"),
}
"""Algorithms of large messages: of plain buffers, and of buffers mapped by all ranks. 4 H200, 64
MiB: all_reduce took 308 µs by two_shot, 1023 by ring; reduce 247 by scatter_gather (402 with the
root's array staged), 555 by one_shot, 750 by chain in 64 slices; pushing to the reducing rank's
SCRATCH instead of reading took 345 to 438 in 8 to 32 slices by 64 and by 132 blocks."""

FUSED_BYTES, FUSED_BLOCKS = 128 << 20, 32
"""A broadcast of fewer bytes runs scatter_gather_fused where all pairs are alike and each lane of
the root has so many CUDA blocks. 4 H200, by scatter_gather_fused and by chain,
in µs: 16 MiB 75 and 94, 32 MiB 128 and 148, 64 MiB 229 and 247, 128 MiB 431 and 429, 512 MiB 1622
and 1556."""

PIPELINED = {"chain": (4 << 20, 8, 64), "scatter_gather_fused": (2 << 20, 4, 24)}
"""Of pipelined algorithms: bytes of a slice, and the fewest and the most slices.
Broadcast by chain, 4 H200: 16 MiB took 97.8 µs with 4 slices, 94.7 with 8; 64 MiB 250 with 8, 248
with 16, 266 with 32; 512 MiB 1566 with 64, 1590 with 128; several rings side by side changed
nothing. By scatter_gather_fused: 16 MiB 76.2 with 4, 75.2 with 8, 80.2 with 16; 64 MiB 233 with 8,
232 with 16, 229 with 24."""

BLOCK_BYTES = 16 << 10
"""Bytes of a slice that a CUDA block moves at least; at most ``Workspace.replicas`` share one.
all_reduce on 4 H200 by 48, 64, 96 and 128 blocks: 8 MiB took 48.6, 48.2, 49.0 and 50.8 µs, 64 MiB
320, 313, 307 and 309, 512 MiB 2470, 2388, 2368 and 2345. 64 blocks are two percent slower than 128,
but calls of four communicators fit a GPU at the same time."""

_WINDOW = 2


def choose_simple(
    call: Call, resources: Resources, mapped: frozenset[Buffer], options: KernelOptions
) -> KernelChoice:
    """The choice for protocol Simple; arguments and errors are those of ``choose``."""
    if options.hellos_decide and not COLLECTIVES[call.collective].has_root:
        return _choose_dual(call, resources, options)
    workspace, nranks = resources.workspace, resources.nranks
    most = min(options.blocks or resources.blocks, resources.blocks)
    default = _default_algorithm(call, resources, mapped, options, most)
    source = named_plan(call, resources, options, default)
    slices = options.slices or slices_of(call, options, default)
    launch, layout, program = sliced(call, source, mapped, slices, workspace.scratch_half)
    lanes = max(1, *(len(program.of(rank)) for rank in range(nranks)))
    if lanes > resources.blocks:  # a block would wait for one that cannot start
        raise LaunchRefused(
            f"{call.collective} on rank {call.rank}: this algorithm needs {lanes} CUDA blocks on a "
            f"rank, {resources.blocks} are resident at once; use another algorithm"
        )
    scales = call.op is not None and call.op.scales
    together = resources.together
    if source.channels and not fits_one(source.plan, launch, scales=scales, together=together):
        raise LaunchRefused(
            f"{call.collective} on rank {call.rank}: the parameters of a launch do not hold the "
            f"steps of {len(source.channels.rings)} rings; use fewer channels"
        )
    nbytes = layout.width() * call.dtype.itemsize
    replicas = max(1, min(workspace.replicas, most // lanes, -(-nbytes // BLOCK_BYTES)))
    sizes = replicas, replicas * lanes, THREADS
    found = KernelChoice(source.plan, program, launch, layout, *sizes, source=source)
    return _with_direct(found, call, resources, mapped, options)


def _default_algorithm(
    call: Call, resources: Resources, mapped: frozenset[Buffer], options: KernelOptions, blocks: int
) -> str:
    """The algorithm without an option."""
    lanes, machine = resources.nranks - 1, resources.machine
    alike = options.channels is None and (machine is None or machine.all_pairs)
    fused = lanes > 1 and blocks >= FUSED_BLOCKS * lanes and call.nbytes < FUSED_BYTES
    if call.collective == "broadcast" and mapped and alike and fused:
        return "scatter_gather_fused"
    return DEFAULT_ALGORITHMS[call.collective][bool(mapped)]


def _with_direct(
    found: KernelChoice,
    call: Call,
    resources: Resources,
    mapped: frozenset[Buffer],
    options: KernelOptions,
) -> KernelChoice:
    """The same with the program for a mapped buffer of the root, if that is another program.

    Only kernels that read the hellos first can choose between two.
    """
    rooted = COLLECTIVES[call.collective].rooted
    every = mapped | {buffer for buffer in Buffer if buffer.name.lower() == rooted}
    if not mapped or every == mapped:
        return found
    with contextlib.suppress(LaunchRefused):
        if encode(found.plan, replace(found.launch, mapped=every)) == found.program:
            return found
        other = choose_simple(call, resources, every, options)
        return _combined(found, other, call, resources)
    return found


def _choose_dual(call: Call, resources: Resources, options: KernelOptions) -> KernelChoice:
    """The programs for mapped and for unmapped buffers; the hellos select one.

    The unmapped one is the exception and takes no more blocks, since all of a launch are resident.
    """
    options = replace(options, hellos_decide=False)
    direct = choose_simple(call, resources, ALL_MAPPED, options)
    staged = choose_simple(call, resources, frozenset(), replace(options, blocks=direct.blocks))
    return _combined(staged, direct, call, resources)


def _combined(
    staged: KernelChoice, direct: KernelChoice, call: Call, resources: Resources
) -> KernelChoice:
    """Both programs in one launch if they fit; else the first."""
    scales, together = call.op is not None and call.op.scales, resources.together
    if not fits_dual(staged.program, direct.program, scales=scales, together=together):
        return staged
    return replace(staged, blocks=max(staged.blocks, direct.blocks), direct=direct)


def slices_of(call: Call, options: KernelOptions, default: str) -> int:
    """Slices of a pipelined algorithm; in the others all ranks move data at once, in one slice."""
    algorithm = options.algorithm or default
    if options.plan is not None or algorithm not in PIPELINED:
        return 1
    nbytes, least, most = PIPELINED[algorithm]
    return max(least, min(most, call.nbytes // nbytes))


def sliced(
    call: Call, source: NamedPlan, mapped: frozenset[Buffer], slices: int, room: int
) -> tuple[Launch, Layout, Program]:
    """Launch, layout and program of at least so many slices; more until they fit SCRATCH."""
    while True:
        launch = Launch(slices=slices, window=_WINDOW, mapped=mapped, in_place=in_place(call))
        layout = source.layout(call, slices)
        program = encode(source.plan, launch)
        if scratch_bytes(program, layout, call.dtype) <= room:
            return launch, layout, program
        if layout.width() <= layout.align:
            raise LaunchRefused(
                f"{call.collective}: {program.scratch} chunks do not fit {room} bytes of SCRATCH; "
                f"use another algorithm"
            )
        slices *= 2
