"""A plan as a space-time table: a row a rank, a column for each time at which something starts.

A cell says what a rank moves where: ``c2s0>3`` writes slice 0 of chunk 2 to rank 3, ``c2s0<3``
reads it from rank 3, ``+`` before the arrow stands for a reduction, ``!3`` for a signal without
data. What stays within a rank is left out unless it takes time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ringcoll.model.predict import Timed
from ringcoll.plan import Buffer, Step

__all__ = ["LEGEND", "cell", "naming", "space_time", "transfers"]

LEGEND = "c chunk, s slice, >r writes to rank r, <r reads from rank r, + reduces, !r signals rank r"

_NAMED = 4
"""Up to so many peers are listed in a cell."""


def transfers(timed: Iterable[Timed]) -> tuple[Timed, ...]:
    """The steps that cross ranks, or take time."""
    return tuple(t for t in timed if _crosses(t) or t.end > t.start)


def _crosses(timed: Timed) -> bool:
    rank, step = timed.block.rank, timed.step
    if step.dsts:
        return any(chunk.rank != rank for chunk in (*step.srcs, *step.dsts))
    return any(to.rank != rank for to in step.signals)


def naming(moved: Iterable[Timed]) -> tuple[bool, bool]:
    """Whether there are several slices, and several chunks, so that cells must name them."""
    named = [(t.slice, _chunk(t.step)) for t in moved if t.step.dsts]
    return any(number for number, _ in named), len({chunk for _, chunk in named}) > 1


def cell(timed: Timed, *, sliced: bool, chunked: bool) -> str:
    """What a step moves where.

    Args:
        timed: the step.
        sliced: whether to name the slice.
        chunked: whether to name the chunk.

    """
    rank, step = timed.block.rank, timed.step
    if not step.dsts:
        return "!" + _ranks({to.rank for to in step.signals} - {rank})
    what = (_chunk(step) if chunked else "") + (f"s{timed.slice}" if sliced else "")
    text = what or "all"
    if len(step.srcs) > 1:
        text += "+"
    if far := {chunk.rank for chunk in step.srcs} - {rank}:
        text += "<" + _ranks(far)
    if far := {chunk.rank for chunk in step.dsts} - {rank}:
        text += ">" + _ranks(far)
    return text


def _chunk(step: Step) -> str:
    """The chunk as the user's buffers number it, if it touches them."""
    chunks = (*step.dsts, *step.srcs)
    named = [chunk for chunk in chunks if chunk.buffer is not Buffer.SCRATCH] or chunks
    first, size = named[0].index, named[0].size
    letter = "c" if named[0].buffer is not Buffer.SCRATCH else "x"
    return f"{letter}{first}" + (f"-{first + size - 1}" if size > 1 else "")


def _ranks(ranks: set[int]) -> str:
    if len(ranks) <= _NAMED:
        return ",".join(map(str, sorted(ranks)))
    return f"{len(ranks)}ranks"


def space_time(timed: Sequence[Timed], nranks: int, *, width: int = 100) -> str:
    """The table, in as many panels below each other as its width asks for.

    Args:
        timed: the steps of a call, from :meth:`ringcoll.model.predict.Clock.trace`.
        nranks: how many rows there are.
        width: characters a line.

    Returns:
        Lines, the last one ended too. The head of a column is its time in units of the shortest
        transfer where all times are whole multiples of it, else in microseconds.

    """
    moved = transfers(timed)
    if not moved:
        return "nothing moves between ranks\n"
    sliced, chunked = naming(moved)
    cells: defaultdict[tuple[int, float], list[str]] = defaultdict(list)
    for t in moved:
        cells[t.block.rank, t.start].append(cell(t, sliced=sliced, chunked=chunked))
    times = sorted({t.start for t in moved})
    unit, heads = _heads(times, min((t.end - t.start for t in moved), default=0.0))
    columns = [
        [head, *(" ".join(cells.get((rank, time), ())) for rank in range(nranks))]
        for head, time in zip(heads, times, strict=True)
    ]
    names = [f"time / {unit}", *(f"rank {rank}" for rank in range(nranks))]
    return "\n\n".join(_panels(names, columns, width)) + "\n"


def _heads(times: Sequence[float], shortest: float) -> tuple[str, list[str]]:
    """The unit of the times, and the times in it."""
    if shortest > 0:
        steps = [time / shortest for time in times]
        if all(abs(step - round(step)) < 1e-6 for step in steps):
            return "t", [str(round(step)) for step in steps]
    return "us", [f"{time * 1e6:.4g}" for time in times]


def _panels(names: list[str], columns: list[list[str]], width: int) -> list[str]:
    left = max(map(len, names))
    panels: list[str] = []
    while columns:
        taken, used = 0, left
        for column in columns:
            used += 2 + max(map(len, column))
            if taken and used > width:
                break
            taken += 1
        lines = []
        for row, name in enumerate(names):
            line = name.ljust(left)
            for column in columns[:taken]:
                line += "  " + column[row].ljust(max(map(len, column)))
            lines.append(line.rstrip())
        panels.append("\n".join(lines))
        columns = columns[taken:]
    return panels
