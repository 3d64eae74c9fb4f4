"""Make what the pages show of the code itself: tables, pictures and figures, into one folder.

::

    python docs/generate.py [FOLDER]

The build of the pages runs this first. Nothing in the folder is typed by hand and nothing of it is
kept in the repository.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import sys
from pathlib import Path

from benchmarks import tables
from ringcoll import cli
from ringcoll.config import DEFAULTS, OPTIONS, SETTINGS, Config, Settings
from ringcoll.options import KINDS

HERE = Path(__file__).parent

PLANS = {
    "ring": "explain all_reduce --algorithm ring --ranks 4 --bandwidth 10G",
    "chain": "explain broadcast --algorithm chain --ranks 4 --slices 4 --bandwidth 10G",
}
"""Pictures of plans, and the commands that draw them."""


def main(folder: Path) -> None:
    """Write everything into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "options.md").write_text(options(), encoding="utf-8")
    tables.main(["--out", str(folder)])
    for name, command in PLANS.items():
        run(f"{command} --plot {folder / f'plan-{name}.svg'}")
    machines = run("topo --preset list").split()
    for name in machines:
        run(f"topo --preset {name} --picture {folder / f'{name}.svg'}")
    (folder / "machines.md").write_text("".join(map(machine, machines)), encoding="utf-8")


def run(command: str) -> str:
    """What a command of ringcoll prints; SystemExit if it fails."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = cli.main(command.split())
    if status != 0:
        raise SystemExit(f"ringcoll {command}: exit status {status}")
    return printed.getvalue()


def machine(name: str) -> str:
    """A preset's picture and what its rings are worth, as the command says it."""
    said = run(f"topo --preset {name}")
    worth = next(line for line in said.splitlines() if "GB/s together" in line)
    alt = f"The links of {name} and the rings along them"
    return f"### {name}\n\n{worth.strip()}.\n\n![{alt}](_generated/{name}.svg)\n\n"


def options() -> str:
    """The table of options, settings and their environment variables."""
    meanings = {**described(Config), **described(Settings)}
    lines = ["| option | environment variable | values | meaning |", "|---|---|---|---|"]
    for name in (*OPTIONS, *SETTINGS):
        option = f"`{name}=`" if name in OPTIONS else f"`init({name}=)`"
        default = getattr(DEFAULTS, name, None)
        ends = "" if default is None else f" The default is `{default}`."
        cells = (option, f"`RINGCOLL_{name.upper()}`", KINDS[name].legal, meanings[name] + ends)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def described(record: type) -> dict[str, str]:
    """The text that a docstring's ``Args`` has of each field."""
    text = inspect.getdoc(record) or ""
    args = text.partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", args, re.MULTILINE)
    return {name: _sentence(" ".join(said.split())) for name, said in entries}


def _sentence(text: str) -> str:
    # Roles of Sphinx and double backticks are reStructuredText; tables here are Markdown.
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    return f"{text[:1].upper()}{text[1:]}"


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "_generated")
