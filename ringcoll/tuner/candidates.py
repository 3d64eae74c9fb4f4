"""A plan that may run, and its launch in the fewest slices that fit SCRATCH."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ringcoll.algorithms import ALGORITHMS, build
from ringcoll.algorithms.channels import Channels, channelled
from ringcoll.algorithms.nodes import across
from ringcoll.arguments.calls import Call
from ringcoll.collectives import Collective
from ringcoll.encode import encode
from ringcoll.errors import ArgumentError, LaunchRefused
from ringcoll.launch import Launch, Layout
from ringcoll.plan import Plan
from ringcoll.tuner.choice import Choice, CpuRanks, Fits, GpuRanks, Grid, Limits

WINDOW = 2

_ALIGN = {"host": 64, "sm": 16, "copy": 16}
"""By engine: bytes on whose multiples chunks begin. 64 keep two ranks off one cache line."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """An algorithm's plan; its name is "" for a user's, ``channels`` None without rings."""

    plan: Plan
    algorithm: str = ""
    channels: Channels | None = None

    def layout(self, call: Call, slices: int, engine: str) -> Layout:
        """Where the elements of a call's chunks lie."""
        shares = (1,) if self.channels is None else self.channels.shares
        return layout_of(call, self.plan.collective, slices, shares, engine)


def layout_of(
    call: Call, collective: Collective, slices: int, shares: tuple[int, ...], engine: str
) -> Layout:
    """Where the elements of a call lie in the chunks of a plan's ``collective``."""
    counts, displs = call.counts or (call.count,), call.displs or None
    elements = max(1, _ALIGN[engine] // call.dtype.itemsize)
    return Layout(collective, counts, slices, shares, elements, displs)


def candidate_of(
    call: Call, machine: CpuRanks | GpuRanks, limits: Limits, default: str
) -> Candidate:
    """The plan of the algorithm that an option names, or along so many rings, or by default."""
    name, nranks, names = call.collective, machine.nranks, ALGORITHMS[call.collective]
    algorithm, where = limits.algorithm, f"{name} on rank {call.rank}"
    if callable(algorithm):
        return Candidate(build(name, algorithm, nranks, root=call.root))
    if algorithm not in (None, *names):
        raise ArgumentError(f"{where}: algorithm={algorithm!r} is not one of {', '.join(names)}")
    wanted = algorithm or (default if limits.channels is None else None)
    found = None if machine.known is None else machine.known.channels
    chosen, along = channelled(where, name, wanted, nranks, limits.channels, found)
    rings = None if along is None else along.rings
    if isinstance(machine, CpuRanks) and machine.nodes:
        ordered = limits.orders(name)
        plan = across(name, chosen, machine.nodes, root=call.root, rings=rings, ordered=ordered)
    else:
        plan = build(name, chosen, nranks, root=call.root, rings=rings)
    return Candidate(plan, chosen, along)


def fitted(
    call: Call,
    candidate: Candidate,
    launch: Launch,
    fits: Fits,
    engine: str,
    why: tuple[str, ...] = (),
    *,
    large: bool = False,
) -> Choice:
    """The choice without a grid: in the slices of ``launch``, or in more until they fit SCRATCH.

    ``large``: kernels have the SCRATCH of large calls.
    """
    plan, where = candidate.plan, f"{call.collective} on rank {call.rank}"
    named = engine, candidate.algorithm, candidate.channels
    while True:
        program, layout = encode(plan, launch), candidate.layout(call, launch.slices, engine)
        takes = large and program.scratch > 0
        found = Choice(plan, program, launch, layout, Grid(), *named, None, takes, why)
        need, room = fits.scratch(call, found)
        if need <= room:
            return found
        if launch.in_band:
            raise LaunchRefused(
                f"{where}: protocol={launch.protocol!r} would need {need} bytes of lines, {room} "
                f"are there; use protocol='Simple'"
            )
        if layout.width() <= layout.align:
            raise LaunchRefused(
                f"{where}: {program.scratch} chunks do not fit {room} bytes of SCRATCH; use "
                f"another algorithm"
            )
        # Needs are in proportion to the length of a slice once slots are as many as the window,
        # and there are never more. A 512th more slices make up for lengths that are rounded up,
        # but not always.
        fewest = -(-launch.slices * need * launch.window // (launch.slots * max(1, room)))
        launch = replace(launch, slices=fewest + fewest // 512)
