"""``ringcoll bench``: measure collectives on this machine's ranks."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from ringcoll import interrupts
from ringcoll.bench.flags import add_arguments, read
from ringcoll.bench.launch import (
    Start,
    become_mpiexec,
    decide,
    is_first,
    opened,
    own_command,
    run_sockets,
)
from ringcoll.bench.settings import Settings
from ringcoll.bench.supervisor import Channel, limit, supervise
from ringcoll.errors import AbortedError, Error, UsageError

__all__ = ["EXAMPLES", "add_arguments", "main"]

EXAMPLES = """\
ringcoll bench                                    a tour: all_reduce beside MPI, the timing model
ringcoll bench all_reduce -b 1K -e 64M -f 4       sizes, as nccl-tests takes them
ringcoll bench all_reduce --algorithm ring,two_shot --slices 1,4
ringcoll bench broadcast --pace 20M,1ms -e 1M     slow links, as the model assumes them
ringcoll bench all_reduce --peer mpi --json rows.json --plot rows.svg
mpiexec -n 4 ringcoll bench all_gather            ranks that a launcher starts
"""

_FINALIZES = weakref.finalize.__call__.__code__
_CALLBACKS = {
    weakref.WeakValueDictionary.__init__.__code__.co_filename: "remove",
    weakref.WeakSet.__init__.__code__.co_filename: "_remove",
}
"""By file: the callbacks of weak dictionaries and of weak sets, which are made for each object."""
_AGAIN_SECONDS = 10e-3


def main(args: argparse.Namespace) -> int:
    """Start the ranks, or measure as one; 1: an element was wrong, 128 and more: a signal came."""
    channel = Channel(args.supervisor)
    channel.send("begin")
    status = 2
    try:
        status = _run(args, channel)
    except Error as error:
        if not channel.send("error", str(error) or type(error).__name__):
            raise
        return 2
    finally:
        channel.send("end", status)
    return status


def _run(args: argparse.Namespace, channel: Channel) -> int:
    try:
        settings = read(args, given=bool(_typed(args)))
        start = decide(settings, os.environ, member=args.member is not None)
        _check(settings, start)
    except UsageError:
        # Every rank that a launcher started has this error: the first reports it.
        if not is_first(os.environ):
            return 2
        raise
    command = [*own_command(args.words), "--supervisor"]
    if start.how == "mpiexec":
        return supervise(
            lambda marker: become_mpiexec(start, [*command, marker]), "mpiexec", quiet=True
        )
    if start.how == "sockets":
        name = "the process that connects the ranks"
        return supervise(lambda marker: run_sockets(start, [*command, marker]), name, quiet=False)
    # The ranks that share a lone GPU are counted by `decide`.
    return _measure(args, replace(settings, threads=start.ranks), channel)


def _check(settings: Settings, start: Start) -> None:
    """Refuse, before ranks start, names that they would refuse; the usual ones load no numpy."""
    usual = Settings(tour=True, dtypes=("float",))
    names = ("ops", "dtypes", "roots", "algorithms")
    if all(getattr(settings, name) == getattr(usual, name) for name in names):
        return
    from ringcoll.bench.cases import check

    # The ranks of a launcher are as many as it says, which they find out as they meet.
    check(settings, None if start == Start("here", 1) else start.ranks)


def _typed(args: argparse.Namespace) -> list[str]:
    """The words that the user typed, without the hidden options of started ranks."""
    words = list(args.words)
    for hidden in ("--output", "--member", "--supervisor"):
        if hidden in words:
            at = words.index(hidden)
            del words[at : at + 2]
    return words


def _measure(args: argparse.Namespace, settings: Settings, channel: Channel) -> int:
    from ringcoll.bench.report import Report
    from ringcoll.bench.session import measure
    from ringcoll.bench.tour import tour
    from ringcoll.bench.worlds import World

    first = is_first(os.environ)

    def begun() -> None:
        interrupts.handle(_interrupt)
        if channel.send("rows"):
            signal.signal(signal.SIGINT, _interrupt)

    if args.supervisor is None and interrupts.begun():
        limit()
        if not first:
            # The first rank saves its rows while the others serve its last call, then aborts.
            interrupts.handle(lambda *_: None)
    output = opened(args.output)
    command = shlex.join(["ringcoll", "bench", *_typed(args)])
    report = Report(settings, output, sys.stderr, command=command, begun=begun)
    world = World(settings.threads, settings.device, settings.timeout)
    try:
        with _interruptible():
            right = (tour if settings.tour else measure)(world, settings, report)
    except KeyboardInterrupt:
        if args.supervisor is None:
            interrupts.tell()
        # Only rank 0 has rows: it shows those that are measured.
        if report.rows:
            report.end()
        return interrupts.status()
    except UsageError:
        if not first:
            return 2
        raise
    except Error as error:
        if report.rows:
            report.end()
        if isinstance(error, AbortedError) and not first:
            return 2  # the rank that aborted reports why
        raise
    if report.rows:
        report.end()
    _flush(output)
    return 0 if right else 1


def _flush(stream: object) -> None:
    if isinstance(stream, io.TextIOBase):
        stream.flush()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise a Ctrl-C that meets a finalizer a moment later: Python would print and forget it.

    Threads other than the main one, and handlers other than Python's own, are left alone.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal: raise KeyboardInterrupt, inside a finalizer a moment later."""
    inner = frame
    while inner is not None:
        code = inner.f_code
        if code is _FINALIZES or _CALLBACKS.get(code.co_filename) == code.co_name:
            again = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        inner = inner.f_back
    raise KeyboardInterrupt
