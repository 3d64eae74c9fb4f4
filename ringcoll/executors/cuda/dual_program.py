"""Dual programs: a launch carries two, and the kernel runs the one that the ranks' hellos select.

Only the root knows whether peers have mapped its own buffer, and with automatic registration each
rank knows its own buffers alone, so the ranks cannot choose a program before the call. But a kernel
that reads all hellos before it moves anything can: the launch carries the words of a staged and of
a direct program, and all ranks run the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ringcoll.dtypes import DType, ReduceOp, dtype_of
from ringcoll.encode import Program, encode
from ringcoll.errors import LaunchRefused
from ringcoll.executors.cuda.params import (
    LARGEST,
    Addresses,
    Body,
    GenericForm,
    launch_bytes,
    padded,
)
from ringcoll.executors.cuda.simple import Writer, shape_words, simple_text
from ringcoll.executors.cuda.source import elements_word, names_of
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.launch import Launch, Layout
from ringcoll.plan import Buffer, Plan

_HEAD = 5
"""Words before those of both programs: see ``ProgramChoice`` of ``kernels/simple.cuh``."""

_PADDING = 16
"""The most words of padding; as many again where a trace is kept."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the programs; each block of it has ``replicas`` CUDA blocks."""

    program: Program
    layout: Layout
    replicas: int
    mapped: frozenset[Buffer]  # buffers that the ranks know to be mapped without the hellos


def dual_body(
    staged: Variant,
    direct: Variant,
    dtype: DType,
    op: ReduceOp | None,
    workspace: Workspace,
    local: Sequence[Addresses],
) -> Body:
    """Text and words of both programs for the ranks of one launch.

    Args:
        staged: runs unless all deciding buffers are mapped: the root's own buffer of a rooted
            call where those of all ranks are known to be mapped, else all buffers of all ranks.
        op: of the call; None where nothing is reduced.

    Raises:
        LaunchRefused: slices do not fit SCRATCH, or too many blocks signal.

    """
    writers = _writers((staged, direct), dtype, op, workspace, local)
    moves = writers[0].moves
    rows = padded([_words(staged, direct, writers, at) for at in local])
    text = simple_text(
        names_of(dtype, op),
        staged.program.collective.nranks,
        len(rows[0]),
        len(local),
        moves,
        "run_dual",
    )
    generic = GenericForm(0, elements_word(dtype, op, dual=True), shape_words(moves))
    return Body(text, rows, (0,) * len(local), 0, workspace.scratch_half, generic=generic)


def _writers(
    variants: Sequence[Variant],
    dtype: DType,
    op: ReduceOp | None,
    workspace: Workspace,
    local: Sequence[Addresses],
) -> list[Writer]:
    """A writer for each program; one text has the moves of all."""
    scales = op is not None and op.scales
    writers = [
        Writer(kind.program, kind.layout, dtype, workspace, local, scales=scales)
        for kind in variants
    ]
    moves = tuple(dict.fromkeys(move for writer in writers for move in writer.moves))
    for writer in writers:
        writer.moves = moves
    return writers


def _words(staged: Variant, direct: Variant, writers: Sequence[Writer], at: Addresses) -> list[int]:
    """The words of one rank: ``ProgramChoice`` of ``kernels/simple.cuh``, then both programs."""
    collective = staged.program.collective
    deciding = range(2 * collective.nranks)  # INPUT and OUTPUT of each rank in turns
    if collective.kind.has_root and staged.mapped:
        own = collective.root << 1 | (collective.kind.rooted == "output")
        deciding = deciding[own : own + 1]
    one, two = (writer.rank(at) for writer in writers)
    head = [_HEAD, _HEAD + len(one), staged.replicas, direct.replicas]
    return [*head, deciding.stop << 32 | deciding.start, *one, *two]


@lru_cache(maxsize=256)
def fits_dual(staged: Program, direct: Program, *, scales: bool, together: int) -> bool:
    """Whether a launch of at most ``together`` ranks can carry both programs, for any of them."""
    try:
        longest = _longest((staged, direct), scales)
    except LaunchRefused:  # too many blocks signal
        return False
    words = _HEAD + longest + 2 * _PADDING
    return launch_bytes(staged.collective.nranks, words, together) <= LARGEST


@lru_cache(maxsize=256)
def fits_one(plan: Plan, launch: Launch, *, scales: bool, together: int) -> bool:
    """Whether a launch can carry a plan, for any of the ranks.

    Cached by the plan, which keeps its hash, not by the long program.

    Raises:
        LaunchRefused: too many blocks signal.

    """
    words = _longest((encode(plan, launch),), scales) + 2 * _PADDING
    return launch_bytes(plan.nranks, words, together) <= LARGEST


def _longest(programs: tuple[Program, ...], scales: bool) -> int:
    """The most words of a rank, of all programs together."""
    # Neither sizes nor addresses make words more or fewer.
    nothing, nranks = Layout(programs[0].collective, (0,)), programs[0].collective.nranks
    workspace, dtype = Workspace(nranks), dtype_of("float32")
    local = [Addresses(rank, (0,) * nranks, 0) for rank in range(nranks)]
    writers = [
        Writer(program, nothing, dtype, workspace, local, scales=scales) for program in programs
    ]
    return max(sum(len(writer.rank(at)) for writer in writers) for at in local)
