"""Lists and ranges of numbers on the command line: ``1,4,16`` and ``1-8``."""

from __future__ import annotations

import argparse

from ringcoll.errors import ArgumentError

__all__ = ["MOST", "argument", "parse_ints"]

MOST = 1 << 16
"""Numbers that a list has at most."""


def parse_ints(text: str, *, least: int = 1) -> list[int]:
    """The numbers that a text lists, in its order: ``"1-3,8"`` is ``[1, 2, 3, 8]``.

    Args:
        text: numbers and ranges (both ends belong to it), separated by commas.
        least: the smallest number that makes sense.

    Raises:
        ArgumentError: the text is no such list; the message says what would be.

    """
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or not (last if dash else first).isdecimal():
            raise ArgumentError(f"{text!r}: numbers and ranges such as 1,4,16 or 1-8 are wanted")
        low, high = int(first), int(last if dash else first)
        if low < least or high < low:
            raise ArgumentError(f"{text!r}: {part.strip()!r} needs {least} <= first <= last")
        if len(numbers) + high - low >= MOST:
            raise ArgumentError(f"{text!r}: {part.strip()!r} makes more than {MOST} numbers")
        numbers += range(low, high + 1)
    return numbers


def argument(text: str) -> list[int]:
    """:func:`parse_ints` as the ``type=`` of an option: argparse shows the message."""
    try:
        return parse_ints(text)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
