"""What GPU ranks run with ``engine="copy"``: which blocks copy engines carry, and the rest."""

from __future__ import annotations

from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.encode import BlockProgram, Program
from ringcoll.errors import ArgumentError, LaunchRefused
from ringcoll.launch import Launch
from ringcoll.tuner.candidates import WINDOW, candidate_of, fitted
from ringcoll.tuner.choice import Choice, Fits, GpuRanks, Grid, Limits
from ringcoll.tuner.measured import BESIDE_BLOCKS, BLOCK_BYTES, COPY_ALGORITHMS
from ringcoll.tuner.simple import ALIGN, in_place


def copied_blocks(program: Program) -> frozenset[int]:
    """The numbers of the blocks that are lanes of copies or only signal; the same on all ranks.

    A block of local copies alone is not among them: a kernel is faster there.
    """
    return frozenset(
        number
        for number, block in enumerate(program.programs)
        if all(len(row.srcs) <= 1 and not row.labels.reduces for row in block.rows)
        and (crosses(block) or not any(row.dsts for row in block.rows))
    )


def crosses(block: BlockProgram) -> bool:
    """Whether a block touches memory of other ranks."""
    return any(
        chunk.rank != block.block.rank for row in block.rows for chunk in (*row.srcs, *row.dsts)
    )


def choose_copies(call: Call, machine: GpuRanks, limits: Limits, fits: Fits) -> Choice:
    """The choice for ``engine="copy"``."""
    kind, where = COLLECTIVES[call.collective], f"{call.collective} on rank {call.rank}"
    where += ": engine='copy'"
    if limits.protocol not in (None, "Simple"):
        raise ArgumentError(
            f"{where} runs with protocol='Simple' only, because copy engines cannot poll flags "
            f"inside the data; leave protocol={limits.protocol!r} out"
        )
    if call.op is not None and (call.op.scales or kind.prefix):
        what = call.op if call.op.scales else call.collective
        raise LaunchRefused(f"{where} does not support {what}: leave engine out")
    default = COPY_ALGORITHMS.of(call.collective)[bool(limits.mapped)]
    candidate = candidate_of(call, machine, limits, default)
    # Lanes that do different things are one block where there is nothing to overlap.
    slices = limits.slices or (2 if kind.reduces else 1)
    launch = Launch("Simple", slices, WINDOW, limits.mapped, in_place(call))
    found = fitted(call, candidate, launch, ALIGN, fits, "copy")
    program = found.program
    copied = copied_blocks(program)
    if not any(crosses(program.programs[number]) for number in copied):
        raise LaunchRefused(
            f"{where}: with slices={found.launch.slices} no block of this algorithm only copies to "
            f"or from peers, so there is nothing for copy engines; use algorithm={default!r} with "
            f"slices=2 or more, or leave engine out"
        )
    others = [block for number, block in enumerate(program.blocks) if number not in copied]
    lanes = max(sum(block.rank == rank for block in others) for rank in range(machine.nranks))
    # Half of the multiprocessors stay free for the gates that these blocks wait for.
    most = min(limits.blocks or machine.blocks, machine.blocks) // (2 * max(1, lanes))
    pieces = -(-found.layout.width() * call.dtype.itemsize // BLOCK_BYTES.value)
    replicas = max(1, min(machine.replicas, most, BESIDE_BLOCKS.value, pieces))
    return found.on(Grid(replicas, replicas * lanes, machine.threads))
