"""The plan of a call with its name, and the rings that it goes along."""

from __future__ import annotations

from dataclasses import dataclass

from ringcoll.algorithms import ALGORITHMS, build
from ringcoll.algorithms.channels import Channels, channelled
from ringcoll.arguments.calls import Call
from ringcoll.errors import ArgumentError
from ringcoll.launch import Layout
from ringcoll.plan import Plan

__all__ = ["Planned", "planned"]

_ALIGN = 16
"""Bytes on whose multiples chunks begin."""


@dataclass(frozen=True, slots=True)
class Planned:
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


def planned(
    call: Call,
    nranks: int,
    algorithm: str | None,
    *,
    channels: int | None,
    found: Channels | None,
    default: str,
) -> Planned:
    """The plan of one of our algorithms.

    Args:
        call: checked.
        nranks: of the communicator.
        algorithm: the option.
        channels: the option.
        found: the rings of the machine, the strongest first; None: not known.
        default: what runs where neither option is given.

    Raises:
        ArgumentError: the collective has no such algorithm, or the algorithm no rings.

    """
    where, names = f"{call.collective} on rank {call.rank}", ALGORITHMS[call.collective]
    if algorithm not in (None, *names):
        raise ArgumentError(f"{where}: algorithm={algorithm!r} is not one of {', '.join(names)}")
    wished = algorithm or (default if channels is None else None)
    name, along = channelled(where, call.collective, wished, nranks, channels, found)
    rings = None if along is None else along.rings
    return Planned(build(call.collective, name, nranks, root=call.root, rings=rings), name, along)
