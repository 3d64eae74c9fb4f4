"""Choices, kept for all counts for which they hold.

The count of a call decides little: most thresholds lie between calls of very different sizes. CPU
ranks keep choices here; GPU ranks keep each with the call that is prepared for it
(:mod:`.kept_gpu`).
"""

from __future__ import annotations

import threading
from dataclasses import replace

from ringcoll.arguments.calls import Call
from ringcoll.bounded import evict
from ringcoll.launch import Layout
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
        self._kept: dict[tuple[object, ...], tuple[Choice, range]] = {}
        self._adding = threading.RLock()  # a signal handler may make a call in the middle

    def choose(self, call: Call, limits: Limits) -> Choice:
        """The choice for a call, or the error."""
        found, layout = self.find(call, limits)
        return found if found.layout is layout else found.on(layout=layout)

    def find(self, call: Call, limits: Limits) -> tuple[Choice, Layout]:
        """The choice but for its layout, which may be of another count, and the layout."""
        if callable(limits.algorithm):  # it may return another plan each time
            found = choose(call, self._machine, limits, self._fits)
            return found, found.layout
        key = _key(call, limits)
        kept = self._kept.get(key)
        if kept is not None:
            found, counts = kept
            before = found.layout
            layout = layout_of(call, before.collective, before.slices, before.shares, "host")
            if call.count in counts:
                return found, layout
            if self._holds(found.on(layout=layout), call, limits):
                return found, layout
        found = choose(call, self._machine, limits, self._fits)
        counts = self._counts(found, call, limits)
        with self._adding:
            evict(self._kept, KEPT)
            self._kept[key] = found, counts
        return found, found.layout

    def alike(self, call: Call, limits: Limits) -> range:
        """Counts for which :meth:`find` gives the choice of this call, in its slices."""
        kept = self._kept.get(_key(call, limits))
        if kept is None or call.count not in kept[1]:
            return range(0)
        counts, each, size = kept[1], call.nbytes // call.count, power(call.nbytes)
        first, last = size // 2 // each + 1, size // each  # of this power of two
        return range(max(first, counts.start), min(last + 1, counts.stop))

    def _holds(self, found: Choice, call: Call, limits: Limits) -> bool:
        """Whether the plan and the launch of a choice, laid out for this call, are its own."""
        layout, slices, table = found.layout, found.launch.slices, self._machine.table
        if table is not None:
            limits = table.options(call, limits) or limits
        whole = layout if slices == 1 else replace(layout, slices=1)
        if slices_of(call, self._machine, limits, whole) != slices:
            return False
        need, room = self._fits.scratch(call, found)
        return need <= room

    def _counts(self, found: Choice, call: Call, limits: Limits) -> range:
        """Counts about that of a call for which a choice holds, as it does for both ends.

        With one share slices and SCRATCH do not shrink as the count grows: the largest, where each
        rank has its own.
        """
        layout = found.layout
        if layout.shares != (1,):
            return range(0)
        ends = max(1, call.count // 2), 2 * call.count
        for count in ends:
            other = found.on(layout=replace(layout, counts=(count,)))
            if not self._holds(other, call, limits):
                return range(0)
        return range(ends[0], ends[1] + 1)


def _key(call: Call, limits: Limits) -> tuple[object, ...]:
    """What a choice of CPU ranks depends on, but for the slices and the SCRATCH of the count."""
    in_place, dtype = call.in_place if limits.in_place is None else limits.in_place, call.dtype
    size = power(call.nbytes), dtype.name, dtype.wide
    return call.collective, bool(call.counts), call.root, in_place, *size, limits
