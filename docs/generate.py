"""Make what the pages show of the code itself: tables, pictures and figures, into one folder.

::

    python docs/generate.py [FOLDER]
    python docs/generate.py options|algorithms

The build of the pages runs the first, which needs matplotlib (``pip install '.[plot]'``). Nothing
in the folder is typed by hand and nothing of it is kept in the repository. The second prints a
table that a page keeps, so that it is there without a build: a test compares the two.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # The checkout that these pages are of, wherever it is run.

from benchmarks import tables  # noqa: E402
from ringcoll import cli  # noqa: E402
from ringcoll.config import DEFAULTS, OPTIONS, SETTINGS, Config, Settings  # noqa: E402
from ringcoll.folders import pip_install  # noqa: E402
from ringcoll.options import OPTION_TYPES  # noqa: E402

PICTURES = {
    "plan-ring": "explain all_reduce --algorithm ring --ranks 4 --bandwidth 10G",
    "plan-chain": "explain broadcast --algorithm chain --ranks 4 --slices 4 --bandwidth 10G",
    "model-chain": "model broadcast --algorithm chain --bytes 8M --bandwidth 100M --alpha 1ms",
}
"""Pictures of plans and of the model, and the commands that draw them."""


def main(folder: Path) -> None:
    """Write everything into ``folder``; SystemExit where matplotlib is missing."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        raise SystemExit(f"The pictures are drawn by matplotlib: {pip_install('plot')}") from None
    folder.mkdir(parents=True, exist_ok=True)
    tables.main(["--out", str(folder)])
    for name, command in PICTURES.items():
        run(f"{command} --plot {folder / f'{name}.svg'}")
    machines = [line.split()[0] for line in run("topo --preset list").splitlines()]
    for name in machines:
        run(f"topo --preset {name} --picture {folder / f'{name}.svg'}")
    text = (HERE / "layers.txt").read_text(encoding="utf-8")
    (folder / "layers.svg").write_text(layers(text), encoding="utf-8")
    (folder / "machines.md").write_text("".join(map(machine, machines)), encoding="utf-8")


def run(command: str) -> str:
    """What a command of ringcoll prints; SystemExit if it fails."""
    printed = io.StringIO()
    said = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        status = cli.main(command.split())
    if status != 0:
        raise SystemExit(f"ringcoll {command}: exit status {status}\n{said.getvalue()}")
    return printed.getvalue()


def machine(name: str) -> str:
    """A preset's picture and what its rings are worth, as the command says it."""
    said = run(f"topo --preset {name}")
    worth = next(line for line in said.splitlines() if "GB/s together" in line)
    alt = f"The links of {name} and the rings along them"
    return f"### {name}\n\n{worth.strip()}.\n\n![{alt}](_generated/{name}.svg)\n\n"


def layers(text: str) -> str:
    """The picture of the layers: a row a line of ``layers.txt``, its units as boxes."""
    rows = [line.partition("  ") for line in text.splitlines()]
    height, style = 26, 'font-family="sans-serif" font-size="13"'
    parts = []
    for number, (units, _, about) in enumerate(rows):
        top, left = number * height + 2, 2.0
        for unit in units.split(" · "):
            width = 9 * len(unit) + 16
            shape = f'x="{left}" y="{top}" width="{width}" height="{height - 5}" rx="4"'
            parts.append(f'<rect {shape} fill="#e8eef7" stroke="#5b7fb5"/>')
            parts.append(f'<text x="{left + 8}" y="{top + 15}" font-weight="bold">{unit}</text>')
            left += width + 6
        parts.append(
            f'<text x="{max(left + 8, 330)}" y="{top + 15}">{escape(about.strip())}</text>'
        )
    size = f'width="900" height="{len(rows) * height + 4}"'
    back = '<rect width="100%" height="100%" fill="white"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{back}'
    return "\n".join([head, *parts, "</svg>\n"])


def algorithms() -> str:
    """The list of the built-in algorithms."""
    return f"```text\n{run('algorithms')}```\n"


def options() -> str:
    """The table of options, settings and their environment variables."""
    meanings = {**described(Config), **described(Settings)}
    lines = ["| option | environment variable | values | meaning |", "|---|---|---|---|"]
    for name in (*OPTIONS, *SETTINGS):
        option = f"`{name}=`" if name in OPTIONS else f"`init({name}=)`"
        default = getattr(DEFAULTS, name, None)
        ends = "" if default is None else f" The default is `{default}`."
        cells = (
            option,
            f"`RINGCOLL_{name.upper()}`",
            OPTION_TYPES[name].legal,
            meanings[name] + ends,
        )
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


KEPT = {"options": options, "algorithms": algorithms}
"""Tables that a page keeps below a comment with the command that prints them."""

if __name__ == "__main__":
    given = sys.argv[1] if len(sys.argv) > 1 else str(HERE / "_generated")
    if given in KEPT:
        print(KEPT[given](), end="")
    else:
        main(Path(given))
