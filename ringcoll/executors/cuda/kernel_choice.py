"""What a call on GPUs runs: a plan, and a choice of its launch, layout and grid.

The chooser (:func:`ringcoll.executors.cuda.choose.choose`) makes a :class:`KernelChoice`;
:func:`body_of` turns it into source text and words, and alone knows all protocols.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ringcoll.algorithms import ALGORITHMS, build
from ringcoll.algorithms.channels import Channels, channelled
from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.encode import Program
from ringcoll.errors import ArgumentError
from ringcoll.executors.cuda.dual_program import Variant, dual_body
from ringcoll.executors.cuda.limits import KernelOptions, Resources
from ringcoll.executors.cuda.ll import ll_body
from ringcoll.executors.cuda.ll_layout import LANES
from ringcoll.executors.cuda.params import Addresses, Body
from ringcoll.executors.cuda.simple import simple_body
from ringcoll.executors.cuda.trace import traced
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.launch import Launch, Layout
from ringcoll.plan import Plan

_ALIGN = 16
"""Bytes on whose multiples chunks begin."""


@dataclass(frozen=True, slots=True)
class NamedPlan:
    """An algorithm's plan; its name is "" for a user's, ``channels`` None without rings."""

    plan: Plan
    algorithm: str = ""
    channels: Channels | None = None

    def layout(self, call: Call, slices: int = 1) -> Layout:
        """Where the elements of a call's chunks lie."""
        counts, displs = call.counts or (call.count,), call.displs or None
        align = max(1, _ALIGN // call.dtype.itemsize)
        shares = (1,) if self.channels is None else self.channels.shares
        return Layout(self.plan.collective, counts, slices, shares, align, displs)


def named_plan(call: Call, resources: Resources, options: KernelOptions, default: str) -> NamedPlan:
    """The plan of a user's algorithm, or of a built-in one."""
    if options.plan is not None:
        return NamedPlan(options.plan)
    where, names = f"{call.collective} on rank {call.rank}", ALGORITHMS[call.collective]
    algorithm, channels = options.algorithm, options.channels
    if algorithm not in (None, *names):
        raise ArgumentError(f"{where}: algorithm={algorithm!r} is not one of {', '.join(names)}")
    nranks, machine = resources.nranks, resources.machine
    wanted = algorithm or (default if channels is None else None)
    found = None if machine is None else machine.channels
    name, along = channelled(where, call.collective, wanted, nranks, channels, found)
    rings = None if along is None else along.rings
    return NamedPlan(build(call.collective, name, nranks, root=call.root, rings=rings), name, along)


def in_place(call: Call) -> bool:
    """Whether the launch is in place.

    Of a rooted call only the root could know, of exscan not rank 0. In place adds order to a plan
    that reduces, which is right for all ranks; the other plans at most copy the root's input to its
    output, which does no harm where both are one.
    """
    kind = COLLECTIVES[call.collective]
    return kind.reduces if kind.uneven != "none" else call.in_place


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The plan, launch, layout and grid of a call."""

    plan: Plan
    program: Program
    launch: Launch
    layout: Layout
    replicas: int  # CUDA blocks for each block of the program
    blocks: int  # CUDA blocks a rank
    threads: int
    engine: str = "sm"  # "copy": copy engines run the lanes of copies
    direct: KernelChoice | None = None  # runs if the hellos name all buffers that decide
    source: NamedPlan | None = None
    why: tuple[str, ...] = field(default=(), compare=False)  # of the timing model

    @property
    def variants(self) -> tuple[KernelChoice, ...]:
        """The choices of which one runs; the kernel's trace holds its index."""
        return (self,) if self.direct is None else (self, self.direct)

    @property
    def reads_hellos(self) -> bool:
        """Whether the ranks read all hellos before they move anything."""
        return bool(self.launch.mapped) or self.direct is not None

    @property
    def sides(self) -> tuple[Variant, Variant]:
        """Both programs of a dual launch."""
        first, last = (
            Variant(found.program, found.layout, found.replicas)
            for found in (self.variants[0], self.variants[-1])
        )
        return first, last

    @property
    def total(self) -> bool:
        """Whether a rank ends only after all have entered, whichever variant runs."""
        return all(found.program.total for found in self.variants)


def body_of(
    choice: KernelChoice, call: Call, workspace: Workspace, local: tuple[Addresses, ...]
) -> Body:
    """Source text and words for the ranks that one launch carries."""
    program, layout, dtype, op = choice.program, choice.layout, call.dtype, call.op
    if choice.launch.in_band:
        lanes = LANES[choice.launch.protocol]
        body = ll_body(program, layout, dtype, op, workspace, local, lanes=lanes)
    elif choice.direct is not None:
        body = dual_body(*choice.sides, dtype, op, workspace, local)
    else:
        body = simple_body(program, layout, dtype, op, workspace, local)
    return traced(body, local)
