"""Make what the pages show of the code itself: tables, pictures and figures, into one folder.

::

    python docs/generate.py [FOLDER]

The build of the pages runs this first. Nothing in the folder is typed by hand and nothing of it is
kept in the repository.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

from ringcoll.config import DEFAULTS, OPTIONS, SETTINGS, Config, Settings
from ringcoll.options import KINDS

HERE = Path(__file__).parent


def main(folder: Path) -> None:
    """Write everything into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "options.md").write_text(options(), encoding="utf-8")


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
