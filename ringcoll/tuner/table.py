"""Tables of ``ringcoll tune``: which candidates were fastest on a machine, by collective and size.

A table is JSON. It is validated field by field and never evaluated, and ranks that have the same
text choose the same. Where a table has an entry, it decides for calls without options; elsewhere
the thresholds of :mod:`.measured` and the timing model do.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NoReturn

from ringcoll.algorithms import ALGORITHMS
from ringcoll.arguments.calls import Call
from ringcoll.errors import ArgumentError
from ringcoll.launch import ALL_MAPPED, IN_BAND, PROTOCOLS
from ringcoll.tuner.choice import Limits
from ringcoll.tuner.measured import LARGE_BYTES
from ringcoll.tuner.predicted import power
from ringcoll.units import format_bytes, format_seconds

FORMAT = 2
MOST_BYTES = 4 << 20
"""The longest text that is read."""

_MOST_TEXT, _MOST_ITEMS = 2000, 4096
_MOST_SLICES = 4096
_ENGINES = ("host", "sm", "copy")
_BEYOND = 4
"""Calls of more than so many times the largest size measured are left to thresholds."""
_SMALL = 4 << 10
"""A smallest size measured up to which it stands for all smaller ones, else for near ones."""
_MOST_SECONDS = 1e6


@dataclass(frozen=True, slots=True)
class Timed:
    """A candidate; its time and the timing model's, if that knows the links, in seconds.

    ``blocks`` are the most CUDA blocks a rank; None: as many as without a table.
    """

    algorithm: str
    protocol: str
    engine: str
    slices: int
    blocks: int | None
    seconds: float
    predicted: float | None = None

    def __str__(self) -> str:
        how = [self.algorithm]
        if self.engine != "host":
            how.append("by copy engines" if self.engine == "copy" else f"by {self.protocol}")
        text = " ".join(how) + f", S = {self.slices}"
        if self.blocks is not None:
            text += f", at most {self.blocks} blocks"
        model = "" if self.predicted is None else f", predicted {format_seconds(self.predicted)}"
        return f"{text}: measured {format_seconds(self.seconds)}{model}"


@dataclass(frozen=True, slots=True)
class Entry:
    """What was measured for a collective and a size of the larger buffer, the fastest first.

    ``mapped``: peers reach the buffers. ``date``: when it was measured.
    """

    collective: str
    nbytes: int
    mapped: bool
    timed: tuple[Timed, ...]
    date: str


@dataclass(frozen=True, slots=True)
class Machine:
    """What a table is of; ``kind`` is "cpu" or "cuda", ``ranks_are`` "processes" or "threads"."""

    kind: str
    device: str
    driver: str | None
    ranks: int
    ranks_are: str


@dataclass(frozen=True, slots=True)
class Table:
    """A validated table, equal to another of the same text.

    ``about`` has the date, versions, command and commit of its last measurements; ``source`` says
    where it comes from.
    """

    digest: str
    machine: Machine = field(compare=False)
    about: Mapping[str, Any] = field(compare=False)
    entries: Mapping[tuple[str, bool], Sequence[Entry]] = field(compare=False)
    source: str = field(default="measured here", compare=False)

    def entry(self, collective: str, nbytes: int, *, mapped: bool) -> Entry | None:
        """The entry of the nearest size, the same for all sizes up to a power of two."""
        found, size = self.entries.get((collective, mapped), ()), power(nbytes)
        if not found or size > _BEYOND * found[-1].nbytes:
            return None
        if found[0].nbytes > max(_SMALL, _BEYOND * size):
            return None
        return min(found, key=lambda entry: abs(math.log2(entry.nbytes / size)))

    def entry_of(self, call: Call, limits: Limits) -> Entry | None:
        """The entry for a call; None where its options, or counts for each rank, decide."""
        if call.counts or not is_free(limits):
            return None
        mapped = bool(limits.mapped) and limits.large_scratch != "copy"
        found = self.entry(call.collective, call.nbytes, mapped=mapped)
        # It was timed out of place, where OUTPUT has room for contributions.
        if found is not None and call.in_place and found.timed[0].algorithm == "all_pairs_output":
            return None
        return found

    def copies(self, call: Call, limits: Limits) -> bool | None:
        """Whether copy engines run a call; None without an entry for plain memory.

        They run it on any memory, so they must not be slower than kernels on mapped memory, as
        symmetric arrays are, and arrays that are used again become.
        """
        free = replace(limits, large_scratch=None)
        plain = self.entry_of(call, replace(free, mapped=frozenset()))
        if plain is None:
            return None
        best, direct = plain.timed[0], self.entry_of(call, replace(free, mapped=ALL_MAPPED))
        return best.engine == "copy" and (direct is None or best.seconds <= direct.timed[0].seconds)

    def in_band(self, call: Call, limits: Limits) -> bool:
        """Whether LL or LL128 runs a call of any memory."""
        free = replace(limits, large_scratch=None)
        entries = (self.entry_of(call, replace(free, mapped=m)) for m in (frozenset(), ALL_MAPPED))
        return any(found is not None and found.timed[0].protocol in IN_BAND for found in entries)

    def decides(self, call: Call, limits: Limits) -> bool:
        """Whether a program of a call has an entry."""
        memory = (limits.mapped, ALL_MAPPED) if limits.hellos_decide else (limits.mapped,)
        return any(self.entry_of(call, replace(limits, mapped=each)) for each in memory)

    def options(self, call: Call, limits: Limits) -> Limits | None:
        """The options of the entry for a call; None where the table does not decide.

        Of a call whose hellos decide, the two programs have an entry each.
        """
        entry = self.entry_of(call, limits)
        if entry is None:
            return None
        best = entry.timed[0]
        if (best.engine == "copy") != (limits.large_scratch == "copy"):
            return None  # not before all ranks have a large SCRATCH
        chosen = replace(limits, slices=_slices(entry, call, limits))
        if best.engine == "host":
            return replace(chosen, algorithm=best.algorithm)
        if limits.hellos_decide and best.engine == "sm" and best.protocol == "Simple":
            return replace(limits, protocol="Simple")
        protocol = None if best.engine == "copy" else best.protocol
        return replace(chosen, algorithm=best.algorithm, protocol=protocol, blocks=best.blocks)

    def simple(self, call: Call, limits: Limits) -> Limits:
        """The options of one of the programs of a call whose hellos decide."""
        free = replace(limits, protocol=None)
        entry = self.entry_of(call, free)
        if entry is None or (best := entry.timed[0]).protocol != "Simple" or best.engine == "copy":
            return limits
        slices = _slices(entry, call, limits)
        return replace(limits, algorithm=best.algorithm, slices=slices, blocks=best.blocks)

    def besides(self, machine: Machine, measured: Sequence[Entry]) -> list[Entry]:
        """The entries for cases of the machine that have not been measured again."""
        again = {(each.collective, each.mapped, each.nbytes) for each in measured}
        return [
            entry
            for (collective, mapped), found in self.entries.items()
            for entry in found
            if self.machine == machine and (collective, mapped, entry.nbytes) not in again
        ]

    def reasons(self, entry: Entry) -> tuple[str, ...]:
        """The entry as lines of text, measured and predicted times beside each other."""
        on, size = entry.date[:10], format_bytes(entry.nbytes)
        title = f"{self.source} on {on}, {self.machine.device}, {size}:"
        return (title, *(f"  {timed}" for timed in entry.timed))


def _slices(entry: Entry, call: Call, limits: Limits) -> int | None:
    """The slices of the fastest, as large as those that were measured; None: as without a table.

    Smaller calls have another SCRATCH than large ones.
    """
    if limits.large_scratch == "sm" and entry.nbytes < LARGE_BYTES.value:
        return None
    slices = entry.timed[0].slices * power(call.nbytes) // entry.nbytes
    return max(1, min(_MOST_SLICES, slices)) if entry.timed[0].slices > 1 else 1


def is_free(limits: Limits) -> bool:
    """Whether no option says what a call runs."""
    options = limits.algorithm, limits.protocol, limits.slices, limits.blocks
    return not (any(options) or limits.engine or limits.channels or limits.proves)


def as_json(machine: Machine, about: Mapping[str, Any], entries: Sequence[Entry]) -> str:
    """The text of a table."""
    listed = [asdict(entry) for entry in entries]
    content = {"format": FORMAT, "machine": asdict(machine), **about, "entries": listed}
    return json.dumps(content, indent=1) + "\n"


def parse(text: str, source: str = "measured here") -> Table:
    """The table in a text.

    Raises:
        ArgumentError: a field is missing, unknown or illegal; the message names it.

    """
    try:
        if len(text) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} characters")
        content = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"a tuning table: {error}") from None
    content = _object(content, ("format", "machine", *_ABOUT, "entries"), "the table")
    _check(content["format"] == FORMAT, "format", content["format"])
    about = {name: content[name] for name in _ABOUT}
    for name in ("date", "command"):
        _text(about[name], name)
    _check(about["commit"] is None or _is_text(about["commit"]), "commit", about["commit"])
    versions = about["versions"]
    _check(
        isinstance(versions, dict) and all(_is_text(v) for v in versions.values()),
        "versions",
        versions,
    )
    entries = [_entry(found) for found in _list(content["entries"], "entries")]
    sorted_: dict[tuple[str, bool], list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: entry.nbytes):
        same = sorted_.setdefault((entry.collective, entry.mapped), [])
        if same and same[-1].nbytes == entry.nbytes:
            _refuse("entries", f"two of {entry.collective}, {entry.nbytes} bytes")
        same.append(entry)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    kept = {key: tuple(found) for key, found in sorted_.items()}
    return Table(digest, _machine(content["machine"]), about, kept, source)


_ABOUT = ("date", "versions", "command", "commit")


def _machine(value: object) -> Machine:
    found = _object(value, tuple(each.name for each in fields(Machine)), "machine")
    _check(found["kind"] in ("cpu", "cuda"), "kind", found["kind"])
    _text(found["device"], "device")
    _check(found["driver"] is None or _is_text(found["driver"]), "driver", found["driver"])
    _count(found["ranks"], "ranks")
    _check(found["ranks_are"] in ("processes", "threads"), "ranks_are", found["ranks_are"])
    return Machine(**found)


def _entry(value: object) -> Entry:
    found = _object(value, tuple(each.name for each in fields(Entry)), "an entry")
    name = found["collective"]
    _check(_is_text(name) and name in ALGORITHMS and name != "barrier", "collective", name)
    _count(found["nbytes"], "nbytes")
    _check(type(found["mapped"]) is bool, "mapped", found["mapped"])
    timed = tuple(_timed(name, each) for each in _list(found["timed"], "timed"))
    _check(bool(timed), "timed", "no candidate")
    _text(found["date"], "date")
    return Entry(name, found["nbytes"], found["mapped"], timed, found["date"])


def _timed(collective: str, value: object) -> Timed:
    found = _object(value, tuple(each.name for each in fields(Timed)), "a candidate")
    algorithm, predicted = found["algorithm"], found["predicted"]
    known = _is_text(algorithm) and algorithm in ALGORITHMS[collective]
    _check(known, "algorithm", algorithm)
    _check(_is_text(found["protocol"]) and found["protocol"] in PROTOCOLS, "protocol", found)
    _check(found["engine"] in _ENGINES, "engine", found["engine"])
    _count(found["slices"], "slices", _MOST_SLICES)
    if found["protocol"] in IN_BAND:
        _check(found["engine"] == "sm" and found["slices"] == 1, "protocol", found)
    if found["blocks"] is not None:
        _count(found["blocks"], "blocks")
    _check(_is_seconds(found["seconds"]), "seconds", found["seconds"])
    _check(predicted is None or _is_seconds(predicted), "predicted", predicted)
    return Timed(**found)


def _object(value: object, names: Sequence[str], what: str) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != set(names):
        seen = sorted(value) if isinstance(value, dict) else value
        _refuse(what, f"{seen!r}, wanted the fields {', '.join(names)}")
    return value


def _list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MOST_ITEMS:
        _refuse(what, type(value).__name__)
    return value


def _count(value: object, what: str, most: int = 1 << 50) -> None:
    _check(type(value) is int and 1 <= value <= most, what, value)


def _text(value: object, what: str) -> None:
    _check(_is_text(value), what, value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_TEXT and value.isprintable()


def _is_seconds(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= _MOST_SECONDS  # type: ignore[operator]


def _check(right: bool, what: str, seen: object) -> None:
    if not right:
        _refuse(what, repr(seen))


def _refuse(what: str, seen: str) -> NoReturn:
    raise ArgumentError(f"a tuning table: {what} is {seen:.200}; run `ringcoll tune` again")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
