"""Two programs for one call: the kernel runs the one that the ranks' hellos ask for.

Whether peers reach the buffer that only the root has, only the root knows, so that the ranks cannot
choose by it before the call; nor can they by buffers of which each rank knows its own alone. But
where each of them hears all hellos before it moves anything, these say it. So the launch carries
the words of two programs, each lowered and encoded for itself, and a call runs one of them on all
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ringcoll.dtypes import DType, ReduceOp, dtype_of
from ringcoll.encode import Program, encode
from ringcoll.errors import LaunchRefused
from ringcoll.executors.cuda.params import LARGEST, Addresses, Body, launch_bytes, padded
from ringcoll.executors.cuda.simple import Writer, simple_text
from ringcoll.executors.cuda.source import names_of
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.launch import Launch, Layout
from ringcoll.plan import Plan

__all__ = ["Variant", "dual_body", "fits_dual", "fits_one"]

_HEAD = 5
"""Words before both programs': see ``Asked`` of ``kernels/simple.cuh``."""

_PADDING = 16
"""Words by which those of a rank are padded at most; so many again where a record is kept."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the programs.

    Args:
        replicas: CUDA blocks for each block of it.

    """

    program: Program
    layout: Layout
    replicas: int


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
        staged: runs where peers cannot reach what is asked for: of a rooted call the buffer that
            only the root has, else all of all ranks.
        op: of the call; None where nothing is reduced.

    Raises:
        LaunchRefused: slices do not fit SCRATCH, or too many blocks signal.

    """
    scales = op is not None and op.scales
    writers = [
        Writer(kind.program, kind.layout, dtype, workspace, local, scales=scales)
        for kind in (staged, direct)
    ]
    moves = tuple(dict.fromkeys(move for writer in writers for move in writer.moves))
    for writer in writers:
        writer.moves = moves  # one text has the moves of both
    collective = staged.program.collective
    asked = range(2 * collective.nranks)  # INPUT and OUTPUT of each rank in turns
    if collective.kind.has_root:
        own = collective.root << 1 | (collective.kind.rooted == "output")
        asked = asked[own : own + 1]

    def words(at: Addresses) -> list[int]:
        one, two = (writer.rank(at) for writer in writers)
        begins = _HEAD, _HEAD + len(one)
        return [
            *begins,
            staged.replicas,
            direct.replicas,
            asked.stop << 32 | asked.start,
            *one,
            *two,
        ]

    rows = padded([words(at) for at in local])
    text = simple_text(
        names_of(dtype, op), collective.nranks, len(rows[0]), len(local), moves, "run_dual"
    )
    return Body(text, rows, (0,) * len(local), 0, workspace.scratch_half)


@lru_cache(maxsize=256)
def fits_dual(staged: Program, direct: Program, *, scales: bool, together: int) -> bool:
    """Whether a launch can carry both programs, whichever ranks it is for.

    Args:
        together: ranks that one launch carries, at most.

    """
    try:
        longest = _longest((staged, direct), scales)
    except LaunchRefused:  # too many blocks signal
        return False
    words = _HEAD + longest + 2 * _PADDING
    return launch_bytes(staged.collective.nranks, words, together) <= LARGEST


@lru_cache(maxsize=256)
def fits_one(plan: Plan, launch: Launch, *, scales: bool, together: int) -> bool:
    """Whether a launch can carry a plan, whichever ranks it is for; the others as of `fits_dual`.

    It is known again by the plan, which keeps its hash, and not by the long program.

    Raises:
        LaunchRefused: too many blocks signal.

    """
    words = _longest((encode(plan, launch),), scales) + 2 * _PADDING
    return launch_bytes(plan.nranks, words, together) <= LARGEST


def _longest(programs: tuple[Program, ...], scales: bool) -> int:
    """Words of the rank that has the most, of all programs together."""
    # Neither sizes nor addresses make words more or fewer.
    nothing, nranks = Layout(programs[0].collective, (0,)), programs[0].collective.nranks
    workspace, dtype = Workspace(nranks), dtype_of("float32")
    local = [Addresses(rank, (0,) * nranks, 0) for rank in range(nranks)]
    writers = [
        Writer(program, nothing, dtype, workspace, local, scales=scales) for program in programs
    ]
    return max(sum(len(writer.rank(at)) for writer in writers) for at in local)
