"""One HTML page of all that the records of a folder hold: it needs no network and runs no script.

What a record says is text: it is escaped, here and by matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count

from ringcoll.bench.fields import Fields
from ringcoll.bench.figures import (
    Ranked,
    by_ranks,
    costs,
    forecasts,
    inline_svg,
    latencies,
    overlaps,
    scaling,
    training,
)
from ringcoll.bench.records import (
    Calls,
    Costs,
    Forecasts,
    Found,
    Overlaps,
    Source,
    Steps,
    found_in,
)
from ringcoll.units import format_bytes
from ringcoll.version import __version__

_STYLE = """
:root { color-scheme: light dark; --line: #c9ced6; --soft: #5c6570; }
@media (prefers-color-scheme: dark) { :root { --line: #3d444d; --soft: #9aa4af; } }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 68rem; padding: 1rem; }
h2 { border-top: 1px solid var(--line); margin-top: 3rem; padding-top: 1rem; }
nav a { margin-right: 1.2rem; white-space: nowrap; }
figure { margin: 2rem 0; }
svg { display: block; height: auto; min-width: 44rem; width: 100%; }
svg.narrow { max-width: 46rem; min-width: 30rem; }
svg text { font-family: system-ui, sans-serif !important; }
figcaption, p.none, details { color: var(--soft); font-size: 0.85rem; }
code { overflow-wrap: anywhere; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { border-bottom: 1px solid var(--line); padding: 0.15rem 0.7rem; text-align: right; }
td:first-child, th:first-child { text-align: left; }
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

Cells = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture, its figures as a table, and where they come from."""

    svg: str
    cells: Cells
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class _Section:
    anchor: str
    title: str
    about: str
    command: str
    plots: Callable[[Sequence[Found], Iterator[int]], Iterator[Plot]]


def page(records: Mapping[str, Fields]) -> str:
    """The page of some records, by the names of their files.

    Raises:
        ArgumentError: a field of a record has the wrong type; the message names the file.

    """
    found: list[Found] = []
    idle = []
    for name, record in records.items():
        mine = list(found_in(record))
        found += mine
        idle += [] if mine else [name]
    numbers = count()
    parts = [_head(len(records))]
    for section in _SECTIONS:
        parts.append(f'<h2 id="{section.anchor}">{section.title}</h2>\n<p>{section.about}</p>\n')
        plots = [_figure(plot) for plot in section.plots(found, numbers)]
        none = (
            f'<p class="none">No record has it: <code>{section.command}</code> measures it.</p>\n'
        )
        parts += plots or [none]
    if idle:
        listed = ", ".join(f"<code>{escape(name)}</code>" for name in idle)
        parts.append(f'<h2 id="others">Records without a plot</h2>\n<p>{listed}</p>\n')
    return "".join([*parts, "</body>\n</html>\n"])


def _head(many: int) -> str:
    links = "".join(f'<a href="#{s.anchor}">{s.title}</a>\n' for s in _SECTIONS)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Measurements of ringcoll</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>Measurements of ringcoll</h1>\n<p>{many} records, drawn by <code>ringcoll report"
        f"</code> {escape(__version__)}. Below each plot stand device, date, commit and command of "
        f"its run. Rows with wrong elements are left out.</p>\n<nav>\n{links}</nav>\n"
    )


def _figure(plot: Plot) -> str:
    captions = "<br>\n".join(map(_caption, plot.sources))
    head, *rows = (
        "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
        for tag, cells in zip(["th", *["td"] * len(plot.cells)], plot.cells, strict=False)
    )
    table = "".join(f"<tr>{row}</tr>\n" for row in (head, *rows))
    return (
        f'<figure>\n<div class="wide">{plot.svg}</div>\n<figcaption>{captions}</figcaption>\n'
        f'<details><summary>numbers</summary><div class="wide"><table>\n{table}</table></div>'
        "</details>\n</figure>\n"
    )


def _caption(source: Source) -> str:
    """The source in words, with its command as code."""
    before, _, after = escape(str(source)).partition(f"`{escape(source.command)}`")
    code = f"<code>{escape(source.command)}</code>" if source.command else ""
    return f"<code>{escape(source.file)}</code>: {before}{code}{after}"


def _peers(found: Sequence[Found], numbers: Iterator[int]) -> Iterator[Plot]:
    for calls in (one for one in found if isinstance(one, Calls)):
        svg = inline_svg(lambda calls=calls: latencies(calls), f"p{next(numbers)}")  # type: ignore[misc]
        libs = list(dict.fromkeys(row["lib"] for row in calls.rows))
        of = {(row["lib"], row["bytes"]): row["us"] for row in calls.rows}
        cells = [[f"{calls.collective}, µs", *libs]]
        for nbytes in sorted({nbytes for _, nbytes in of}):
            cells.append([format_bytes(nbytes), *(_number(of.get((lib, nbytes))) for lib in libs)])
        yield Plot(svg, cells, (calls.source,))


def _host(found: Sequence[Found], numbers: Iterator[int]) -> Iterator[Plot]:
    for one in (one for one in found if isinstance(one, Costs)):
        svg = inline_svg(lambda one=one: costs(one), f"p{next(numbers)}")  # type: ignore[misc]
        rows = [[label, _number(us)] for label, us in one.bars]
        yield Plot(_narrow(svg), [["call", "µs"], *rows], (one.source,))


def _model(found: Sequence[Found], numbers: Iterator[int]) -> Iterator[Plot]:
    for one in (one for one in found if isinstance(one, Forecasts)):
        svg = inline_svg(lambda one=one: forecasts(one), f"p{next(numbers)}")  # type: ignore[misc]
        cells = [["", "S" if one.sliced else "size", "measured, µs", "model, µs", "apart"]]
        for label, x, seconds, model in one.points:
            times = [_number(1e6 * seconds), _number(1e6 * model), f"{seconds / model - 1:+.1%}"]
            cells.append([label, str(x) if one.sliced else format_bytes(x), *times])
        yield Plot(svg, cells, (one.source,))


def _overlap(found: Sequence[Found], numbers: Iterator[int]) -> Iterator[Plot]:
    for one in (one for one in found if isinstance(one, Overlaps)):
        svg = inline_svg(lambda one=one: overlaps(one), f"p{next(numbers)}")  # type: ignore[misc]
        rows = [[name, f"{ours:.2f}", f"{gemm:.2f}"] for name, ours, gemm in one.ways]
        yield Plot(svg, [["way", "slowdown of all_reduce", "of the GEMM"], *rows], (one.source,))


def _scaling(found: Sequence[Found], numbers: Iterator[int]) -> Iterator[Plot]:
    calls: dict[tuple[str, str], list[Calls]] = {}
    runs: dict[tuple[str, str], list[Steps]] = {}
    for one in found:
        if isinstance(one, Calls):
            calls.setdefault((one.title, one.source.machine), []).append(one)
        elif isinstance(one, Steps):
            runs.setdefault((one.title, one.source.machine), []).append(one)
    for (title, machine), group in calls.items():
        if not (times := by_ranks(group)):
            continue
        sizes = {size for of in times.values() for one in of.values() for size in one}
        used = [calls for calls in group if sizes & {row["bytes"] for row in calls.rows}]
        name = f"{title} on {machine}"
        svg = inline_svg(
            lambda c=group[0].collective, t=times, n=name: scaling(c, t, n),  # type: ignore[misc]
            f"p{next(numbers)}",
        )
        yield Plot(svg, _by_rank(times), _sources(used))
    for group_of in runs.values():
        if len({one.nranks for one in group_of}) > 1:
            svg = inline_svg(lambda of=group_of: training(of), f"p{next(numbers)}")  # type: ignore[misc]
            rows = [[w, str(one.nranks), f"{r:.0f}"] for one in group_of for w, r in one.rates]
            head = ["way", "ranks", f"{group_of[0].unit} a second"]
            yield Plot(_narrow(svg), [head, *rows], _sources(group_of))


def _by_rank(times: Ranked) -> Cells:
    ranks = sorted(times)
    keys = sorted({(lib, size) for of in times.values() for lib in of for size in of[lib]})
    cells = [["µs", "size", *(f"{n} ranks" for n in ranks)]]
    for lib, size in keys:
        found = (times[n].get(lib, {}).get(size) for n in ranks)
        cells.append([lib, format_bytes(size), *map(_number, found)])
    return cells


def _sources(found: Iterable[Calls] | Iterable[Steps]) -> tuple[Source, ...]:
    return tuple(dict.fromkeys(one.source for one in found))


def _narrow(svg: str) -> str:
    return svg.replace("<svg ", '<svg class="narrow" ', 1)


def _number(us: float | None) -> str:
    if us is None:
        return ""
    return f"{us:.2f}" if us < 100 else f"{us:.0f}"


_SECTIONS = (
    _Section(
        "peers",
        "Latency and bandwidth beside the peers",
        "The time of a call and its bus bandwidth, as nccl-tests counts it, over the size.",
        "python -m benchmarks.gpu.bars --out FOLDER",
        _peers,
    ),
    _Section(
        "host",
        "What a call costs the host",
        "The host's time until a call returns.",
        "python -m benchmarks.torch_calls --out FOLDER",
        _host,
    ),
    _Section(
        "model",
        "The timing model beside measurements",
        "Lines are the model, points were measured; the residuals on the right have a band of "
        "15 %.",
        "python -m benchmarks.gpu.timing_model --out FOLDER",
        _model,
    ),
    _Section(
        "overlap",
        "Overlap with computation",
        "A GEMM and an all_reduce at once: the time of each, over its time alone.",
        "python -m benchmarks.gpu.overlap --out FOLDER",
        _overlap,
    ),
    _Section(
        "scaling",
        "Scaling over ranks",
        "Runs of the same kind of device with different numbers of ranks.",
        "python -m benchmarks.gpu.bars --ranks N --out FOLDER",
        _scaling,
    ),
)
