"""What records of benchmarks hold that can be drawn, by :mod:`ringcoll.bench.figures`.

A record is recognised by what it holds, whichever benchmark has written it; one of ``ringcoll bench
--json`` too.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringcoll.bench.fields import Fields, printable
from ringcoll.bench.plot import compared
from ringcoll.units import format_bytes

LIBRARIES = {
    "ringcoll": "ringcoll",
    "ringcoll plain": "ringcoll, plain memory",
    "nccl": "NCCL",
    "nccl symmetric": "NCCL, symmetric windows",
    "torch": "torch symmetric memory",
    "yardstick": "kernel by hand",
    "mpi": "MPI",
}
"""What records call a library, and its name in tables and plots, in their order."""

_ALTERNATIVES = frozenset({"protocol", "slices", "channels", "engine", "max_sms", "options"})
"""Keys of rows that were measured with options, not as the library chooses."""

_COMMIT = re.compile(r"[0-9a-f]{7,40}\+?")

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """Where figures come from; "" for what the record does not say."""

    file: str
    machine: str
    device: str
    date: str
    commit: str
    command: str
    note: str

    def __str__(self) -> str:
        changed = " (+: with uncommitted changes)" * self.commit.endswith("+")
        commit = f"commit {self.commit}{changed}" if self.commit else "commit not recorded"
        command = f"`{self.command}`" if self.command else "command not recorded"
        note = f" {self.note.rstrip('.')}." if self.note else ""
        return f"{self.device}; {self.date[:10] or 'no date'}, {commit}: {command}.{note}"


@dataclass(frozen=True, slots=True)
class Calls:
    """Times of one collective by library and size, as :mod:`ringcoll.bench.plot` draws them."""

    title: str
    collective: str
    nranks: int
    rows: tuple[Row, ...]
    source: Source


@dataclass(frozen=True, slots=True)
class Costs:
    """Microseconds of the host, by what is called."""

    title: str
    bars: tuple[tuple[str, float], ...]
    source: Source


@dataclass(frozen=True, slots=True)
class Forecasts:
    """Seconds that were measured, and what the model says: points (curve, x, measured, model).

    ``x`` is the number of slices of a chain, else the bytes of the call.
    """

    title: str
    points: tuple[tuple[str, int, float, float], ...]
    sliced: bool
    source: Source


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Slowdowns of an all_reduce and of the GEMM beside it: (way, all_reduce's, GEMM's)."""

    title: str
    ways: tuple[tuple[str, float, float], ...]
    source: Source


@dataclass(frozen=True, slots=True)
class Steps:
    """Units a second in training, by way, of one model on so many ranks."""

    title: str
    unit: str
    nranks: int
    rates: tuple[tuple[str, float], ...]
    source: Source


Found = Calls | Costs | Forecasts | Overlaps | Steps


def _ranks(record: Fields) -> float:
    """The ranks of a record's first row; infinite where it does not say."""
    rows = record.value.get("rows")
    first = rows[0] if isinstance(rows, list) and rows else None
    ranks = first.get("ranks") if isinstance(first, dict) else None
    return ranks if isinstance(ranks, int) else math.inf


def source_of(record: Fields) -> Source:
    """Where a record comes from."""
    machine, versions = record.fields("machine"), record.fields("versions")
    gpus = record.value.get("gpus") or machine.value.get("gpus")
    if isinstance(gpus, list):
        first = Fields({"gpus": gpus[0]}, record.where).text("gpus").partition(",")[0]
        used, there = _ranks(record), len(gpus)
        gpus = f"{used} of {there} {first}" if used < there else f"{there} {first}"
    if gpus is None and machine.value.get("device") == "cuda":
        gpus = f"{machine.whole('ranks')} GPUs"
    if gpus is None and "cpu" in machine:
        device = f"{machine.whole('cores')} cores of {machine.text('cpu')}"
    else:
        device = Fields({"gpus": gpus or "unknown device"}, record.where).text("gpus")
    peers = {"nccl": "NCCL", "torch": "torch", "mpich": "MPICH"}
    known = {key: versions.value[key] for key in peers if key in versions}
    listed = "".join(f", {peers[key]} {printable(str(known[key]))}" for key in known)
    more = (record.text(key, "") for key in ("date", "commit", "command", "note"))
    name = device.partition(" ")[2] if gpus else device
    return Source(Path(record.where).name, name, f"{device}{listed}", *more)


