"""``ringcoll report``: one page of the records of a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from ringcoll.bench.fields import read_folder
from ringcoll.bench.page import page
from ringcoll.cli.output import check_target, write_text
from ringcoll.errors import ArgumentError
from ringcoll.model.plot import new_figure

EXAMPLES = """\
ringcoll report                          the records of this checkout, as report.html
ringcoll report runs --out runs.html     records that `ringcoll bench --json` wrote into runs/
"""

_FOLDER = Path("benchmarks", "results")
_RESULTS = Path(__file__).parents[2] / _FOLDER
"""The records of the checkout that this package is of; nothing where it was copied from one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``ringcoll report``."""
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        metavar="FOLDER",
        help="whose .json files are drawn (default: benchmarks/results of the checkout, "
        "or of the current folder)",
    )
    parser.add_argument(
        "--out",
        default="report.html",
        metavar="FILE",
        help="the page, one file that needs no other; - is stdout (default report.html)",
    )


def main(args: argparse.Namespace) -> int:
    """Run ``ringcoll report``."""
    check_target("--out", args.out)
    new_figure((1.0, 1.0), "page.svg")  # needs matplotlib
    folder = _usual() if args.folder is None else args.folder
    write_text("--out", args.out, page(read_folder(folder)))
    return 0


def _usual() -> Path:
    """The records of this package's checkout, or of the one that the command is called in."""
    for folder in (_RESULTS, _FOLDER):
        if any(folder.glob("*.json")):
            return folder
    raise ArgumentError(
        f"FOLDER: neither this installation nor the current folder has records in {_FOLDER}; "
        f"name a folder with some, such as {_FOLDER} of a checkout"
    )
