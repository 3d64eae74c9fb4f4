"""A plan drawn for people: who sends which chunk to whom when, and what each rank holds at the end.

A row is a rank, time goes right. A bar is a transfer, in the row of the rank that does it, in the
colour of its chunk: the more ranks have contributed to the chunk, the darker. Arrows go the way of
the data. Labels say everything that colours say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ringcoll.model.explain import transfers
from ringcoll.model.plot import new_figure, save_figure
from ringcoll.model.predict import Timed
from ringcoll.plan import Buffer, Chunk

_COLOURS = ("#4477aa", "#ee7733", "#228833", "#aa3377", "#66a8cc", "#997700", "#cc3311", "#777777")
"""Chunks by turns; told apart by people who see colours otherwise, too."""

_LABELLED, _ARROWS = 400, 200
"""Up to so many transfers have a text, and arrows."""

_LISTED = 8
"""Up to so many ranks' contributions are listed, and so many chunks stand at a row's ends."""

_ARROW_PART, _ARROW_MOST = 0.4, 0.065
"""The part of a transfer's time, and of the whole call's, that an arrow takes from its bar."""

_LETTERS = 120
"""Letters of the smaller size that fit side by side over the whole time."""

Held = dict[tuple[Chunk, int], frozenset[int]]
"""The ranks that have contributed to a chunk of one slice."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A transfer as it is drawn; contributions: whose data are summed in what is sent.

    They are empty where the chunks of a transfer differ in that.
    """

    timed: Timed
    chunks: tuple[int, ...]
    contributions: frozenset[int]
    sources: tuple[int, ...]
    targets: tuple[int, ...]


class _Look(NamedTuple):
    """What a drawing names: slices, several chunks, sums."""

    sliced: bool
    chunked: bool
    summed: bool


def draw_transfers(timed: Iterable[Timed]) -> tuple[tuple[Bar, ...], Held]:
    """The transfers with what they carry, and what all buffers hold at the end."""
    held: Held = {}
    names: dict[tuple[Chunk, int], int] = {}
    bars: list[Bar] = []
    moved = {id(t) for t in transfers(timed)}
    for t in sorted(timed, key=lambda t: (t.start, t.end)):
        if not t.step.dsts:
            continue
        carried = [
            [_contributions(held, part, t.slice) for part in _parts(chunk)] for chunk in t.step.srcs
        ]
        sums = [frozenset().union(*column) for column in zip(*carried, strict=True)]
        for chunk in t.step.srcs:
            for part in _parts(chunk):
                held.setdefault((part, t.slice), _contributions(held, part, t.slice))
        numbers = _numbers(t, names)
        for chunk in t.step.dsts:
            names.update(
                ((part, t.slice), n) for part, n in zip(_parts(chunk), numbers, strict=True)
            )
            held.update(
                ((part, t.slice), has) for part, has in zip(_parts(chunk), sums, strict=True)
            )
        if id(t) in moved:
            bars.append(
                Bar(
                    t,
                    numbers,
                    sums[0] if len(set(sums)) == 1 else frozenset(),
                    _others(t, t.step.srcs),
                    _others(t, t.step.dsts),
                )
            )
    return tuple(bars), held


def _parts(chunk: Chunk) -> list[Chunk]:
    return [Chunk(chunk.rank, chunk.buffer, chunk.index + at) for at in range(chunk.size)]


def _contributions(held: Held, part: Chunk, number: int) -> frozenset[int]:
    """Whose data a chunk holds; a rank's INPUT its own, unless it was written in place."""
    own = frozenset({part.rank}) if part.buffer is Buffer.INPUT else frozenset[int]()
    return held.get((part, number), own)


def _numbers(timed: Timed, names: dict[tuple[Chunk, int], int]) -> tuple[int, ...]:
    """The chunks of a step as a user's buffer numbers them, through whatever SCRATCH they came."""
    chunks = (*timed.step.dsts, *timed.step.srcs)
    for chunk in chunks:
        if chunk.buffer is not Buffer.SCRATCH:
            return tuple(part.index for part in _parts(chunk))
    return tuple(names.get((part, timed.slice), part.index) for part in _parts(chunks[-1]))


def _others(timed: Timed, chunks: Sequence[Chunk]) -> tuple[int, ...]:
    return tuple(sorted({chunk.rank for chunk in chunks} - {timed.block.rank}))


