"""What a program prints for the test that has started it: one line of JSON for each rank."""

import gc
import json
import os
import sys

import numpy as np

from ringcoll.errors import Error

# Plans are many small objects and few cycles: Python's collector would take a tenth of the time.
gc.set_threshold(300_000, 10, 10)


class Checks:
    """Counts what is compared and keeps what differs."""

    def __init__(self) -> None:
        self.count = 0
        self.failures: list[str] = []

    def equal(self, what: str, got, want) -> None:
        """Two arrays of the same elements."""
        self.count += 1
        got, want = np.asarray(got), np.asarray(want)
        if got.shape != want.shape:
            self.failures.append(f"{what}: shape {got.shape}, wanted {want.shape}")
        elif not np.array_equal(got, want):
            at = int(np.flatnonzero(got != want)[0])
            wrong = int((got != want).sum())
            self.failures.append(
                f"{what}: {wrong} of {got.size} wrong, first at {at}: {got[at]}, wanted {want[at]}"
            )

    def true(self, what: str, holds: object) -> None:
        """A condition."""
        self.count += 1
        if not holds:
            self.failures.append(what)


def error_of(function, *args, **kwargs) -> str:
    """The error of a call, as a line."""
    try:
        function(*args, **kwargs)
    except Error as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def say(rank: int, **words) -> None:
    """Print this rank's verdict in one piece."""
    line = json.dumps({"rank": rank, **words}) + "\n"
    sys.stdout.flush()
    os.write(1, line.encode())
