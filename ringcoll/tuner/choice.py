"""What a choice is made from, and what it is."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ringcoll.algorithms import ALGORITHMS, Algorithm, build, name_of
from ringcoll.algorithms.channels import Channels
from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.config import Config
from ringcoll.dtypes import Accumulate
from ringcoll.encode import Program
from ringcoll.launch import Launch, Layout
from ringcoll.plan import Buffer, Plan, format_plan

if TYPE_CHECKING:  # most CPU ranks know no machine
    from ringcoll.model.machine import Machine
    from ringcoll.tuner.table import Table

MAKING = threading.RLock()
"""Held to make a plan or a prediction: of ranks that are threads, one makes it for all."""


@dataclass(frozen=True, slots=True)
class CpuRanks:
    """The CPU ranks of a communicator; ``nodes`` is the node of each, where there are several."""

    nranks: int
    nodes: tuple[int, ...] = ()
    known: Machine | None = None  # the machine's links and rings
    table: Table | None = None  # what `ringcoll tune` has measured


@dataclass(frozen=True, slots=True)
class GpuRanks:
    """The GPU ranks of a communicator of one node, and the kernels that its executor has."""

    nranks: int
    blocks: int  # CUDA blocks a rank that are resident at the same time
    nvlink: bool  # whether it joins all ranks, which LL128 requires
    together: int  # the most ranks that share a launch
    replicas: int  # the most CUDA blocks for each block of a program
    threads: int  # of a block of Simple
    workers: int  # of a block of LL or LL128, at most: threads that move data
    sync_threads: int  # of a block of LL or LL128: the others
    known: Machine | None = None  # the machine's links and rings; None: all pairs are alike
    table: Table | None = None  # what `ringcoll tune` has measured
    large_scratch: bool = False  # whether large calls have SCRATCH of their own after some time

    def most(self, limits: Limits) -> int:
        """CUDA blocks that a call may have on a rank."""
        asked = limits.blocks
        return asked if asked and asked < self.blocks else self.blocks


@dataclass(frozen=True, slots=True)
class Limits:
    """What a call leaves to the tuner: its options, None where it is free, and its memory."""

    algorithm: Algorithm | None = None
    protocol: str | None = None
    slices: int | None = None
    blocks: int | None = None  # CUDA blocks a rank, at most
    engine: str | None = None
    channels: int | None = None
    deterministic: bool = False
    accumulate: Accumulate = "wide"
    verify: bool = False
    mapped: frozenset[Buffer] = frozenset()  # the buffers that all peers reach
    in_place: bool | None = None  # None: as the call is
    hellos_decide: bool = False  # the launch carries two programs; the hellos select one
    large_scratch: str | None = None  # what has some, "sm" or "copy": see LARGE_BYTES

    @property
    def proves(self) -> bool:
        """Whether a choice is proven before it runs."""
        return callable(self.algorithm) or self.verify or self.deterministic

    def orders(self, collective: str) -> bool:
        """Whether a collective must sum in rank order."""
        return self.deterministic and COLLECTIVES[collective].reduces

    def signature(self, call: Call, nranks: int) -> str:
        """The options of CPU ranks that must be equal on all ranks, as text; "" if none is set."""
        texts = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name in _SIGNED and getattr(self, field.name) != field.default
        }
        if callable(self.algorithm):
            with MAKING:
                plan = build(call.collective, self.algorithm, nranks, root=call.root)
            texts["algorithm"] = f"{name_of(self.algorithm)} (plan {_digest(plan)})"
        return " ".join(f"{name}={value}" for name, value in texts.items())


_SIGNED = ("algorithm", "slices", "channels", "deterministic", "accumulate")


def limits_of(call: Call, config: Config, default: Config) -> Limits:
    """The options of a call; ``default`` are the communicator's own.

    An algorithm or channels of the communicator do not hold for collectives that lack them; nor do
    slices for a barrier, which has nothing to slice.
    """
    algorithm, names = config.algorithm, ALGORITHMS[call.collective]
    if algorithm is default.algorithm and (
        call.collective == "barrier" if callable(algorithm) else algorithm not in names
    ):
        algorithm = None
    inherited = config.channels == default.channels
    return Limits(
        algorithm,
        config.protocol,
        None if call.collective == "barrier" else config.slices,
        config.max_sms,
        config.engine,
        None if inherited and "ring" not in names else config.channels,
        bool(config.deterministic),
        "dtype" if config.accumulate == "dtype" else "wide",
        bool(config.verify),
    )


class Grid(NamedTuple):  # made in half of a frozen dataclass's time
    """The CUDA blocks of a rank; all 0 on CPU ranks."""

    replicas: int = 0  # CUDA blocks for each block of the program
    blocks: int = 0  # CUDA blocks a rank
    threads: int = 0


_NO_BLOCKS = Grid()


@dataclass(frozen=True, slots=True)
class Choice:
    """What a call runs, and why."""

    plan: Plan
    program: Program
    launch: Launch
    layout: Layout
    grid: Grid = _NO_BLOCKS
    engine: str = "host"  # or "sm", or "copy": copy engines run the lanes of copies
    algorithm: str = ""  # "" is a user's
    channels: Channels | None = None  # the rings that the plan goes along
    direct: Choice | None = None  # runs if the hellos name all buffers that decide
    large_scratch: bool = False  # whether it has that of large calls
    why: tuple[str, ...] = field(default=(), compare=False)  # lines of text

    def on(self, grid: Grid | None = None, layout: Layout | None = None) -> Choice:
        """The same with another grid or layout, far faster than by ``dataclasses.replace``."""
        parts = self.plan, self.program, self.launch, layout or self.layout, grid or self.grid
        how = self.engine, self.algorithm, self.channels, self.direct, self.large_scratch
        return Choice(*parts, *how, self.why)

    @property
    def variants(self) -> tuple[Choice, ...]:
        """The choices of which one runs; the kernel's trace holds its index."""
        return (self,) if self.direct is None else (self, self.direct)

    @property
    def takes_large(self) -> bool:
        """Whether any of them has the SCRATCH of large calls, or may: copy engines."""
        return any(found.large_scratch or found.engine == "copy" for found in self.variants)

    @property
    def reads_hellos(self) -> bool:
        """Whether GPU ranks read all hellos before they move anything.

        The SCRATCH of large calls is nobody's any more when all have entered.
        """
        return bool(self.launch.mapped) or self.direct is not None or self.large_scratch

    @property
    def total(self) -> bool:
        """Whether a rank ends only after all have entered, whichever variant runs."""
        return all(found.program.total for found in self.variants)


class Fits(Protocol):
    """What the memory and the launches of an executor hold; the tuner knows no executor."""

    def scratch(self, call: Call, choice: Choice) -> tuple[int, int]:
        """Bytes of SCRATCH that the choice needs, and bytes that are there."""

    def parameters(self, call: Call, choices: Sequence[Choice], together: int) -> bool:
        """Whether one launch of so many ranks holds the steps of all these choices."""

    def packs(self, call: Call, launch: Launch, layout: Layout) -> int:
        """The parts of lines that threads move, of the longest chunk by LL or LL128."""


@lru_cache(maxsize=64)
def _digest(plan: Plan) -> str:
    """A digest, by which ranks compare the plans that their users' functions have made."""
    import hashlib  # it loads OpenSSL

    return hashlib.blake2b(format_plan(plan).encode(), digest_size=6).hexdigest()
