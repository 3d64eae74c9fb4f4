"""``ringcoll bench``: measure collectives on this machine's ranks."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from dataclasses import replace

from ringcoll.bench.flags import add_arguments
from ringcoll.bench.launch import (
    become_mpiexec,
    decide,
    is_first,
    opened,
    own_command,
    run_sockets,
)
from ringcoll.bench.reading import read
from ringcoll.bench.settings import Settings
from ringcoll.bootstrap.launcher import launcher_of
from ringcoll.cli.interrupts import heard, interrupt
from ringcoll.errors import AbortedError, Error, UsageError

__all__ = ["add_arguments", "main"]


def main(args: argparse.Namespace) -> int:
    """Start the ranks, or measure as one of them.

    Returns:
        0; 1 where an element was wrong; 130 after an interruption.

    """
    try:
        settings = read(args, given=bool(_typed(args)))
        start = decide(settings, os.environ, member=args.member is not None)
    except UsageError:
        # Every rank of a launcher's comes here: one of them says it.
        if not is_first(os.environ):
            return 2
        raise
    if start.how == "mpiexec":
        become_mpiexec(start, own_command(args.words))
    if start.how == "sockets":
        return run_sockets(start, own_command(args.words))
    # A lone GPU is shared by ranks that nobody has counted.
    return _measure(args, replace(settings, threads=start.ranks))


def _typed(args: argparse.Namespace) -> list[str]:
    """The words that the user typed, without those that tell ranks where they belong."""
    words = list(args.words)
    for hidden in ("--output", "--member"):
        if hidden in words:
            at = words.index(hidden)
            del words[at : at + 2]
    return words


def _measure(args: argparse.Namespace, settings: Settings) -> int:
    from ringcoll.bench.report import Report
    from ringcoll.bench.session import measure
    from ringcoll.bench.tour import tour
    from ringcoll.bench.worlds import World

    if launcher_of(os.environ) is not None:
        # By this Open MPI's mpiexec tells its ranks of a Ctrl-C; a second later it kills them.
        signal.signal(signal.SIGTERM, interrupt)
    output = opened(args.output)
    report = Report(settings, output, sys.stderr)
    world = World(settings.threads, settings.device, settings.timeout)
    try:
        with heard():
            right = (tour if settings.tour else measure)(world, settings, report)
    except KeyboardInterrupt:
        # Only rank 0 has rows; what is measured is shown before all else is given up.
        if report.rows:
            report.end()
        return 130
    except UsageError:
        if not is_first(os.environ):
            return 2
        raise
    except Error as error:
        if report.rows:
            report.end()
        if isinstance(error, AbortedError) and not is_first(os.environ):
            return 2  # who has aborted says why
        raise
    if report.rows:
        report.end()
    _flush(output)
    return 0 if right else 1


def _flush(stream: object) -> None:
    if isinstance(stream, io.TextIOBase):
        stream.flush()
