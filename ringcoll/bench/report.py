"""What rank 0 says while it measures, and what it leaves behind."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

from ringcoll.bench import osu, table
from ringcoll.bench.cases import Case, Section
from ringcoll.bench.environment import now
from ringcoll.bench.paced import Forecast
from ringcoll.bench.settings import Settings
from ringcoll.bench.table import Result
from ringcoll.units import format_bytes

_CROWDED = (
    "No verdict: ranks waited for cores or share a GPU, as stands above the table, so the times "
    "say little"
)
_NAMES = {"mpi": "MPI", "gloo": "Gloo", "nccl": "NCCL"}


@dataclass(frozen=True, slots=True)
class Row:
    """One library's time of one case, on one side."""

    lib: str
    algorithm: str
    case: Case
    result: Result
    forecast: Forecast | None = None

    def as_json(self) -> dict[str, Any]:
        """The row as ``--json`` writes it."""
        section, seconds = self.case.section, self.result.seconds or 0.0
        model: dict[str, float] = {}
        if self.forecast is not None:
            answer = self.forecast.answer
            model = {"predicted_us": answer.seconds * 1e6, "limit_us": answer.limit * 1e6}
            model["free_us"] = self.forecast.free * 1e6
        return {
            "lib": self.lib,
            "collective": section.collective,
            "algorithm": self.algorithm,
            "bytes": self.case.nbytes,
            "count": self.case.count,
            "dtype": section.dtype.name,
            "op": section.op or "none",
            "root": section.root,
            "in_place": self.result.in_place,
            "time_us": seconds * 1e6,
            "algbw": self.case.algbw(seconds),
            "busbw": self.case.busbw(seconds),
            "wrong": self.result.wrong,
            **model,
        }


