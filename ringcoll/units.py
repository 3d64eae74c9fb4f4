"""Numbers, sizes, bandwidths and times as people type them: ``1-8``, ``64M``, ``12.5G``, ``3us``.

Sizes are binary (64M is 64·2²⁰ bytes), bandwidths decimal (10G is 10·10⁹ bytes a second).
"""

from __future__ import annotations

import math
import re

from ringcoll.errors import ArgumentError

MOST_INTS = 1 << 16
"""Numbers that a list has at most."""

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|\.[0-9]+)\s*([a-zµ]*)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def parse_bytes(text: str) -> int:
    """A size in bytes: ``4096``, ``64K``, ``1.5M``, ``2GiB``; K, M, G and T are binary.

    Raises:
        ArgumentError: not such a size, or no whole number of bytes.

    """
    number, unit = _split(text, "size", "64K, 1.5M or 2G")
    letter = re.sub(r"i?b$", "", unit)
    if letter not in _POWERS:
        raise ArgumentError(f"size {text!r}: the units are K, M, G and T")
    value = number * 1024 ** _POWERS[letter]
    if value != int(value):
        raise ArgumentError(f"size {text!r}: {value} is no whole number of bytes")
    return int(value)


def parse_ints(text: str, *, least: int = 1) -> list[int]:
    """The numbers that a text lists, in its order: ``"1-3,8"`` is ``[1, 2, 3, 8]``.

    Both ends belong to a range; no number is less than ``least``.

    Raises:
        ArgumentError: not such a list.

    """
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or not (last if dash else first).isdecimal():
            raise ArgumentError(f"{text!r}: write numbers from {least}, such as 1,4,16 or 1-8")
        low, high = int(first), int(last if dash else first)
        if low < least or high < low:
            raise ArgumentError(f"{text!r}: {part.strip()!r} is no range of numbers from {least}")
        if len(numbers) + high - low >= MOST_INTS:
            raise ArgumentError(f"{text!r}: {part.strip()!r} makes more than {MOST_INTS} numbers")
        numbers += range(low, high + 1)
    return numbers


def parse_sizes(text: str) -> tuple[int, ...]:
    """A list of sizes; ``1K-1M`` is every doubling from the first to the last.

    Raises:
        ArgumentError: not such a list.

    """
    sizes: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not dash or first.lower().endswith("e"):
            sizes.append(parse_bytes(part))
            continue
        size, end = parse_bytes(first), parse_bytes(last)
        if not 0 < size <= end:
            raise ArgumentError(f"sizes {part!r}: the first must be above 0 and not above the last")
        while size <= end:
            sizes.append(size)
            size *= 2
    return tuple(sizes)


def parse_bandwidth(text: str) -> float:
    """Bytes a second: ``1e10``, ``10G``, ``10GB/s``; K, M, G and T are powers of 1000.

    Raises:
        ArgumentError: not such a bandwidth, or not above 0.

    """
    number, unit = _split(re.sub(r"/s$", "", text.strip()), "bandwidth", "1e10, 10G or 500M")
    letter = re.sub(r"b$", "", unit)
    if letter not in _POWERS or number <= 0:
        raise ArgumentError(f"bandwidth {text!r}: more than 0; the units are K, M, G and T")
    return number * 1000.0 ** _POWERS[letter]


def parse_seconds(text: str) -> float:
    """A time: ``2e-6``, ``2us``, ``500ns``, ``1ms``.

    Raises:
        ArgumentError: not such a time.

    """
    number, unit = _split(text, "time", "2e-6, 2us or 500ns")
    if unit not in _SECONDS:
        raise ArgumentError(f"time {text!r}: the units are s, ms, us and ns")
    return number * _SECONDS[unit]


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    found = _NUMBER.fullmatch(text.strip())
    number = float(found[1]) if found else math.inf
    if found is None or number == math.inf:
        raise ArgumentError(f"{what} {text!r}: write it like {example}")
    return number, found[2].lower()


def format_bytes(nbytes: float) -> str:
    """A size with the largest binary unit that divides it, or three digits of it."""
    for unit in ("T", "G", "M", "K"):
        scale = 1024 ** _POWERS[unit.lower()]
        if nbytes >= scale:
            whole = nbytes % scale == 0
            return f"{nbytes / scale:.0f} {unit}iB" if whole else f"{nbytes / scale:.3g} {unit}iB"
    return f"{nbytes:g} B"


def format_seconds(seconds: float) -> str:
    """A time with a unit that a person reads at a glance."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"
