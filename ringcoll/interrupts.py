"""Ctrl-C and SIGTERM while the command loads its modules: one line, and the process ends.

Python would raise KeyboardInterrupt inside an import, which shows a traceback or loses it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], object]

_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")

_handlers: list[Handler] = []  # empty where the signals are not this module's
_untold = [True]
_received = [int(signal.SIGINT)]  # the last one that this module has handled


def is_command() -> bool:
    """Whether this process runs ``ringcoll`` or ``python -m ringcoll``, not a user's program."""
    name = sys.argv[0] if getattr(sys, "argv", None) else ""
    return name.rpartition("/")[2] == "ringcoll" or (
        name == "-m" and sys.orig_argv[len(sys.orig_argv) - len(sys.argv)] == "ringcoll"
    )


def begin() -> None:
    """End this process at a signal from here on, with one line; a supervised rank has none."""
    supervised = "--supervisor" in sys.argv
    _handlers.append(_leave)
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is usual:
            signal.signal(number, signal.SIG_DFL if supervised else _handle)


def begun() -> bool:
    """Whether this module handles the signals."""
    return bool(_handlers)


def handle(handler: Handler) -> None:
    """Handle the signals by ``handler``, where :func:`begin` has; in any thread."""
    if _handlers:
        _handlers[-1] = handler


def end() -> None:
    """Give the signals back to Python; in the main thread."""
    if signal.getsignal(signal.SIGINT) is _handle:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is _handle:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _handlers.clear()


def tell() -> None:
    """Write once that the command was interrupted, on the first of a launcher's ranks alone."""
    if not _untold or any(os.environ.get(variable, "0") != "0" for variable in _RANKS):
        return
    _untold.clear()
    line = " ".join(["ringcoll", *sys.argv[1:2]])
    try:  # noqa: SIM105 (contextlib is not loaded yet)
        os.write(2, f"{line}: interrupted\n".encode())
    except OSError:
        pass  # nobody reads it any more


def status() -> int:
    """The exit status of a command that a signal has ended: 130, or 143 after SIGTERM."""
    return 128 + _received[-1]


def _handle(number: int, frame: FrameType | None) -> None:
    _received[:] = [number]
    _handlers[-1](number, frame)


def _leave(number: int, _: FrameType | None) -> None:
    tell()
    os._exit(128 + number)
