"""Choose algorithm, slices and grid of a call whose copies run on copy engines."""

from __future__ import annotations

from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.errors import ArgumentError, LaunchRefused
from ringcoll.executors.cuda.choose_simple import BLOCK_BYTES, DEFAULT_ALGORITHMS, sliced
from ringcoll.executors.cuda.copies import copied_blocks, crosses
from ringcoll.executors.cuda.kernel_choice import KernelChoice, named_plan
from ringcoll.executors.cuda.limits import KernelOptions, Resources
from ringcoll.executors.cuda.simple import THREADS
from ringcoll.plan import Buffer

BESIDE_BLOCKS = 32
"""The most CUDA blocks for each block that reduces beside copy engines: it reads only memory of its
own GPU, which is much faster than the links."""

_COPY_ALGORITHMS = {
    **DEFAULT_ALGORITHMS,
    "all_reduce": ("all_pairs", "all_pairs"),
    "reduce": ("all_pairs", "all_pairs"),
    "all_gather": ("all_pairs", "all_pairs"),
    "reduce_scatter": ("all_pairs", "all_pairs"),
}
"""Algorithms of copy engines: of plain buffers, and of buffers mapped by all ranks."""


def choose_copies(
    call: Call, resources: Resources, mapped: frozenset[Buffer], options: KernelOptions
) -> KernelChoice:
    """The choice for ``engine="copy"``; arguments and errors are those of ``choose``."""
    workspace, nranks = resources.workspace, resources.nranks
    where = f"{call.collective} on rank {call.rank}: engine='copy'"
    if options.protocol not in (None, "Simple"):
        raise ArgumentError(
            f"{where} runs with protocol='Simple' only, because copy engines cannot poll flags "
            f"inside the data; leave protocol={options.protocol!r} out"
        )
    if call.op is not None and (call.op.scales or COLLECTIVES[call.collective].prefix):
        what = call.op if call.op.scales else call.collective
        raise LaunchRefused(f"{where} does not support {what}: leave engine out")
    default = _COPY_ALGORITHMS[call.collective][bool(mapped)]
    source = named_plan(call, resources, options, default)
    # Lanes that do different things are one block where there is nothing to overlap.
    slices = options.slices or (2 if COLLECTIVES[call.collective].reduces else 1)
    launch, layout, program = sliced(call, source, mapped, slices, workspace.copied)
    copied = copied_blocks(program)
    if not any(crosses(program.programs[number]) for number in copied):
        raise LaunchRefused(
            f"{where}: with slices={launch.slices} no block of this algorithm only copies to or "
            f"from peers, so there is nothing for copy engines; use algorithm={default!r} with "
            f"slices=2 or more, or leave engine out"
        )
    others = [number for number in range(len(program.blocks)) if number not in copied]
    lanes = max(sum(program.blocks[n].rank == rank for n in others) for rank in range(nranks))
    # Half of the multiprocessors stay free for the gates that these blocks wait for.
    most = min(options.blocks or resources.blocks, resources.blocks) // (2 * max(1, lanes))
    nbytes = layout.width() * call.dtype.itemsize
    replicas = max(1, min(workspace.replicas, most, BESIDE_BLOCKS, -(-nbytes // BLOCK_BYTES)))
    sizes = replicas, replicas * lanes, THREADS
    return KernelChoice(source.plan, program, launch, layout, *sizes, "copy", source=source)
