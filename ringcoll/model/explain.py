"""A plan as a space-time table: a row a rank, a column for each time at which something starts.

A cell says what a rank moves where: ``c2s0>3`` writes slice 0 of chunk 2 to rank 3, ``c2s0<3``
reads it from rank 3, ``+`` before the arrow stands for a reduction, ``!3`` for a signal without
data. What stays within a rank is left out unless it takes time.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape

from ringcoll.errors import PlanError
from ringcoll.model.links import Links
from ringcoll.model.predict import Clock, Timed, parts_of
from ringcoll.plan import Buffer, Plan, Step, format_plan

LEGEND = (
    "c chunk, x SCRATCH chunk, s slice, >r writes to rank r, <r reads from rank r, + reduces, "
    "!r signals rank r"
)

_NAMED = 4
"""Up to so many peers are listed in a cell."""

MOST_RANKS, _MOST_STEPS = 64, 4096
"""Ranks and steps of a plan that a table is made for."""


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
    """What a step moves where, with its slice and chunk if those are to be named."""
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
    """The table in panels of at most ``width`` characters a line, one below the other.

    The head of a column is its time in units of the shortest transfer where all times are whole
    multiples of it, else in microseconds. The last line is ended too.
    """
    names, columns = _table(timed, nranks)
    if not columns:
        return "nothing moves between ranks\n"
    return "\n\n".join(_panels(names, columns, width)) + "\n"


def plan_text(plan: Plan) -> str:
    """What ``print(plan)`` shows: the collective, and who moves what when.

    Every transfer takes one t, as if each pair of ranks had a link. A plan that is wrong or very
    large has no such table: its steps are listed.
    """
    timed = _evenly_timed(plan)
    if timed is None:
        return format_plan(plan)
    width = shutil.get_terminal_size((100, 24)).columns
    return f"{plan.collective}\n\n{space_time(timed, plan.nranks, width=width)}\n{LEGEND}"


def plan_html(plan: Plan) -> str:
    """The same as a table for notebooks."""
    timed = _evenly_timed(plan)
    if timed is None:
        return f"<pre>{escape(format_plan(plan))}</pre>"
    (corner, *ranks), columns = _table(timed, plan.nranks)
    heads = "".join(f"<th>{escape(column[0])}</th>" for column in columns)
    rows = [f"<tr><th>{escape(corner)}</th>{heads}</tr>"]
    for row, name in enumerate(ranks, 1):
        cells = "".join(f"<td>{escape(column[row])}</td>" for column in columns)
        rows.append(f"<tr><th>{name}</th>{cells}</tr>")
    table = "<table>" + "".join(rows) + "</table>"
    return f"<p>{escape(str(plan.collective))}</p>{table}<p>{escape(LEGEND)}</p>"


def _evenly_timed(plan: Plan) -> tuple[Timed, ...] | None:
    """The steps of a plan where a chunk takes a second; None where it cannot be timed."""
    if plan.nranks > MOST_RANKS or len(plan.order) > _MOST_STEPS:
        return None
    silent = not any(step.dsts for _, step in plan.order)
    links = Links(1.0, alpha=float(silent), topology="pairs")
    try:
        return Clock(plan, links).trace(parts_of(plan.collective))
    except PlanError:
        return None


def _table(timed: Sequence[Timed], nranks: int) -> tuple[list[str], list[list[str]]]:
    """The names of the rows, the head's first, and for each time a column of as many cells."""
    moved = transfers(timed)
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
    return [f"time / {unit}", *(f"rank {rank}" for rank in range(nranks))], columns


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
