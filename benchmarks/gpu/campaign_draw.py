"""What a campaign does next: a call or a group of calls, drawn from the seed and a number alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from benchmarks.gpu.campaign_calls import Call
from ringcoll.collectives import COLLECTIVES as COLLECTIVE_KINDS
from ringcoll.dtypes import OPS, dtype_of

__all__ = ["REPLAYS", "Setup", "Trial", "draw"]

T = TypeVar("T")

COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "scan",
    "exscan",
    "all_gather_v",
    "reduce_scatter_v",
    "all_to_all_v",
    "gather_v",
    "scatter_v",
    "sendrecv",
)
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan", "reduce_scatter_v")
SCANS = ("scan", "exscan")
NEVER_IN_PLACE = ("all_to_all_v", "sendrecv")
DISPLACED = ("all_gather_v", "gather_v", "scatter_v", "all_to_all_v")
DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "int8",
    "uint8",
    "int32",
    "int64",
    "bool",
)
BOUNDARIES = (4 << 10, 64 << 10, 192 << 10, 8 << 20, 12 << 20, 16 << 20)
"""Bytes at which another protocol, algorithm or way of staging begins."""
REPLAYS = 2
LARGE = 1 << 20
"""Bytes from which on plain memory is registered, and copy engines are tried."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A campaign.

    Attributes:
        seed: of all its calls.
        nranks: how many ranks make them.
        device: ``cuda`` or ``cpu``.
        most: bytes of the largest buffer.
        calls: how many.
        first: number of the first one.
        seconds: after which none begins.
        kernel_wait: of ``ringcoll.init``, on GPUs.
        kinds: of memory, by library: a call's buffers are of one library.

    """

    seed: int
    nranks: int
    device: str
    most: int
    calls: int
    first: int = 0
    seconds: float = 60.0
    kernel_wait: float = 0.05
    kinds: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """A call, or a group of them, made a few times with other numbers.

    Attributes:
        calls: more than one are a group.
        way: ``eager``, ``async``, or ``graph``: captured after the eager turns, and replayed.
        turns: how often it is made before that.
        kept: whether all turns pass the same array objects; else each makes views of its own.
        stream: of GPU ranks: ``current``, ``default``, or ``named`` by ``stream=``.

    """

    calls: tuple[Call, ...]
    way: str
    turns: int
    kept: bool
    stream: str

    @property
    def name(self) -> str:
        """The collective, or that it is a group."""
        return self.calls[0].collective if len(self.calls) == 1 else "group"


def draw(setup: Setup, number: int) -> Trial:
    """The campaign's step of that number."""
    rng = np.random.default_rng((setup.seed, number))
    grouped = rng.random() < 0.08
    if grouped:
        calls = [_call(setup, (number, k), rng, grouped) for k in range(int(rng.integers(2, 5)))]
    else:
        calls = [_call(setup, (number, 0), rng, grouped)]
    way = "eager" if grouped or rng.random() < 0.75 else "async"
    if setup.device == "cuda" and rng.random() < 0.12:
        way = "graph"
    # Four: from then on plain memory is mapped, and copy engines have their memory.
    copied = any(call.options.get("engine") == "copy" for call in calls)
    turns = 4 if copied else _pick(rng, (1, 1, 2, 5))
    stream = "current"
    if setup.device == "cuda" and way != "graph":
        stream = _pick(rng, ("current", "current", "default", "named"))
    return Trial(tuple(calls), way, turns, bool(rng.random() < 0.5), stream)


def _pick(rng: np.random.Generator, offered: Sequence[T]) -> T:
    return offered[int(rng.integers(len(offered)))]


def _call(setup: Setup, place: tuple[int, int], rng: np.random.Generator, grouped: bool) -> Call:
    collective, dtype, n = _pick(rng, COLLECTIVES), _pick(rng, DTYPES), setup.nranks
    op = _pick(rng, _operators(dtype, collective)) if collective in REDUCING else None
    item = dtype_of(dtype).itemsize
    count = _count(setup.most // 16 if grouped else setup.most, item, rng)
    if "scatter" in collective or "gather" in collective or "all_to_all" in collective:
        count = max(1, count // n)
    counts = (count,) * n
    if collective.endswith("_v"):
        numbers = rng.integers(0, count, n * n, endpoint=True) * (rng.random(n * n) > 0.15)
        counts = tuple(map(int, numbers if collective == "all_to_all_v" else numbers[:n]))
    in_place = _pick(rng, ("", "", "alone", "both"))
    library = _pick(rng, setup.kinds)
    kinds = (_pick(rng, library), _pick(rng, library))
    options = {} if grouped else _options(rng, op, max(counts) * item, setup.nranks)
    # Copy engines want the same place of all ranks' arrays; a root's in place are elsewhere.
    copied = options.get("engine") == "copy"
    skews = (0,) if copied else (0, 0, 1, 2, 3)
    never = collective in NEVER_IN_PLACE or (
        copied and COLLECTIVE_KINDS[collective.removesuffix("_v")].has_root
    )
    made = _pick(rng, ("new", "whole") if grouped else ("slab", "slab", "new", "whole"))
    whole = made == "whole"
    offsets = (_offset(rng), _offset(rng))
    return Call(
        (setup.seed, *place),
        n,
        collective,
        dtype,
        op,
        counts,
        root=_root(rng, collective, n),
        gap=_pick(rng, (0, 1, 7)) if collective in DISPLACED else 0,
        in_place="" if never else in_place,
        kinds=(kinds[0], kinds[0]) if in_place else kinds,
        made=made,
        offsets=(0, 0) if whole else offsets,
        skew=0 if whole else _pick(rng, skews),
        second=bool(rng.random() < 0.25),
        options=options,
    )


def _root(rng: np.random.Generator, collective: str, nranks: int) -> int:
    """A root, or how many ranks further a message goes: to another rank, where there is one."""
    if collective == "sendrecv":
        return 1 + int(rng.integers(nranks - 1)) if nranks > 1 else 0
    return int(rng.integers(nranks))


def _operators(dtype: str, collective: str) -> list[str]:
    category = dtype_of(dtype).category
    bits, average = ("band", "bor", "bxor"), category != "bool" and collective not in SCANS
    return [
        name
        for name in OPS
        if (name not in bits or category in ("int", "bool")) and (name != "avg" or average)
    ]


def _count(most: int, item: int, rng: np.random.Generator) -> int:
    """Elements of the largest buffer: mostly few, now and then at a boundary."""
    boundaries = [size for size in BOUNDARIES if size < most]
    if boundaries and rng.random() < 0.15:
        return _pick(rng, boundaries) // item + int(rng.integers(-1, 2))
    return max(1, int((most // item) ** (rng.random() ** 1.25)))


def _offset(rng: np.random.Generator) -> int:
    return _pick(rng, (0, 0, 1, 3, 4, 8, int(rng.integers(34))))


def _options(rng: np.random.Generator, op: str | None, nbytes: int, nranks: int) -> dict[str, Any]:
    """Options of a call, mostly none."""
    if rng.random() > 0.3:
        return {}
    offered: list[dict[str, Any]] = [
        {"deterministic": True},
        {"max_sms": _pick(rng, (1, 4, 16))},
        {"slices": _pick(rng, (2, 3, 8))},
        {"protocol": _pick(rng, ("LL", "LL128", "Simple"))},
    ]
    if op not in (None, "avg"):  # an average of float8 would be rounded before it is divided
        offered.append({"accumulate": "dtype"})
    if nbytes * nranks >= LARGE:
        offered.append({"engine": "copy"})
    return _pick(rng, offered)
