"""The package's log: the logger "ringcoll" of the standard library.

A rank's start does not load ``logging``, which costs more than any module of the package. A
program that has not loaded it has no handler either, so the lines would reach nobody.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import logging

DEBUG, INFO, WARNING, ERROR = 10, 20, 30, 40
"""Levels, those of ``logging``."""


def write(level: int, text: str, *args: object) -> None:
    """Log a line; ``args`` are those of ``%`` in the text."""
    if "logging" in sys.modules:
        logger().log(level, text, *args, stacklevel=2)


def logger() -> logging.Logger:
    """The logger "ringcoll"; a program that configures no handler sees none of its lines."""
    import logging

    found = logging.getLogger("ringcoll")
    if not found.handlers:
        found.addHandler(logging.NullHandler())
    return found


def show() -> None:
    """Enable lines of level DEBUG, and write them to stderr unless the program has a handler."""
    import logging

    class Stderr(logging.StreamHandler[Any]):
        def emit(self, record: logging.LogRecord) -> None:
            self.stream = sys.stderr  # a test may have replaced it
            super().emit(record)

    found = logger()
    found.setLevel(DEBUG)
    handlers = [*found.handlers, *logging.getLogger().handlers]
    if all(isinstance(handler, logging.NullHandler) for handler in handlers):
        handler = Stderr()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        found.addHandler(handler)
