"""What the ranks of the benchmark of training have said, as rows, a table and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["ALONE", "compare", "repeated", "rows_of", "table", "write_curves"]

ALONE = "no communication"
"""The way of steps that do not communicate."""

Row = dict[str, Any]
Case = tuple[str, int]


def rows_of(
    cases: Sequence[Case],
    ways: Sequence[str],
    ranks: int,
    units: Mapping[str, tuple[str, int]],
    said: Sequence[Row],
) -> list[Row]:
    """A row for each case and way.

    Args:
        cases: models, and samples of a batch of each rank.
        ways: that were measured.
        ranks: how many there were.
        units: of each model, what is counted and how many of that a sample holds.
        said: as ``benchmarks.models.ranks.measure`` sends it, of all ranks: ``seconds`` and
            ``digest`` (and ``after``, a later one) are lists, by rank.

    """
    rows: list[Row] = []
    for number, (model, batch) in enumerate(cases):
        mine = [message for message in said if message["case"] == number]
        slowest = {
            way: [max(m["seconds"]) for m in mine if m["way"] == way and "seconds" in m]
            for way in (*ways, ALONE)
        }
        trained = {m["way"]: m for m in mine if "curve" in m}
        after = {
            way: [m["after"] for m in mine if m["way"] == way and "after" in m] for way in ways
        }
        unit, count = units[model]
        for way in ways:
            if not (slowest[way] and slowest[ALONE]):
                continue  # the ranks did not come so far
            seconds = statistics.median(slowest[way])
            alone = statistics.median(slowest[ALONE])
            rows.append(
                {
                    "model": model,
                    "batch": batch,
                    "way": way,
                    "ranks": ranks,
                    "step_ms": round(seconds * 1e3, 3),
                    "step_ms_min": round(min(slowest[way]) * 1e3, 3),
                    "step_ms_max": round(max(slowest[way]) * 1e3, 3),
                    "rounds_ms": [round(seconds * 1e3, 3) for seconds in slowest[way]],
                    "alone_ms": round(alone * 1e3, 3),
                    "not_hidden": round(1 - alone / seconds, 4),
                    "unit": unit,
                    "per_second": round(count * batch * ranks / seconds, 1),
                    "curve": trained[way]["curve"],
                    "replicas_equal": _equal(trained[way]["digest"], *after[way]),
                }
            )
    return rows


def _equal(*digests: Sequence[str]) -> bool:
    """Whether all ranks had the same weights, each time."""
    return all(len(set(ranks)) == 1 for ranks in digests)


def compare(rows: Iterable[Row], peer: str) -> None:
    """Add to each row what it is beside others.

    ``efficiency`` is its rate over that of one rank times the ranks; ``of_peer`` its step over the
    peer's, by FSDP2 if it is by that, as the median of the rounds, whose two steps a loaded host
    delays alike; ``of_peer_error`` the standard error of that median, from the rounds' quartiles;
    ``loss_differs`` the largest difference of a loss to the peer's, over its first loss.
    """
    found = {(row["model"], row["batch"], row["way"], row["ranks"]): row for row in rows}
    for (model, batch, way, ranks), row in found.items():
        single = found.get((model, batch, way, 1))
        sharded = "-fsdp" if "-fsdp" in way else ""
        other = found.get((model, batch, peer + sharded, ranks))
        if single is not None:
            row["efficiency"] = round(row["per_second"] / (single["per_second"] * ranks), 4)
        if other is not None:
            ratios = [a / b for a, b in zip(row["rounds_ms"], other["rounds_ms"], strict=False)]
            row["of_peer"] = round(statistics.median(ratios), 4)
            if len(ratios) > 1:
                row["of_peer_error"] = round(_error_of_median(ratios), 4)
            pairs = zip(row["curve"], other["curve"], strict=True)
            row["loss_differs"] = max(abs(a - b) for a, b in pairs) / abs(other["curve"][0])


def _error_of_median(values: Sequence[float]) -> float:
    """The standard error of a median of normal values: 1.253 sigma / sqrt(n).

    Sigma is taken as the interquartile range / 1.349, which values that lie far off do not change;
    of five values that is a quarter too much.
    """
    low, _, high = statistics.quantiles(values, n=4)
    return float(1.253 / 1.349 * (high - low) / len(values) ** 0.5)


def repeated(
    cases: Sequence[Case],
    ways: Sequence[str],
    buckets: Sequence[float],
    ranks: int,
    said: Sequence[Row],
) -> list[Row]:
    """For each case and way, whether all runs have ended in the same weights, to the bit.

    Args:
        cases: models, and samples of a batch of each rank.
        ways: that were tried.
        buckets: MiB of DDP's buckets in each run.
        ranks: how many there were.
        said: as ``benchmarks.models.ranks.repeat`` sends it, of all ranks: ``digest`` is a list.

    """
    rows: list[Row] = []
    for number, (model, batch) in enumerate(cases):
        for way in ways:
            mine = [m for m in said if (m["case"], m["way"]) == (number, way)]
            digests = {digest for message in mine for digest in message["digest"]}
            rows.append(
                {
                    "model": model,
                    "batch": batch,
                    "way": way,
                    "ranks": ranks,
                    "buckets_mib": [message["bucket"] for message in mine],
                    "equal": len(mine) == len(buckets) and len(digests) == 1,
                    "last_loss": [message["curve"][-1] for message in mine],
                }
            )
    return rows


def table(rows: Sequence[Row]) -> str:
    """A line a row, for a person."""
    if rows and "equal" in rows[0]:
        lines = [
            f"{row['model']:<9} batch {row['batch']:>4}, {row['ranks']} ranks, {row['way']:<14} "
            f"buckets of {row['buckets_mib']} MiB: "
            f"{'equal to the bit' if row['equal'] else 'DIFFERENT'}"
            for row in rows
        ]
        return "\n".join(lines)
    lines = [
        f"{'model':<9} {'batch':>5} {'ranks':>5} {'way':<14} {'ms a step':>9} {'a second':>15} "
        f"{'of peer':>8} {'error':>6} {'efficiency':>10} {'not hidden':>10} {'loss differs':>12}"
    ]
    for row in rows:
        rate = f"{row['per_second']:.0f} {row['unit']}"
        lines.append(
            f"{row['model']:<9} {row['batch']:>5} {row['ranks']:>5} {row['way']:<14} "
            f"{row['step_ms']:>9.2f} {rate:>15} {_cell(row, 'of_peer', '8.3f')} "
            f"{_cell(row, 'of_peer_error', '6.3f')} "
            f"{_cell(row, 'efficiency', '10.3f')} {row['not_hidden']:>10.1%} "
            f"{_cell(row, 'loss_differs', '12.1e')}"
            f"{'' if row['replicas_equal'] else '  REPLICAS DIFFER'}"
        )
    return "\n".join(lines)


def _cell(row: Row, key: str, form: str) -> str:
    width = int(form.partition(".")[0])
    return format(row[key], form) if key in row else "-".rjust(width)


def write_curves(rows: Sequence[Row], path: Path) -> None:
    """Draw the losses of all ways over each other, for each case of the most ranks."""
    from matplotlib.figure import Figure

    most = max(row["ranks"] for row in rows)
    rows = [row for row in rows if row["ranks"] == most]
    cases = list(dict.fromkeys((row["model"], row["batch"]) for row in rows))
    figure = Figure(figsize=(5.5 * len(cases), 4), layout="constrained")
    for axes, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        shown = [row for row in rows if (row["model"], row["batch"]) == case]
        for number, row in enumerate(shown):
            # The first is the widest, so that it is seen below those that lie on it.
            width, style = 6 / (1 + number), ("-", "--", ":")[number % 3]
            axes.plot(row["curve"], style, label=row["way"], linewidth=width)
        axes.set_title(f"{case[0]}, batch {case[1]} a rank, {most} ranks")
        axes.set_xlabel("step")
        axes.set_ylabel("loss, mean over the ranks")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=100)
