"""``ringcoll algorithms``: the algorithms of each collective, in a sentence and a picture."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator, Mapping

from ringcoll.algorithms import ALGORITHMS, Builder, build
from ringcoll.algorithms.load import is_own, load
from ringcoll.cli.output import bold, say_unproven
from ringcoll.errors import ArgumentError, did_you_mean
from ringcoll.model.explain import LEGEND, space_time
from ringcoll.model.links import Links
from ringcoll.model.predict import Clock

EXAMPLES = """\
ringcoll algorithms                    every collective and its algorithms, a line each
ringcoll algorithms all_reduce         those of all_reduce, each drawn for 4 ranks
ringcoll algorithms star.py:star       the function `star` of your own file
"""

_BYTES = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``ringcoll algorithms``."""
    parser.add_argument(
        "collective",
        nargs="?",
        metavar="COLLECTIVE",
        help="draw the algorithms of this collective, or an algorithm of your own, as "
        "FILE.py:FUNCTION (default: list all algorithms)",
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="ranks that are drawn (default 4; send: 2)"
    )


def main(args: argparse.Namespace) -> int:
    """Run ``ringcoll algorithms``."""
    if args.collective is None:
        for collective, builders in ALGORITHMS.items():
            print(bold(collective))
            for name, builder in builders.items():
                print(f"  {name:<22}{_sentence(builder)}")
        print("\n`ringcoll algorithms COLLECTIVE` draws them")
        return 0
    if is_own(args.collective):
        builder = load(args.collective)
        drawn = {args.collective: builder}
        plan = builder(args.ranks or 4)
        collective = plan.collective.name
        say_unproven("algorithms", plan)
    else:
        collective, drawn = args.collective, dict(_builders(args.collective))
    nranks = args.ranks or (2 if collective == "send" else 4)
    for name, builder in drawn.items():
        print(f"{bold(f'{collective} by {name}')}: {_sentence(builder)}\n")
        print("\n".join(_picture(collective, builder, nranks)) + "\n")
    print(LEGEND)
    return 0


def _builders(collective: str) -> Mapping[str, Builder]:
    if collective not in ALGORITHMS:
        hint = did_you_mean(collective, ALGORITHMS)
        raise ArgumentError(f"{collective}: the collectives are {', '.join(ALGORITHMS)}{hint}")
    return ALGORITHMS[collective]


def _sentence(builder: Builder) -> str:
    """The first sentence of a builder's docstring."""
    text = " ".join((inspect.getdoc(builder) or "no docstring").split("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".")


def _picture(collective: str, builder: Builder, nranks: int) -> Iterator[str]:
    """What each rank moves when, without slices."""
    clock = Clock(build(collective, builder, nranks), Links(10e9))
    for line in space_time(clock.trace(_BYTES, 1), nranks).splitlines():
        yield f"    {line}".rstrip()
