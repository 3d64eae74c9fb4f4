"""``ringcoll tune``: measure what calls run fastest on this machine, and keep it as a table."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ringcoll.bench.launch import decide, is_first, own_command, run_sockets
from ringcoll.bench.settings import Settings
from ringcoll.bench.supervisor import Channel, supervise
from ringcoll.cli.links import typed
from ringcoll.cli.output import check_target, progress, say_written
from ringcoll.config import from_environment
from ringcoll.errors import ArgumentError, Error, did_you_mean
from ringcoll.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from ringcoll.bench.compared import Checked
    from ringcoll.bench.tune import Tuned
    from ringcoll.tuner.table import Entry

__all__ = ["EXAMPLES", "add_arguments", "main"]

EXAMPLES = """\
ringcoll tune                         as many ranks as GPUs, or 2 to 4 on CPUs; within a minute
ringcoll tune --ranks 2 --out t.json  for ringcoll.init(tuning="t.json") or RINGCOLL_TUNING
ringcoll tune --collectives reduce    these anew; others stay as they were measured
ringcoll tune --check t.json          sizes between those of the table, beside every candidate
mpiexec -n 4 ringcoll tune            ranks that a launcher starts
"""

_WITHOUT = (
    *("algorithm", "protocol", "engine", "channels", "slices", "max_sms", "deterministic"),
    *("verify", "pace", "topo_file", "transport"),
)
_HIDDEN = ("--member", "--supervisor", "--output")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    option = parser.add_argument
    size = typed(parse_bytes)
    option(
        "--ranks",
        type=int,
        metavar="N",
        help="rank processes (default: the GPUs, or 2 to 4, as cores)",
    )
    option(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="device of the ranks (default auto)",
    )
    option("--collectives", metavar="NAMES", help="such as all_reduce,broadcast (default: six)")
    option("--min", type=size, default=1 << 10, metavar="BYTES", help="smallest size (default 1K)")
    option("--max", type=size, metavar="BYTES", help="largest size (default 4M, on GPUs 256M)")
    option(
        "--factor", type=int, default=2, metavar="F", help="from one size to the next (default 2)"
    )
    option("--seconds", type=float, default=50.0, help="how long to measure (default 50)")
    option("--out", metavar="FILE", help="write the table to FILE, not to the user's cache folder")
    option(
        "--check",
        metavar="TABLE",
        help="compare what calls run by a table with every candidate, at sizes between its own",
    )
    option("--json", metavar="FILE", help="with --check: write what was compared to FILE")
    for hidden in _HIDDEN:
        option(hidden, help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> int:
    """Start the ranks, or measure as one; 1: a result was wrong."""
    channel = Channel(args.supervisor)
    channel.send("begin")
    status = 2
    try:
        status = _run(args)
    except Error as error:
        if not is_first(os.environ):
            return 2
        if not channel.send("error", str(error) or type(error).__name__):
            raise
        return 2
    finally:
        channel.send("end", status)
    return status


def _run(args: argparse.Namespace) -> int:
    for name in ("out", "json"):
        check_target(f"--{name}", getattr(args, name))
    if args.ranks is not None and args.ranks < 2:
        raise ArgumentError(f"--ranks {args.ranks}: at least 2, as one rank has nothing to choose")
    _refuse_options()
    _collectives(args)  # ranks need not start to find a misspelt one
    settings = Settings(ranks=args.ranks, device=args.device, graphs=1)
    # Without MPI, so that the ranks have this terminal.
    start = decide(settings, os.environ, member=args.member is not None, has_mpi=False)
    if start.how == "sockets":
        command = [*own_command(args.words, "tune"), "--supervisor"]
        name = "the process that connects the ranks"
        return supervise(
            lambda marker: run_sockets(start, [*command, marker]), name, quiet=False, command="tune"
        )
    return _measure(args)


def _refuse_options() -> None:
    """Refuse options of the environment with which no call takes a table."""
    for each in from_environment(os.environ):
        for name in _WITHOUT:
            if getattr(each, name, None):
                variable = f"RINGCOLL_{name.upper()}"
                raise ArgumentError(f"{variable} is set, but calls with it take no table: unset it")


def _measure(args: argparse.Namespace) -> int:
    from ringcoll.bench.tune import COLLECTIVES, Sweep, tune
    from ringcoll.bench.worlds import World

    world = World(1, args.device)
    sizes = _sizes(args, on_gpu=world.on_gpu())
    table = None if args.check is None else str(Path(args.check).absolute())
    sweep = Sweep(_collectives(args) or COLLECTIVES, sizes, args.seconds, table)
    found = tune(world, sweep, partial(_shown, "tuning" if table is None else "comparing"))
    if not (found.entries or found.checked or found.wrong):
        raise ArgumentError(f"--seconds {args.seconds:g}: too short for one size; pass more")
    if found.rank == 0 and table is None:
        _keep(found, args)
    elif found.rank == 0:
        _compare(found, args)
    if found.rank == 0 and found.left:
        left = ", ".join(f"{count} cases of {name}" for name, count in found.left.items())
        print(
            f"ringcoll: {args.seconds:g} s were too short for {left}; pass more --seconds, or "
            f"--collectives",
            file=sys.stderr,
        )
    return 1 if found.wrong else 0


def _collectives(args: argparse.Namespace) -> tuple[str, ...]:
    """Those that are named, each once; none where all are tuned."""
    if args.collectives is None:
        return ()
    from ringcoll.bench.tune import COLLECTIVES

    names = tuple(dict.fromkeys(args.collectives.split(",")))
    for name in names:
        if name not in COLLECTIVES:
            hint = did_you_mean(name, COLLECTIVES)
            raise ArgumentError(f"--collectives {name}: one of {', '.join(COLLECTIVES)}{hint}")
    return names


@contextmanager
def _shown(what: str, total: int) -> Iterator[Callable[[str], None]]:
    with progress(what, total) as shown:
        yield shown.step


def _sizes(args: argparse.Namespace, *, on_gpu: bool) -> tuple[int, ...]:
    """The sizes of a table, or, to check one, those half way between them."""
    if args.factor < 2 or args.min < 1:
        raise ArgumentError(f"--min {args.min} --factor {args.factor}: at least 1 and 2")
    most = args.max if args.max is not None else (256 << 20 if on_gpu else 4 << 20)
    if most < args.min:
        raise ArgumentError(f"--min {args.min}: more than --max {most}")
    found, size = [], args.min
    while size <= most:
        found.append(size)
        size *= args.factor
    if args.check is None:
        return tuple(found)
    return tuple(3 * size // 2 for size in found[:-1]) or tuple(found)


def _keep(found: Tuned, args: argparse.Namespace) -> None:
    """Write the table and show it."""
    from ringcoll.bench.tune import about
    from ringcoll.communicator.setup.tuning import read_table, write_table
    from ringcoll.tuner.table import as_json

    path = found.path if args.out is None else Path(args.out)
    if path is None:
        raise ArgumentError("there is no cache folder: name a file with --out")
    earlier = read_table(path)
    kept = [] if earlier is None else earlier.besides(found.machine, found.entries)
    if path.exists() and (earlier is None or earlier.machine != found.machine):
        why = "no table of this version"
        if earlier is not None:
            of = earlier.machine
            why = f"of {of.ranks} ranks ({of.ranks_are}) on {of.device}, driver {of.driver}"
        print(f"ringcoll: no entries of {path} stay: {why}", file=sys.stderr)
    entries = sorted((*found.entries, *kept), key=_place)
    text = as_json(found.machine, about(_command(args)), entries)
    # First: who reads the rows may close the pipe.
    write_table(path, text, private=args.out is None)
    print(f"{'collective':<15}{'bytes':>10}  {'memory':<7}{'measured':>10}{'predicted':>11}  runs")
    for entry in sorted(found.entries, key=_place):
        print(_line(entry))
    say_written(str(path))
    if kept:
        print(f"ringcoll: {len(kept)} entries of earlier runs stay in it", file=sys.stderr)


def _place(row: Entry | Checked) -> tuple[object, ...]:
    return row.collective, row.mapped, row.nbytes


def _line(entry: Entry) -> str:
    best = entry.timed[0]
    predicted = "" if best.predicted is None else format_seconds(best.predicted)
    kind = "mapped" if entry.mapped else "plain"
    return (
        f"{entry.collective:<15}{format_bytes(entry.nbytes):>10}  {kind:<7}"
        f"{format_seconds(best.seconds):>10}{predicted:>11}  {str(best).partition(':')[0]}"
    )


def _compare(found: Tuned, args: argparse.Namespace) -> None:
    """Show what was compared, and write it."""
    from ringcoll.bench.compared import summary

    columns = f"{'ratio':>6}{'least':>7}{'noise':>7}  runs / best"
    print(f"{'collective':<15}{'bytes':>10}  {'memory':<7}{columns}")
    for row in sorted(found.checked, key=_place):
        kind = "mapped" if row.mapped else "plain"
        print(
            f"{row.collective:<15}{format_bytes(row.nbytes):>10}  {kind:<7}{row.ratio:>6.3f}"
            f"{row.least:>7.3f}{row.noise:>7.3f}  {row.runs} / {row.best}"
        )
    figures = summary(found.checked)
    print("; ".join(f"{name}: {value}" for name, value in figures.items()))
    if args.json is not None:
        from ringcoll.bench.tune import about

        record = {
            "machine": asdict(found.machine),
            **about(_command(args)),
            "table": json.loads(Path(args.check).read_text(encoding="utf-8")),
            "load": round(os.getloadavg()[0], 1),
            "summary": figures,
            "rows": [asdict(row) for row in sorted(found.checked, key=_place)],
        }
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        say_written(args.json)


def _command(args: argparse.Namespace) -> str:
    words = list(args.words)
    for hidden in _HIDDEN:
        if hidden in words:
            at = words.index(hidden)
            del words[at : at + 2]
    return shlex.join(["ringcoll", "tune", *words])
