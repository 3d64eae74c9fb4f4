"""What a call on GPUs runs: algorithm, protocol, slices and how many CUDA blocks.

The thresholds are measured on 4 H200 over NVSwitch; :func:`choose` is pure and equal on all
ranks. An option of the call goes before them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringcoll.algorithms import ALGORITHMS, build
from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.encode import Program, encode
from ringcoll.errors import ArgumentError, LaunchRefused
from ringcoll.executors.cuda.arena import Arena
from ringcoll.executors.cuda.lines import line_bytes, places
from ringcoll.executors.cuda.simple import THREADS, scratch_bytes
from ringcoll.launch import Launch, Layout
from ringcoll.plan import Buffer, Plan

__all__ = ["Chosen", "Wishes", "choose"]

SYNC_THREADS = 32

HOP_BYTES = 650 << 10
"""Bytes that a link carries in the time that another hop takes, 1.8 µs at 364 GB/s: all_reduce goes
by one hop as long as that sends less more than two would. With 4 H200 the two met at 128 KiB."""

LINES_BYTES = {"all_reduce": 1 << 20}
"""Bytes of the larger buffer up to which signals ride in the data; else 2 MiB. 4 H200, 1 MiB:
all_reduce took 13.4 µs so and 14.8 with signals of their own, 2 MiB: 21.9 and 19.2; there
all_gather took 12.2 and 13.5, reduce_scatter 12.3 and 15.8, broadcast 17.4 and 26.6."""

DIRECT_BYTES = {"broadcast": 128 << 10, "reduce": 384 << 10}
"""Bytes up to which the root talks to everyone itself. 4 H200, 256 KiB: broadcast took 6.6 µs so
and 4.8 by scatter_gather, reduce 4.7 and 6.2; 1 MiB: 19.9 and 8.7, 17.0 and 12.2."""

LINE_WORKERS = (128, 256, 480)
"""Threads of a block that carry lines. Small blocks start sooner: 4 H200, 64 KiB: 4.4 µs with
blocks of 128, 7.2 with 512."""

BLOCK_BYTES = 16 << 10
"""Bytes of a slice that a CUDA block moves at least."""

_ALIGN = 16
_WINDOW = 2


@dataclass(frozen=True, slots=True)
class Wishes:
    """The options of a call that decide what runs; None leaves it to the library.

    Args:
        algorithm: a name.
        protocol: "LL" or "Simple".
        slices: S.
        blocks: CUDA blocks a rank, at most.
        plan: of a user's algorithm.

    """

    algorithm: str | None = None
    protocol: str | None = None
    slices: int | None = None
    blocks: int | None = None
    plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """What runs.

    Args:
        plan: the algorithm's.
        program: encoded.
        launch: protocol, slices, mapped buffers.
        layout: where the elements of INPUT and OUTPUT lie.
        replicas: CUDA blocks for each block of the program.
        blocks: CUDA blocks a rank.
        threads: of each.

    """

    plan: Plan
    program: Program
    launch: Launch
    layout: Layout
    replicas: int
    blocks: int
    threads: int


def choose(
    call: Call,
    nranks: int,
    arena: Arena,
    *,
    mapped: frozenset[Buffer],
    most_blocks: int,
    wishes: Wishes,
) -> Chosen:
    """The plan, launch and grid of a call.

    Args:
        call: checked.
        nranks: of the communicator.
        arena: what must hold lines and SCRATCH.
        mapped: the buffers that all ranks can reach.
        most_blocks: CUDA blocks a rank that are sure to run at the same time.
        wishes: the options.

    Raises:
        LaunchRefused: the options cannot carry the call.
        ArgumentError: an option that there is not.

    """
    name = call.collective
    if wishes.protocol not in (None, "LL", "Simple"):
        raise ArgumentError(
            f"{name} on rank {call.rank}: protocol={wishes.protocol!r}; GPU ranks run 'LL' and "
            f"'Simple'"
        )
    protocol = None if name == "barrier" else wishes.protocol
    if protocol == "LL" and (wishes.slices or 1) > 1:
        raise ArgumentError(
            f"{name} on rank {call.rank}: slices={wishes.slices}, but protocol='LL' has one slice; "
            f"leave slices out or take protocol='Simple'"
        )
    small = (
        call.nbytes <= LINES_BYTES.get(name, 2 << 20)
        and name != "barrier"
        and not (wishes.slices or 1) > 1
    )
    if protocol == "LL" or (protocol is None and small):
        try:
            return _in_lines(call, nranks, arena, most_blocks, wishes)
        except LaunchRefused:
            if protocol == "LL":
                raise
    return _in_words(call, nranks, arena, mapped, most_blocks, wishes)


def _plan(call: Call, nranks: int, wishes: Wishes, default: str) -> Plan:
    if wishes.plan is not None:
        return wishes.plan
    algorithm = wishes.algorithm or default
    names = ALGORITHMS[call.collective]
    if algorithm not in names:
        raise ArgumentError(
            f"{call.collective} on rank {call.rank}: algorithm={algorithm!r} is not one of "
            f"{', '.join(names)}"
        )
    return build(call.collective, algorithm, nranks, root=call.root)


def _in_place(call: Call) -> bool:
    """Whether the launch is in place; of a rooted call only the root could know, so none asks.

    In place only adds order to a plan that reduces, so it is right for all. The others copy the
    root's input to its output at most, which does no harm where both are one.
    """
    kind = COLLECTIVES[call.collective]
    return kind.reduces if kind.has_root else call.in_place


def _layout(call: Call, plan: Plan, slices: int = 1) -> Layout:
    counts, displs = call.counts or (call.count,), call.displs or None
    align = max(1, _ALIGN // call.dtype.itemsize)
    return Layout(plan.collective, counts, slices=slices, align=align, displs=displs)


def _in_lines(call: Call, nranks: int, arena: Arena, most_blocks: int, wishes: Wishes) -> Chosen:
    plan = _plan(call, nranks, wishes, _by_lines(call, nranks))
    launch = Launch(protocol="LL", mapped=frozenset(), in_place=_in_place(call))
    program, layout = encode(plan, launch), _layout(call, plan)
    need = line_bytes(program, layout, call.dtype)
    if need > arena.line_half:
        raise LaunchRefused(
            f"{call.collective} on rank {call.rank}: protocol='LL' would need {need} bytes of "
            f"lines, {arena.line_half} are there; use protocol='Simple'"
        )
    pieces = max(1, places(layout, call.dtype))
    most = min(wishes.blocks or most_blocks, most_blocks)
    fitting = (width for width in LINE_WORKERS if -(-pieces // width) <= most)
    workers = next(fitting, LINE_WORKERS[-1])
    blocks = min(most, -(-pieces // workers))
    return Chosen(plan, program, launch, layout, 1, blocks, workers + SYNC_THREADS)


def _by_lines(call: Call, nranks: int) -> str:
    """The algorithm of a call whose signals ride in the data."""
    name, n = call.collective, nranks
    if name == "all_reduce":
        # Bytes in lines count twice: one hop sends (n - 1) buffers, two send 2 (n - 1)/n.
        extra = 2 * call.nbytes * (n - 1) * (1 - 2 / n)
        return "one_shot_push" if extra <= HOP_BYTES else "all_pairs"
    if n > 2 and name in DIRECT_BYTES and call.nbytes > DIRECT_BYTES[name]:
        return "scatter_gather" if name == "broadcast" else "scatter_gather_push"
    return "all_pairs"


def _in_words(
    call: Call,
    nranks: int,
    arena: Arena,
    mapped: frozenset[Buffer],
    most_blocks: int,
    wishes: Wishes,
) -> Chosen:
    default = _DEFAULT[call.collective][bool(mapped)]
    plan = _plan(call, nranks, wishes, default)
    slices = wishes.slices or 1
    while True:
        launch = Launch(slices=slices, window=_WINDOW, mapped=mapped, in_place=_in_place(call))
        layout = _layout(call, plan, slices)
        program = encode(plan, launch)
        if scratch_bytes(program, layout, call.dtype) <= arena.scratch_half:
            break
        if layout.width() <= layout.align:
            raise LaunchRefused(
                f"{call.collective}: {program.scratch} SCRATCH chunks do not fit "
                f"{arena.scratch_half} bytes; use another algorithm"
            )
        slices *= 2
    lanes = max(1, *(len(program.of(rank)) for rank in range(nranks)))
    most = min(arena.replicas, max(1, min(wishes.blocks or most_blocks, most_blocks) // lanes))
    nbytes = layout.width() * call.dtype.itemsize
    replicas = min(most, max(1, -(-nbytes // BLOCK_BYTES)))
    return Chosen(plan, program, launch, layout, replicas, replicas * lanes, THREADS)


_DEFAULT = {
    "all_reduce": ("all_pairs", "two_shot"),
    "broadcast": ("scatter_gather", "scatter_gather"),
    "reduce": ("all_pairs", "one_shot"),
    "all_gather": ("all_pairs", "all_pairs_fused"),
    "reduce_scatter": ("all_pairs", "one_shot"),
    "all_to_all": ("all_pairs", "all_pairs"),
    "gather": ("all_pairs", "one_shot"),
    "scatter": ("all_pairs", "all_pairs"),
    "barrier": ("all_pairs", "all_pairs"),
}
"""Algorithms of large messages: of plain buffers, and of those that all ranks can reach. 4 H200,
64 MiB: all_reduce took 308 µs by two_shot, 326 by two_shot_fused, 476 by all_pairs."""
