"""The plan of a call with its name, the rings that it goes along, and whether it is in place."""

from __future__ import annotations

from dataclasses import dataclass

from ringcoll.algorithms import ALGORITHMS, build
from ringcoll.algorithms.channels import Channels, channelled
from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.errors import ArgumentError
from ringcoll.executors.cuda.limits import CallOptions, Resources
from ringcoll.launch import Layout
from ringcoll.plan import Plan

__all__ = ["NamedPlan", "in_place", "named_plan"]

_ALIGN = 16
"""Bytes on whose multiples chunks begin."""


@dataclass(frozen=True, slots=True)
class NamedPlan:
    """An algorithm's plan.

    Args:
        plan: of the algorithm, or a user's.
        algorithm: its name; "" of a user's plan.
        channels: the rings that it goes along; None: it takes none, or one in rank order.

    """

    plan: Plan
    algorithm: str = ""
    channels: Channels | None = None

    def layout(self, call: Call, slices: int = 1) -> Layout:
        """Where the elements of a call's chunks lie."""
        counts, displs = call.counts or (call.count,), call.displs or None
        align = max(1, _ALIGN // call.dtype.itemsize)
        shares = (1,) if self.channels is None else self.channels.shares
        return Layout(self.plan.collective, counts, slices, shares, align, displs)


def named_plan(call: Call, resources: Resources, options: CallOptions, default: str) -> NamedPlan:
    """The plan of a user's algorithm, or of one of ours.

    Args:
        call: checked.
        resources: what the ranks have; of their machine, its rings.
        options: the options.
        default: the algorithm where no option names one.

    Raises:
        ArgumentError: the collective has no such algorithm, or the algorithm no rings.

    """
    if options.plan is not None:
        return NamedPlan(options.plan)
    where, names = f"{call.collective} on rank {call.rank}", ALGORITHMS[call.collective]
    algorithm, channels = options.algorithm, options.channels
    if algorithm not in (None, *names):
        raise ArgumentError(f"{where}: algorithm={algorithm!r} is not one of {', '.join(names)}")
    nranks, machine = resources.nranks, resources.machine
    wished = algorithm or (default if channels is None else None)
    found = None if machine is None else machine.channels
    name, along = channelled(where, call.collective, wished, nranks, channels, found)
    rings = None if along is None else along.rings
    return NamedPlan(build(call.collective, name, nranks, root=call.root, rings=rings), name, along)


def in_place(call: Call) -> bool:
    """Whether the launch is in place; of a rooted call only the root could know, so none asks.

    In place only adds order to a plan that reduces, so it is right for all. The others copy the
    root's input to its output at most, which does no harm where both are one.
    """
    kind = COLLECTIVES[call.collective]
    return kind.reduces if kind.has_root else call.in_place
