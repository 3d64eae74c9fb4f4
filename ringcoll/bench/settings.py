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
    "scan",
    "exscan",
    "sendrecv",
    "barrier",
)
"""What can be measured."""

Pace = tuple[float, float] | tuple[float, float, str]
"""B, α, and "pairs" where the links are not a switch, as ``init(pace=)`` takes them."""

PEERS = ("mpi", "gloo", "nccl")
"""What can be measured beside it."""

NO_NCCL = (
    "--peer nccl works on GPUs, and these ranks are CPUs; add --device cuda, or take --peer mpi or "
    "--peer gloo"
)
"""The error of `--peer nccl` on CPU ranks."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure and how: the flags that ``ringcoll bench --help`` lists.

    Sizes are bytes as nccl-tests counts them, ``timeout`` is seconds, ``unalign`` elements. None is
    the library's choice, or every root, or for ``iterations`` as many as fit a quarter of a second;
    0 ``cycles`` run until interrupted. ``average`` over ranks: 0 takes rank 0, 1 the mean, 2 the
    fastest, 3 the slowest; ``register``: 0 plain memory, 1 registered, 2 symmetric. ``notes`` are
    printed: ignored flags.
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