@dataclass(slots=True)
class Report:
    """The table, on ``stderr`` with ``--json -``, and the rows for the JSON."""

    settings: Settings
    stdout: TextIO
    stderr: TextIO
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    command: str = ""
    begun: Callable[[], object] = lambda: None
    """Called before the first row is kept."""
    crowded: bool = False
    """Whether ranks share cores, with each other or with other programs, or a GPU."""
    _concluded: bool = False
    _ended: bool = False

    def say(self, text: str) -> None:
        """Print lines at once."""
        if not self._ended:
            out = self.stderr if self.settings.json == "-" else self.stdout
            # A host's name may be no UTF-8, and the stream's encoding may have few characters.
            encoding = out.encoding or "utf-8"  # None: of a stream in memory
            text = text.encode(encoding, "backslashreplace").decode(encoding)
            # In one piece: without a buffer the newline of a print comes apart, and other ranks'
            # words in between.
            print(f"{text}\n", end="", file=out, flush=True)

    def begin(self, version: str, ranks: Sequence[str]) -> None:
        """Say who measures what: the library's version, and a line for each rank."""
        if self.settings.layout == "nccl":
            self.say(table.preamble(self.settings, version))
            self.say("\n".join(ranks))
        facts = {**self.machine}
        facts["memory"] = format_bytes(facts.pop("memory_bytes"))
        self.say(f"# Machine: {_listed(facts)}")
        self.say(f"# Versions: {_listed(self.versions)}")
        for note in self.settings.notes:
            self.say(f"# {note}")

    def begin_section(self, section: Section, remarks: Sequence[str] = ()) -> None:
        """Say what the next rows are."""
        for remark in remarks:
            self.say(f"# {remark}")
        if self.settings.layout == "osu":
            self.say(osu.header(section))
        else:
            self.say(table.header(self.settings))

    def add(
        self,
        case: Case,
        lib: str,
        algorithm: str,
        results: Sequence[Result],
        forecast: Forecast | None = None,
    ) -> None:
        """Print and keep what a library did on a case; its first library is ringcoll."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S") if self.settings.timestamps else ""
        if self.settings.layout == "osu":
            line = osu.row(case, results)
        else:
            line = table.row(case, results, spread=self.settings.per_iteration, stamp=stamp)
        if lib != "ringcoll":
            # A comment, so that the columns are ringcoll's alone.
            start = "# " if self.settings.layout == "osu" else "#"
            line = f"{start}{line.removeprefix(' ')}  {lib}{self._ratio(case, results)}"
        if not self.rows:
            self.begun()
        # First kept, then shown: an interruption between the two loses nothing that was seen.
        self.rows += [
            Row(lib, algorithm, case, r, forecast) for r in results if r.seconds is not None
        ]
        self.say(line)
        for words in forecast.lines(results) if forecast is not None else ():
            self.say(f"#   {words}")

    def _ratio(self, case: Case, results: Sequence[Result]) -> str:
        """By how much ringcoll is faster, out of place and in place."""
        ratios = []
        for result in sorted(results, key=lambda r: r.in_place):
            ours = [row.result for row in self.rows if (row.lib, row.case) == ("ringcoll", case)]
            sides = [own.seconds for own in ours if own.in_place is result.in_place]
            own = sides[-1] if sides else None
            ratios.append(f"{result.seconds / own:.2f}x" if result.seconds and own else "-")
        return "".join(f" {ratio:>6}" for ratio in ratios)

    @property
    def failures(self) -> int:
        """Sides of rows that were wrong."""
        return sum(bool(row.result.wrong) for row in self.rows)

    def conclude(self) -> None:
        """Print the footer, and beside another library who is faster at which sizes; once."""
        if self._concluded or not self.rows or self.settings.layout != "nccl":
            return
        self._concluded = True
        bandwidths = [
            row.case.busbw(row.result.seconds or 0.0) for row in self.rows if row.lib == "ringcoll"
        ]
        mean = statistics.fmean(bandwidths) if bandwidths else 0.0
        self.say(table.footer(self.settings.collective, self.failures, mean))
        if self.settings.peer is not None:
            lines = verdict(self.rows, self.settings.peer)
        else:
            lines = fastest(self.rows)
        for line in [_CROWDED] if self.crowded and lines else lines:
            self.say(f"# {line}")

    def end(self) -> None:
        """Print the footer, write the JSON and draw the picture; once."""
        if self._ended:
            return
        self.conclude()
        self.write(self.settings.json, self.settings.plot)
        self._ended = True

    def write(self, json_file: str | None, plot_file: str | None) -> None:
        """Write what there is, and say so; None writes nothing."""
        if json_file == "-":
            print(self.as_json(), file=self.stdout, flush=True)
        elif json_file is not None:
            Path(json_file).write_text(self.as_json() + "\n", encoding="utf-8")
            self.say(f"# wrote {json_file}")
        if plot_file is not None and self.rows:
            from ringcoll.bench.plot import draw_rows

            title = ", ".join(dict.fromkeys(row.case.section.collective for row in self.rows))
            if self.machine:
                where = self.machine.get("gpus") or self.machine.get("cpu")
                title += f", {self.machine['ranks']} ranks, {where}"
            title += "\nranks share cores or a GPU: the times say little" if self.crowded else ""
            draw_rows([row.as_json() for row in self.rows], plot_file, title=title)
            self.say(f"# wrote {plot_file}")

    def as_json(self) -> str:
        """Every row, a row a line, then date, command, machine and versions."""
        rows = ",\n  ".join(json.dumps(row.as_json()) for row in self.rows)
        about: dict[str, Any] = {"date": now(), "command": self.command}
        about |= {"machine": self.machine, "versions": self.versions}
        lines = [f'"{key}": {json.dumps(value)}' for key, value in about.items()]
        inside = f"\n  {rows}\n" if rows else ""
        return ",\n".join([f'{{"rows": [{inside}]', *lines]) + "}"


def fastest(rows: Sequence[Row]) -> list[str]:
    """Which of several algorithms is the fastest at which sizes, out of place."""
    times: dict[tuple[Section, int], dict[str, Result]] = {}
    for row in rows:
        section, result = row.case.section, row.result
        if section.algorithm is not None and result.seconds and not result.in_place:
            key = replace(section, algorithm=None, slices=None), row.case.nbytes
            slices = f" S={section.slices}" if section.slices is not None else ""
            times.setdefault(key, {})[section.algorithm + slices] = result
    lines = []
    for section in dict.fromkeys(section for section, _ in times):
        found: list[tuple[int, str | None]] = []
        for nbytes in sorted(nbytes for other, nbytes in times if other == section):
            first, *others = sorted(
                times[section, nbytes].items(), key=lambda one: one[1].seconds or 0.0
            )
            if others:
                clear = all(_ends(first[1])[1] <= _ends(other)[0] for _, other in others)
                found.append((nbytes, first[0] if clear else None))
        name = " ".join(filter(None, (section.collective, section.type_name, section.op)))
        for best, part in groupby(found, key=lambda entry: entry[1]):
            at = _span([nbytes for nbytes, _ in part])
            said = "no verdict: the times overlap" if best is None else f"{best} is the fastest"
            lines.append(f"{name}, {at}: {said}")
    return lines


def _ends(result: Result) -> tuple[float, float]:
    """The fastest and the slowest block."""
    seconds = result.seconds or 0.0
    return result.ends or (seconds, seconds)


def _span(sizes: Sequence[int]) -> str:
    """The first and the last of some sizes."""
    return " to ".join(dict.fromkeys(format_bytes(nbytes) for nbytes in (sizes[0], sizes[-1])))


def verdict(rows: Sequence[Row], peer: str) -> list[str]:
    """Who is faster at which sizes, out of place, and by how much at least and at most.

    A size has a verdict where all blocks of one are faster than all of the other. Where there are
    several tables each line names its own.
    """
    tables = list(dict.fromkeys(row.case.section for row in rows))
    lines = []
    for section in tables:
        words = (section.collective, section.type_name, section.op, section.algorithm)
        name = " ".join(word for word in words if word is not None)
        name += f" root {section.root}" if section.root >= 0 else ""
        name += f" S={section.slices}" if section.slices is not None else ""
        found = _verdict([row for row in rows if row.case.section == section], peer)
        lines += [f"{name}: {line}" if len(tables) > 1 else line for line in found]
    return lines


def _verdict(rows: Sequence[Row], peer: str) -> list[str]:
    """The lines of one table."""
    times = {
        (row.lib, row.case.nbytes): (row.result.seconds, row.result.ends)
        for row in rows
        if not row.result.in_place and row.result.seconds
    }
    found: list[tuple[int, str | None, float]] = []
    for (lib, nbytes), (theirs, their_ends) in times.items():
        if lib == peer and ("ringcoll", nbytes) in times:
            ours, our_ends = times["ringcoll", nbytes]
            name = "ringcoll" if theirs >= ours else _NAMES.get(peer, peer)
            least, most = sorted((our_ends or (ours, ours), their_ends or (theirs, theirs)))
            # The faster library's slowest block against the other's fastest.
            clear = least[1] <= most[0]
            found.append((nbytes, name if clear else None, max(theirs / ours, ours / theirs)))
    lines = []
    for faster, part in groupby(sorted(found), key=lambda entry: entry[1]):
        sizes = list(part)
        at = _span([nbytes for nbytes, _, _ in sizes])
        if faster is None:
            lines.append(f"no verdict at {at}: the times of the two overlap")
        else:
            ratios = sorted(ratio for _, _, ratio in sizes)
            by = dict.fromkeys(f"{ratio:.2f}" for ratio in (ratios[0], ratios[-1]))
            lines.append(f"{faster} is faster at {at}, by {' to '.join(by)} times")
    return lines


def _listed(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())
