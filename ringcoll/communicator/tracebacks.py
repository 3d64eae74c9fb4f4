"""What Python prints of an error that nobody catches: the program's frames and the call it made.

An error of ringcoll is the answer of a public function, whose own frame is shown and none of those
below it. So it is with an error of the program's own code that ringcoll has run, as in ``spawn``.
Any other error inside the package is a defect, and keeps all of its frames. What the program
catches or logs has all frames, and RINGCOLL_DEBUG shows them always.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

from ringcoll.errors import Error

_LIBRARY = str(Path(threading.__file__).parent) + os.sep
_PACKAGES = "-packages" + os.sep  # site-packages, dist-packages
_OURS, _PYTHONS, _ANOTHERS, _PROGRAMS = range(4)
_PATIENCE = 5.0  # seconds for other threads to show theirs; in a fork they never do
_showing = threading.RLock()


def install() -> None:
    """Let Python's hooks, or those that the program has set, show tracebacks like this."""
    whole, of_thread = sys.excepthook, threading.excepthook

    def show(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        with _at_once(whole is sys.__excepthook__), _shortening(error):
            whole(kind, error, error.__traceback__ or trace)

    def show_of_thread(args: threading.ExceptHookArgs) -> None:
        error = args.exc_value
        if error is None:
            of_thread(args)
            return
        with _at_once(of_thread is threading.__excepthook__), _shortening(error):
            found = args.exc_type, error, error.__traceback__, args.thread
            of_thread(threading.ExceptHookArgs(found))

    sys.excepthook, threading.excepthook = show, show_of_thread


@contextlib.contextmanager
def _at_once(usual: bool) -> Iterator[None]:
    """Write what Python's own hook shows in one piece: ranks of a launcher share a pipe.

    One thread at a time: all would write to what the first puts in the place of ``sys.stderr``.
    """
    if not usual or not _showing.acquire(timeout=_PATIENCE):
        yield
        return
    try:
        with _in_one_piece():
            yield
    finally:
        _showing.release()


@contextlib.contextmanager
def _in_one_piece() -> Iterator[None]:
    stream, text = sys.stderr, io.StringIO()
    if stream is None or stream.isatty():
        yield
        return
    try:
        with contextlib.redirect_stderr(text):
            yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            stream.write(text.getvalue())
            stream.flush()


@contextlib.contextmanager
def _shortening(error: BaseException) -> Iterator[None]:
    """Shorten the tracebacks of an error and its causes for a while; hide what it repeats."""
    kept: dict[int, tuple[BaseException, types.TracebackType | None, BaseException | None]] = {}
    todo: list[BaseException | None] = [error]
    while todo and os.environ.get("RINGCOLL_DEBUG", "0") in ("", "0"):
        one = todo.pop()
        if one is not None and id(one) not in kept:
            cause = one.__cause__
            kept[id(one)] = one, one.__traceback__, cause
            todo += [cause, one.__context__]
            one.__traceback__ = shortened(one)
            with contextlib.suppress(Exception):  # of a text that the program makes
                if isinstance(cause, Error) and str(cause) in str(one):
                    one.__cause__ = None
    try:
        yield
    finally:
        for one, trace, cause in kept.values():
            one.__traceback__ = trace
            if cause is not None:
                one.__cause__ = cause


def shortened(error: BaseException) -> types.TracebackType | None:
    """The traceback of an error without the frames that say nothing to the program's author."""
    entries = list(_entries(error.__traceback__))
    kinds = [_kind(entry.tb_frame) for entry in entries]
    raised = next((kind for kind in reversed(kinds) if kind != _PYTHONS), _OURS)
    answers = isinstance(error, Error) or isinstance(error.__cause__, Error)  # torch's, from ours
    if not answers and raised != _PROGRAMS:
        return error.__traceback__
    shown, below = [], False  # of a run of frames of ringcoll: the first
    for entry, kind in zip(entries, kinds, strict=True):
        if kind == _OURS or (kind == _PYTHONS and below):
            shown += [] if below else [entry]
            below = True
        else:
            shown.append(entry)
            below = False
    if {*map(id, shown)} == {*map(id, entries)}:
        return error.__traceback__
    tail: types.TracebackType | None = None
    for entry in reversed(shown):
        tail = types.TracebackType(tail, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return tail


def _entries(trace: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _kind(frame: types.FrameType) -> int:
    """Whose code a frame runs."""
    if str(frame.f_globals.get("__name__")).partition(".")[0] == "ringcoll":
        return _OURS
    file = frame.f_code.co_filename
    if _PACKAGES in file:
        return _ANOTHERS
    return _PYTHONS if file.startswith((_LIBRARY, "<frozen")) else _PROGRAMS