def found_in(record: Fields) -> Iterator[Found]:
    """All that can be drawn of a record: nothing of one of another kind or of several commits."""
    source = source_of(record)
    if source.commit and not _COMMIT.fullmatch(source.commit):
        return
    for kind in (_calls, _costs, _chains, _hosts, _overlaps, _steps):
        yield from kind(record, source)


def peer_times(rows: Sequence[Row], collective: str) -> dict[str, dict[int, Row]]:
    """The rows of a collective by library, or algorithm where several are compared, and bytes.

    Of torch's kernels the faster, of a library that has them the calls in place.
    """
    times: dict[str, dict[int, Row]] = {}
    mine = [row for row in rows if row["collective"] == collective and row["bytes"] > 0]
    inside = {row["lib"] for row in mine if row.get("in_place")}
    mine = [row for row in mine if row["lib"] not in inside or row.get("in_place")]
    libs = {row["lib"] for row in mine}
    several = {lib for lib in libs if compared([row for row in mine if row["lib"] == lib])}
    for row in mine:
        lib = "torch" if row["lib"].startswith("torch") else row["lib"]
        if row["lib"] in several and "algorithm" in row:
            lib = f"{lib} {row['algorithm']}"
        of = times.setdefault(lib, {})
        if row["bytes"] not in of or row["us"] < of[row["bytes"]]["us"]:
            of[row["bytes"]] = row
    order = [*(lib for lib in LIBRARIES if lib in times), *sorted(times.keys() - LIBRARIES.keys())]
    return {lib: times[lib] for lib in order}


def call_rows(record: Fields) -> dict[str, list[dict[str, Any]]]:
    """The rows of calls by the name of their run, "" where a record has one run."""
    rows = record.value.get("rows")
    runs = {"": record.objects("rows")} if isinstance(rows, list) else {}
    if isinstance(rows, dict):
        of = record.fields("rows")
        runs = {printable(run): of.objects(run) for run in rows}
    return {run: [_call(row) for row in of if _measured(row)] for run, of in runs.items()}


def _measured(row: Fields) -> bool:
    """Whether a row is of a call as the library chooses it, which ended, and rightly."""
    named = {"lib", "collective", "bytes"} <= row.value.keys()
    times = {"us", "time_us"} & row.value.keys()
    failed = ("us" in row and row.value["us"] is None) or row.value.get("wrong")
    return named and bool(times) and not failed and not _ALTERNATIVES & row.value.keys()


def _call(row: Fields) -> dict[str, Any]:
    made: dict[str, Any] = {key: row.text(key) for key in ("lib", "collective")}
    made |= {"bytes": row.whole("bytes"), "in_place": row.value.get("in_place") is True}
    made["us"] = row.number("us" if "us" in row else "time_us")
    made |= {"algorithm": row.text("algorithm")} if "algorithm" in row else {}
    optional = ("busbw", "predicted_us", "host_us")
    return made | {key: row.number(key) for key in optional if row.value.get(key)}


def _calls(record: Fields, source: Source) -> Iterator[Found]:
    for run, rows in call_rows(record).items():
        for collective in dict.fromkeys(row["collective"] for row in rows):
            times = peer_times(rows, collective)
            sizes = {nbytes for of in times.values() for nbytes in of}
            predicted = tuple(
                (f"{collective}, {LIBRARIES.get(lib, lib)}", nbytes, *_seconds(row))
                for lib, of in times.items()
                for nbytes, row in of.items()
                if "predicted_us" in row
            )
            what = run or collective
            if predicted:
                yield Forecasts(what, predicted, sliced=False, source=source)
            if len(sizes) > 1:
                kept = tuple(
                    {**row, "lib": LIBRARIES.get(lib, lib)}
                    for lib, of in times.items()
                    for _, row in sorted(of.items())
                )
                nranks = record.fields("machine").whole("ranks", least=1)
                yield Calls(what, collective, nranks, kept, source)


def _seconds(row: Row) -> tuple[float, float]:
    return row["us"] / 1e6, row["predicted_us"] / 1e6


