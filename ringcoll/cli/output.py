"""Results that go to a file, or to stdout where the file is called ``-``."""

from __future__ import annotations

import sys
from pathlib import Path

from ringcoll.errors import ArgumentError

__all__ = ["write_text"]


def write_text(option: str, target: str | None, text: str) -> None:
    """Write to a file, or to stdout for ``-``; nothing for None.

    Args:
        option: that names the file, such as "--json", for the message.
        target: what it says.
        text: as it is written.

    Raises:
        ArgumentError: the file cannot be written.

    """
    if target == "-":
        sys.stdout.write(text)
    elif target is not None:
        try:
            Path(target).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ArgumentError(f"{option} {target}: {error.strerror or error}") from None