def plot_space_time(
    timed: Sequence[Timed], nranks: int, title: str, path: str | Path, *, subtitle: str = ""
) -> None:
    """Draw the steps of a call, from :meth:`ringcoll.model.predict.Clock.trace`, a row a rank."""
    bars, held = draw_transfers(timed)
    look = _Look(
        any(bar.timed.slice for bar in bars),
        len({bar.chunks for bar in bars}) > 1,
        any(len(bar.contributions) > 1 for bar in bars),
    )
    figure = new_figure((11.0, 2.0 + 0.85 * min(nranks, 40)), path)
    axes = figure.add_subplot()
    end = max((bar.timed.end for bar in bars), default=0.0) * 1e6 or 1.0
    for rank in range(nranks):
        axes.axhspan(rank - 0.46, rank + 0.46, color="#f1f1ee", zorder=0)
    strips = _strips(bars, nranks)
    for bar in bars:
        _draw_bar(axes, bar, strips, end, look, nranks, few=len(bars))
    margin = _draw_ends(axes, held, nranks, end)
    _draw_phases(axes, bars, nranks)
    if not bars:
        axes.text(0.5, (nranks - 1) / 2, "no data move between ranks", ha="center", va="center")
    axes.set_xlim(-margin, end + margin)
    axes.set_ylim(nranks - 0.45, -0.85)
    axes.set_yticks(range(nranks), [f"rank {rank}" for rank in range(nranks)], fontsize=12)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= end * 1.001])
    axes.tick_params(length=0)
    axes.set_xlabel("time (us)")
    for side in axes.spines.values():
        side.set_visible(False)
    figure.suptitle(title, fontsize=15, fontweight="bold")
    axes.set_title("\n".join(filter(None, (subtitle, _legend(look)))), fontsize=10, color="#333333")
    save_figure(figure, path)


def _legend(look: _Look) -> str:
    """How to read the bars."""
    said = "A bar is a transfer, its arrow leads to the rank that gets the data"
    if look.summed:
        said += "; 0+1 is the sum of the inputs of ranks 0 and 1"
    return said + "."


def _strips(bars: Sequence[Bar], nranks: int) -> dict[Any, tuple[float, float]]:
    """The middle and the height of the strip of each block: those of a rank share its row."""
    blocks: defaultdict[int, set[Any]] = defaultdict(set)
    for bar in bars:
        blocks[bar.timed.block.rank].add(bar.timed.block)
    found = {}
    for rank in range(nranks):
        height = 0.72 / max(1, len(blocks[rank]))
        for at, block in enumerate(sorted(blocks[rank])):
            found[block] = rank - 0.36 + height * (at + 0.5), height
    return found


def _draw_bar(
    axes: Any,
    bar: Bar,
    strips: dict[Any, tuple[float, float]],
    end: float,
    look: _Look,
    nranks: int,
    *,
    few: int,
) -> None:
    middle, height = strips[bar.timed.block]
    start, width = bar.timed.start * 1e6, (bar.timed.end - bar.timed.start) * 1e6
    arrows = few <= _ARROWS
    room = min(_ARROW_PART * width, _ARROW_MOST * end) if arrows else 0.0
    left, right = room if bar.sources else 0.0, room if bar.targets else 0.0
    if left and right:
        left, right = left / 2, right / 2
    first, last = start + left, start + width - right
    number = bar.chunks[0] if look.chunked else bar.timed.slice
    colour = _tint(_COLOURS[number % len(_COLOURS)], len(bar.contributions) / nranks, look)
    axes.barh(middle, last - first, height * 0.9, first, color=colour, edgecolor="white", zorder=2)
    if few <= _LABELLED:
        size = 9 if height > 0.3 else 7
        letters = int((last - first) / end * _LETTERS * 7 / size)
        text = {"ha": "center", "va": "center", "color": _ink(colour), "zorder": 4}
        said = _label(bar, look, nranks, letters, lines=2 if height > 0.5 else 1)
        axes.text((first + last) / 2, middle, said, fontsize=size, **text)
    if not arrows:
        return
    for source in bar.sources:
        _arrow(axes, (start, source), (first, middle), colour)
    for target in bar.targets:
        _arrow(axes, (last, middle), (start + width, target), colour)


