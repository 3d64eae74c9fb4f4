"""Choices of CPU ranks, kept for all counts for which they hold."""

from __future__ import annotations

from dataclasses import replace

from ringcoll.arguments.calls import Call
from ringcoll.tuner import choose
from ringcoll.tuner.candidates import layout_of
from ringcoll.tuner.choice import Choice, CpuRanks, Fits, Limits
from ringcoll.tuner.cpu import slices_of
from ringcoll.tuner.predicted import power

KEPT = 128
"""Choices that a communicator keeps: the oldest goes first."""


class KeptChoices:
    """What :func:`ringcoll.tuner.choose` gives to the CPU ranks of one communicator.

    The count of a call decides three things: the power of two for which the model predicts, the
    slices, and whether SCRATCH holds them. Where these are those of a kept choice, so are the plan,
    its program and its proof: only the layout is made anew.
    """

    def __init__(self, machine: CpuRanks, fits: Fits) -> None:
        self._machine, self._fits = machine, fits
        self._kept: dict[tuple[object, ...], Choice] = {}

    def choose(self, call: Call, limits: Limits) -> Choice:
        """The choice for a call, or the error."""
        if callable(limits.algorithm):  # it may return another plan each time
            return choose(call, self._machine, limits, self._fits)
        in_place = call.in_place if limits.in_place is None else limits.in_place
        key = call.collective, call.root, in_place, power(call.nbytes), limits
        kept = self._kept.get(key)
        if kept is not None:
            before = kept.layout
            shape = before.collective, kept.launch.slices, before.shares
            found = kept.on(layout=layout_of(call, *shape, "host"))
            if self._holds(found, call, limits):
                return found
        found = choose(call, self._machine, limits, self._fits)
        while len(self._kept) >= KEPT:
            self._kept.pop(next(iter(self._kept)), None)
        self._kept[key] = found
        return found

    def _holds(self, found: Choice, call: Call, limits: Limits) -> bool:
        """Whether a kept choice, with the layout of this call, is the one for this call."""
        layout, slices = found.layout, found.launch.slices
        whole = layout if slices == 1 else replace(layout, slices=1)
        if slices_of(call, self._machine, limits, whole) != slices:
            return False
        need, room = self._fits.scratch(call, found)
        return need <= room
