"""``ringcoll COMMAND``: a module for each command, loaded when asked for.

A command's module has ``add_arguments(parser)`` and ``main(args) -> int``. Errors of ringcoll's own
tree, and output that is closed or that its device refuses, are one line on standard error and exit
status 2, an interruption is 130.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ringcoll.errors import Error

__all__ = ["COMMANDS", "main"]

COMMANDS: Mapping[str, str] = {
    "bench": "measure collectives, check every element, compare with MPI",
    "topo": "what joins the GPUs of a machine, and the rings it is worth",
    "model": "how long a collective takes, on paper",
    "algorithms": "list the algorithms of each collective, and draw them",
    "verify": "prove the plans of the algorithms",
    "explain": "show what a plan moves where and when",
    "kernels": "compile ahead for GPUs",
}
"""The commands, and a line on each."""

_REFUSED = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""What a device says that takes no more output."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the words after ``ringcoll``; None takes this process's.

    Returns:
        The exit status: 0, 1 where something was measured or proven wrong, 2 for an error.

    """
    words = list(sys.argv[1:] if argv is None else argv)
    called = " ".join(["ringcoll", *words[:1]])
    if sys.stdout is None:
        # Said before a file is opened that would get its number, by which libraries print.
        _tell(f"{called}: standard output is closed; >/dev/null discards it")
        return 2
    parser = _Parser(
        prog="ringcoll", description="Collective communication as plans.", allow_abbrev=False
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        # Only the command that was asked for is loaded.
        if words[:1] == [name]:
            importlib.import_module(f"ringcoll.cli.{name}").add_arguments(command)
    try:
        args = parser.parse_args(words)
        if args.command is None and not args.version:
            parser.print_help()
            return 2
        args.words = words[1:]
        status = _run(args)
        sys.stdout.flush()
    except Error as error:
        _tell(f"{called}: {_line(error)}")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has had enough.
        _close_stdout()
        return 1
    except OSError as error:
        # Errors of files name them; this one is of the standard output.
        if error.filename is not None or error.errno not in _REFUSED:
            raise
        _close_stdout()
        _tell(f"{called}: output cannot be written: {error.strerror}")
        return 2
    return status


class _Parser(argparse.ArgumentParser):
    """One that does not pass over what happens to its help, as argparse does."""

    def print_help(self, file: Any = None) -> None:
        """Write it, all of it."""
        print(self.format_help(), end="", file=file, flush=True)


def _run(args: argparse.Namespace) -> int:
    if args.version:
        from ringcoll.version import __version__

        print(__version__)
        return 0
    status: int = importlib.import_module(f"ringcoll.cli.{args.command}").main(args)
    return status


def _close_stdout() -> None:
    """The interpreter must not flush to it again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(line: str) -> None:
    """Say what ends this process, in one piece, its newline too: each rank may have such a line."""
    print(f"{line}\n", end="", file=sys.stderr, flush=True)


def _line(error: Error) -> str:
    return " ".join(str(error).split()) or type(error).__name__
