"""What to measure and how, whether flags or a program say so."""

from __future__ import annotations

from dataclasses import dataclass

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "gather",
    "scatter",
    "sendrecv",
    "barrier",
)
"""What can be measured."""

Pace = tuple[float, float] | tuple[float, float, str]
"""B, α, and "pairs" where the links are not a switch, as ``init(pace=)`` takes them."""

PEERS = ("mpi", "gloo", "nccl")
"""What can be measured beside it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure and how.

    Args:
        collective: one of :data:`COLLECTIVES`.
        tour: no arguments: show what there is.
        ranks: how many rank processes to start; None: one for each core, up to four.
        threads: ranks that are threads of one process.
        min_bytes: the first size, in bytes as nccl-tests counts them.
        max_bytes: the last size.
        step_bytes: what is added from size to size, where ``step_factor`` is 1.
        step_factor: what sizes are multiplied by.
        iterations: timed calls a size; None: as many as fit a quarter of a second.
        warmup: untimed calls before them; None: 1, in OMB's loop 100 or 10.
        aggregate: calls an iteration.
        cycles: how often the whole is measured; 0: until it is interrupted.
        checks: how often the result of a size is checked; 0: never.
        ops: operators by name; "all" stands for every legal one.
        dtypes: element types by name; "all" stands for every one.
        roots: roots; None stands for all of them.
        blocking: 1: a barrier after each timed call.
        cpu_time: report the time that this rank's thread ran, not the clock on the wall.
        average: over ranks: 0 takes rank 0, 1 the mean, 2 the fastest, 3 the slowest.
        register: memory of the buffers: 0 plain, 1 registered, 2 symmetric.
        timeout: seconds a wait may take; None: the library's own.
        timestamps: print when a row was measured.
        unalign: elements that the buffers are shifted by.
        per_iteration: report the spread of single iterations too.
        per_iteration_skip: iterations that are left out of the spread.
        algorithms: by name; None: the library's choice.
        slices: S; None: the library's choice.
        pace: of the links; None: as fast as they go.
        peer: what to measure beside ringcoll: "mpi" and "gloo" on CPU ranks, "nccl" on GPUs.
        json: file for the rows, "-" for standard output.
        plot: file for the picture.
        layout: "nccl" or "osu", the look of the table; "osu" measures in OMB's loop too.
        device: "auto", "cpu", "cuda", or the number of the GPU that all ranks share.
        graphs: launches of a CUDA graph of each block of calls; 0: calls are eager.
        seed: of the inputs; None: a new one each run.
        notes: what to print of ignored flags.

    """

    collective: str = "all_reduce"
    tour: bool = False
    ranks: int | None = None
    threads: int = 1
    min_bytes: int = 32 << 20
    max_bytes: int = 32 << 20
    step_bytes: int = 1 << 20
    step_factor: int = 1
    iterations: int | None = None
    warmup: int | None = None
    aggregate: int = 1
    cycles: int = 1
    checks: int = 1
    ops: tuple[str, ...] = ("sum",)
    dtypes: tuple[str, ...] = ("float32",)
    roots: tuple[int, ...] | None = (0,)
    blocking: int = 0
    cpu_time: bool = False
    average: int = 3
    register: int = 2
    timeout: float | None = None
    timestamps: bool = False
    unalign: int = 0
    per_iteration: bool = False
    per_iteration_skip: int = 0
    algorithms: tuple[str | None, ...] = (None,)
    slices: tuple[int | None, ...] = (None,)
    pace: Pace | None = None
    peer: str | None = None
    json: str | None = None
    plot: str | None = None
    layout: str = "nccl"
    device: str = "auto"
    graphs: int = 0
    seed: int | None = None
    notes: tuple[str, ...] = ()