def _costs(record: Fields, source: Source) -> Iterator[Found]:
    """The host's time: ``host_us`` of bars, calls of torch.distributed, arrays, small calls."""
    bars: list[tuple[str, float]] = []
    for key in ("host_us", "host us", "us a call"):
        of = record.fields(key)
        names = {"call": "ringcoll, a call", "bare launch": "a bare launch"}
        bars += [(printable(names.get(what, what)), of.number(what)) for what in of.value]
    if isinstance(record.value.get("us"), dict):
        calls = record.fields("us")
        for what in calls.value:
            libs = calls.fields(what)
            for lib in libs.value:
                median = statistics.median(libs.numbers(lib))
                bars.append((printable(f"{what}, {lib}"), median))
    smallest: dict[tuple[str, str], dict[str, Any]] = {}
    for row in (row for rows in call_rows(record).values() for row in rows if "host_us" in row):
        call = row["collective"], row["lib"]
        if call not in smallest or row["bytes"] < smallest[call]["bytes"]:
            smallest[call] = row
    for (collective, lib), row in smallest.items():
        name = f"{collective} of {format_bytes(row['bytes'])}, {LIBRARIES.get(lib, lib)}"
        bars.append((name, row["host_us"]))
    if bars:
        yield Costs(source.file.removesuffix(".json"), tuple(bars), source)


def _chains(record: Fields, source: Source) -> Iterator[Found]:
    """Pipelined chains, measured and predicted, by ranks and slices."""
    key = "points" if isinstance(record.value.get("points"), list) else "rows"
    rows = record.value.get(key)
    wanted = {"slices", "seconds", "model"}
    if not isinstance(rows, list) or not any(wanted <= {*row} for row in rows):
        return
    points = tuple(
        (f"{row.whole('ranks')} ranks", row.whole("slices", least=1), *_measured_model(row))
        for row in record.objects(key)
    )
    if points:
        given = record.fields("given")
        size = f" of {given.whole('bytes') >> 20} MiB" if "bytes" in given else ""
        yield Forecasts(f"broadcast{size} along a chain, {source.machine}", points, True, source)


def _measured_model(row: Fields) -> tuple[float, float]:
    return row.number("seconds"), row.number("model")


def _hosts(record: Fields, source: Source) -> Iterator[Found]:
    """Calls between hosts: ``lines`` with the milliseconds of the run and of the model."""
    lines = record.objects("lines") if isinstance(record.value.get("lines"), list) else []
    points = tuple(
        (
            line.text("collective"),
            line.whole("bytes"),
            line.number("ms") / 1e3,
            line.number("model_ms") / 1e3,
        )
        for line in lines
        if {"ms", "model_ms"} <= line.value.keys()
    )
    if points:
        yield Forecasts("calls between hosts", points, False, source)


def _overlaps(record: Fields, source: Source) -> Iterator[Found]:
    rows = record.objects("rows") if isinstance(record.value.get("rows"), list) else []
    rows = [row for row in rows if {"slowdown", "gemm_slowdown"} <= row.value.keys()]
    rows = [row for row in rows if not row.value.get("wrong")]
    if rows:
        edge, nbytes = rows[0].whole("edge"), rows[0].whole("bytes")
        title = f"GEMM of {edge}³ beside all_reduce of {nbytes >> 20} MiB"
        found = ((r.text("name"), r.number("slowdown"), r.number("gemm_slowdown")) for r in rows)
        yield Overlaps(title, tuple(found), source)


def _steps(record: Fields, source: Source) -> Iterator[Found]:
    rows = record.objects("rows") if isinstance(record.value.get("rows"), list) else []
    rates: dict[tuple[str, int, str, int], list[tuple[str, float]]] = {}
    for row in rows:
        if {"model", "batch", "way", "per_second"} <= row.value.keys():
            key = row.text("model"), row.whole("batch"), row.text("unit"), row.whole("ranks")
            rates.setdefault(key, []).append((row.text("way"), row.number("per_second")))
    how = ", CUDA graph" if "--graphs" in source.command else ""
    nodes = record.whole("nodes") if "nodes" in record else 1
    how += f", {nodes} nodes" if nodes > 1 else ""
    for (model, batch, unit, nranks), ways in rates.items():
        yield Steps(f"{model}, batch {batch}{how}", unit, nranks, tuple(ways), source)