def _label(bar: Bar, look: _Look, nranks: int, letters: int, lines: int) -> str:
    """The longest text that fits a bar; "" where none does."""
    first, last, count = bar.chunks[0], bar.chunks[-1], len(bar.chunks)
    together = count > 1 and bar.chunks == tuple(range(first, last + 1))
    numbers = f"{first}-{last}" if together else ",".join(map(str, bar.chunks))
    names = [f"chunk{'s' * (count > 1)} {numbers}"] if look.chunked else []
    ranks = sorted(bar.contributions)
    short = [f"c{numbers}"] if look.chunked else []
    if look.sliced:
        names.append(f"slice {bar.timed.slice}")
        short.append(f"s{bar.timed.slice}")
    summed = [] if look.chunked or look.sliced else ["all"]
    if look.summed and ranks:
        listed = "+".join(map(str, ranks)) if nranks <= _LISTED else f"{len(ranks)} summed"
        summed.append(listed if len(ranks) > 1 else f"of rank {ranks[0]}")
    for above, below in ((names, summed), (short, summed), (short, [])):
        parts = [" ".join(words) for words in (above, below) if words]
        text = ("\n" if lines == 2 else " ").join(parts)
        if max(map(len, text.split("\n"))) <= letters:
            return text
    return ""


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], colour: Any) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.6, "shrinkA": 1, "shrinkB": 1}
    axes.annotate("", end, start, arrowprops=style, zorder=3)


def _tint(colour: str, share: float, look: _Look) -> tuple[float, float, float]:
    """A colour, paler where fewer have contributed."""
    from matplotlib.colors import to_rgb

    strength = 0.35 + 0.65 * share if look.summed else 0.85
    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(colour))
    return red, green, blue


def _ink(colour: tuple[float, float, float]) -> str:
    """Black or white, whichever is read on a colour."""
    red, green, blue = colour
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else "black"


def _draw_phases(axes: Any, bars: Sequence[Bar], nranks: int) -> None:
    """A line over the transfers of sums that still grow, and over those of finished ones."""
    growing = [bar.timed for bar in bars if len(bar.contributions) < nranks]
    finished = [bar.timed for bar in bars if len(bar.contributions) == nranks]
    if not (growing and finished) or max(t.start for t in growing) >= min(
        t.start for t in finished
    ):
        return
    for said, timed in (("sums grow", growing), ("finished sums are handed on", finished)):
        first, last = min(t.start for t in timed) * 1e6, max(t.end for t in timed) * 1e6
        gap = (last - first) / 60
        style = {"arrowstyle": "|-|,widthA=0.3,widthB=0.3", "color": "#555555"}
        axes.annotate("", (last - gap, -0.56), (first + gap, -0.56), arrowprops=style)
        axes.text((first + last) / 2, -0.72, said, ha="center", va="center", fontsize=10)


def _draw_ends(axes: Any, held: Held, nranks: int, end: float) -> float:
    """The chunks that each rank has before and after; how much room they take beside the bars."""
    count = 1 + max(
        (part.index for part, _ in held if part.buffer is not Buffer.SCRATCH), default=0
    )
    if count > _LISTED or nranks > 2 * _LISTED:
        return 0.01 * end
    size = 0.032 * end
    summed = any(len(has) > 1 for has in held.values())
    for (part, number), has in held.items():
        if number or part.buffer is Buffer.SCRATCH:
            continue
        before = part.buffer is Buffer.INPUT
        middle = size * (part.index + 0.7)
        middle = middle - size * (count + 0.6) if before else end + middle
        look = _Look(sliced=False, chunked=True, summed=summed)
        share = 1 / nranks if before else len(has) / nranks
        colour = _tint(_COLOURS[part.index % len(_COLOURS)], share, look)
        box = (part.rank, size * 0.9, 0.5, middle - size * 0.45)
        axes.barh(*box, color=colour, edgecolor="white", zorder=2)
        text = {"ha": "center", "va": "center", "color": _ink(colour)}
        axes.text(middle, part.rank, str(part.index), **text)
    for name, middle in (("input", -0.1 - count / 2), ("output", 0.2 + count / 2)):
        at = middle * size - 0.5 * size if name == "input" else end + middle * size
        axes.text(at, -0.72, name, ha="center", va="center", fontsize=10)
    return size * (count + 0.8)
