"""Measured B, α and L: kept by benchmarks, read by the model.

A benchmark keeps the figures that it has fitted in the user's cache folder, one file for each
machine and kind of ranks; ``--bandwidth measured`` takes the newest of this machine. Recorded
results of the same benchmarks hold the same ``fit``: ``--figures FILE`` reads them.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ringcoll import log
from ringcoll.errors import ArgumentError
from ringcoll.folders import contents, own_folder, user_folder, write_aside
from ringcoll.model.links import Links, Topology

HOW = (
    "`python -m benchmarks.gpu.timing_model` measures GPUs, `python -m benchmarks.timing_model "
    "--free` CPU ranks, both in a checkout of ringcoll"
)
"""Which commands make figures."""

_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Figures:
    """What a timing run has fitted, in bytes a second and seconds; see :class:`Links`.

    ``date`` is ISO 8601 in UTC, so that dates compare as text; ``source`` names the file.
    """

    bandwidth: float
    alpha: float
    latency: float = 0.0
    topology: Topology = "switch"
    local_bandwidth: float = math.inf
    date: str = ""
    source: str = ""

    def links(self) -> Links:
        """The links of these figures; refuses what no link can have."""
        return Links(self.bandwidth, self.alpha, self.latency, self.topology, self.local_bandwidth)


def keep_figures(
    kind: str, fit: Mapping[str, float], *, date: str, cache_dir: str | None = None
) -> Path | None:
    """Keep the figures of a timing run, "gpu" or "cpu"; an older run of the kind is replaced.

    ``fit`` holds ``bandwidth``, ``alpha`` and ``latency``, or ``memory_bandwidth``,
    ``core_bandwidth`` and ``alpha``. Returns the file; None where nothing can be kept, which is
    logged.
    """
    folder = user_folder(cache_dir, "figures")
    if folder is None:
        return None
    host = platform.node()
    path = folder / f"{re.sub(r'[^A-Za-z0-9.-]', '_', host)}-{kind}.json"
    text = json.dumps({"name": kind, "host": host, "date": date, "fit": dict(fit)}, indent=1)
    try:
        own_folder(folder)
        write_aside(path, text.encode() + b"\n")
    except OSError as error:
        log.write(log.WARNING, "measured figures are not kept in %s: %s", folder, error)
        return None
    return path


def measured_figures(cache_dir: str | None = None) -> Figures:
    """The newest figures that were measured on this machine."""
    folder = user_folder(cache_dir, "figures")
    files = [] if folder is None else sorted(folder.glob("*.json"))
    found = [figures for figures in map(_kept, files) if figures is not None]
    if not found:
        where = folder or "a cache folder, as this user has no home"
        raise ArgumentError(
            f"no figures of {platform.node()} are kept in {where}: {HOW}; or name a file that "
            f"they have written to --out by --figures FILE"
        )
    return max(found, key=lambda figures: figures.date)


def _kept(path: Path) -> Figures | None:
    """The figures of a file of this machine's, if it can be trusted."""
    try:
        text = contents(path, _MOST_BYTES)
        if _object(text, str(path)).get("host") == platform.node():
            return _parsed(text, str(path))
    except (OSError, ArgumentError) as error:
        log.write(log.WARNING, "%s is left out: %s", path, error)
    return None


def read_figures(path: str) -> Figures:
    """The figures in a file that a timing run has written, a result or a kept one."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ArgumentError(f"figures {path}: {error.strerror or error}; {HOW}") from None
    return _parsed(text, path)


def _object(text: bytes, path: str) -> Mapping[str, object]:
    if len(text) > _MOST_BYTES:
        raise ArgumentError(f"figures {path}: more than {_MOST_BYTES} bytes; no timing run's file")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"figures {path}: no JSON: {error}; {HOW}") from None
    if not isinstance(found, dict):
        raise ArgumentError(f"figures {path}: no object of a timing run; {HOW}")
    return found


def _parsed(text: bytes, path: str) -> Figures:
    whole = _object(text, path)
    fit, date = whole.get("fit"), whole.get("date")
    if not isinstance(fit, dict) or not isinstance(date, str):
        raise ArgumentError(f"figures {path}: it has no fit, or no date; {HOW}")
    if "memory_bandwidth" in fit:
        bandwidth, core = (
            _number(fit, "memory_bandwidth", path),
            _number(fit, "core_bandwidth", path),
        )
        figures = Figures(bandwidth, _number(fit, "alpha", path), topology="memory")
        figures = replace(figures, local_bandwidth=core)
    else:
        latency = _number(fit, "latency", path) if "latency" in fit else 0.0
        figures = Figures(_number(fit, "bandwidth", path), _number(fit, "alpha", path), latency)
    try:
        figures.links()
    except ArgumentError as error:
        raise ArgumentError(f"figures {path}: {error}; {HOW}") from None
    if whole.get("met") is False:
        log.write(
            log.WARNING, "figures %s: the run says that its points do not follow the model", path
        )
    return replace(figures, date=date[:40], source=path)


def _number(fit: Mapping[str, object], name: str, path: str) -> float:
    value = fit.get(name)
    number = math.nan
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an integer of hundreds of digits
            number = float(value)
    if not math.isfinite(number):
        raise ArgumentError(f"figures {path}: {name}={str(value)[:40]!r} is no number; {HOW}")
    return number
