"""``ringcoll COMMAND``: a module for each command, loaded when it is called.

A command's module has ``EXAMPLES``, ``add_arguments(parser)`` and ``main(args) -> int``. Errors of
ringcoll's own tree, words that are no options, and output that is closed or that its device refuses
are one line on standard error and exit status 2; an interruption is 130, or 143 by SIGTERM.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ringcoll import interrupts
from ringcoll.errors import Error, did_you_mean

__all__ = ["COMMANDS", "main"]

COMMANDS: Mapping[str, str] = {
    "bench": "measure collectives, check every element, compare with MPI",
    "topo": "show the links between a machine's GPUs, and the rings they allow",
    "model": "predict how long a collective takes",
    "algorithms": "list the algorithms of each collective, and draw them",
    "verify": "prove the plans of the algorithms",
    "explain": "show what a plan moves where and when",
    "kernels": "list compiled GPU kernels, or compile them ahead of their first use",
    "tune": "measure what calls run fastest on this machine, and keep it as a table",
    "report": "draw the records of measurements as one HTML page",
}
"""The commands, and a line on each."""

_EXAMPLES = """\
ringcoll bench                        measure the common collectives on this machine
ringcoll explain all_reduce           show what the fastest all_reduce of 4 ranks does
ringcoll model all_reduce --ranks 8   predict every algorithm
ringcoll verify --ranks 1-4           prove every algorithm
ringcoll topo                         show this machine's GPUs and links
ringcoll COMMAND --help               options, defaults and examples of a command
"""

_REFUSED = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Error numbers of a device that takes no more output."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; status 1 where something is measured or proven wrong, 2 for an error."""
    words = list(sys.argv[1:] if argv is None else argv)
    called = " ".join(["ringcoll", *words[:1]])
    if sys.stdout is None:
        # Before a file is opened that would get the number by which libraries print.
        _tell(f"{called}: standard output is closed; >/dev/null discards it")
        return 2
    try:
        args = _parse(words)
        if args is None:
            return 2
        status = _run(args)
        sys.stdout.flush()
    except Error as error:
        _tell(f"{called}: {_line(error)}")
        return 2
    except KeyboardInterrupt:
        interrupts.tell()
        return interrupts.status()
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


def _parse(words: list[str]) -> argparse.Namespace | None:
    """What the command line asks for; None after help for those who typed no command."""
    parser = _Parser("ringcoll", "collective communication as plans", _EXAMPLES)
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, text in COMMANDS.items():
        # Only the command that is called is loaded.
        module = importlib.import_module(f"ringcoll.cli.{name}") if words[:1] == [name] else None
        examples = module.EXAMPLES if module else ""
        command = commands.add_parser(name, help=text, description=text, examples=examples)
        if module:
            module.add_arguments(command)
    command = commands.choices.get(" ".join(words[:1]), parser)
    command.check_options(words)
    args, rest = parser.parse_known_args(words)
    if rest:
        command.error(f"unrecognized arguments: {' '.join(rest)}")
    if args.command is None and not args.version:
        parser.print_help()
        return None
    args.words = words[1:]
    return args


class _Parser(argparse.ArgumentParser):
    """A parser whose help ends with examples, and whose errors are a line with the nearest word."""

    def __init__(self, prog: str, description: str, examples: str) -> None:
        lines = "".join(f"  {line}\n" for line in examples.splitlines())
        super().__init__(
            prog=prog,
            description=f"{description[:1].upper()}{description[1:]}.",
            epilog=f"examples:\n{lines}",
            formatter_class=_Formatter,
            allow_abbrev=False,
        )

    def print_help(self, file: Any = None) -> None:
        """Write it, and find out whether it was written, as argparse does not."""
        print(self.format_help(), end="", file=file, flush=True)

    def error(self, message: str) -> NoReturn:
        """One line instead of all options."""
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` lists the options\n")

    def check_options(self, words: Sequence[str]) -> None:
        """Refuse a misspelt option by its name: argparse may take its value for an argument."""
        options = [text for action in self._actions for text in action.option_strings]
        told = [a for a in self._actions if a.help != argparse.SUPPRESS]
        shown = [text for action in told for text in action.option_strings]
        for name in (word.partition("=")[0] for word in words if word.startswith("-")):
            if name in options:
                continue
            from ringcoll.cli.synonyms import meant  # not at every start: mistakes are rare

            near = meant(name, shown)
            # A word with one dash may be a number or several short options in one.
            if near is not None or name.startswith("--"):
                hint = "" if near is None else f"; did you mean {near}?"
                self.error(f"there is no option {name}{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(name) for name in action.choices]
            hint = did_you_mean(str(value), names)
            message = f"{value!r} is not one of {', '.join(names)}{hint}"
            raise argparse.ArgumentError(None if action.dest == "command" else action, message)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)


def _run(args: argparse.Namespace) -> int:
    if args.version:
        from ringcoll.version import __version__

        print(__version__)
        return 0
    if args.command not in ("bench", "tune"):
        interrupts.end()  # a measurement has handlers of its own, once it has rows
    status: int = importlib.import_module(f"ringcoll.cli.{args.command}").main(args)
    return status


def _close_stdout() -> None:
    """The interpreter must not flush to it again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(line: str) -> None:
    """Write an error in one piece, its newline too: each rank may have such a line."""
    print(f"{line}\n", end="", file=sys.stderr, flush=True)


def _line(error: Error) -> str:
    return " ".join(str(error).split()) or type(error).__name__
