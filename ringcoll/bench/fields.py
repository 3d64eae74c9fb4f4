"""Fields of JSON files that anybody may have written: a wrong type is an error naming the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ringcoll.errors import ArgumentError

_MOST_BYTES = 16 << 20
_LONGEST_TEXT = 400


class Fields:
    """A JSON object whose fields are read with their types.

    Args:
        value: what the file has there.
        where: the file and the field, for errors.

    """

    def __init__(self, value: object, where: str) -> None:
        self.where = where
        self.value: Mapping[str, Any] = value if isinstance(value, dict) else {}
        if not isinstance(value, dict):
            self._refuse("", value, "an object")

    def __contains__(self, key: object) -> bool:
        return key in self.value

    def number(self, key: str, *, least: float = 1e-12) -> float:
        """A finite number, not below ``least`` nor above 1e18."""
        found: Any = self.value.get(key)
        kind = isinstance(found, (int, float)) and not isinstance(found, bool)
        if not kind or not least <= found <= 1e18:
            self._refuse(key, found, f"a number from {least:g} to 1e18")
        return float(found)

    def whole(self, key: str, *, least: int = 0) -> int:
        """A whole number."""
        found = self.number(key, least=least)
        if found != int(found):
            self._refuse(key, found, "a whole number")
        return int(found)

    def text(self, key: str, default: str | None = None) -> str:
        """A text, without control characters and without its end where it is long."""
        found = self.value.get(key, default)
        if not isinstance(found, str):
            self._refuse(key, found, "a text")
        return printable(found)

    def objects(self, key: str) -> list[Fields]:
        """A list of objects."""
        found = self.value.get(key)
        if not isinstance(found, list):
            self._refuse(key, found, "a list")
        return [Fields(one, f"{self.where}: {key}[{at}]") for at, one in enumerate(found)]

    def numbers(self, key: str) -> list[float]:
        """A list of numbers above 0, or one such number."""
        found = self.value.get(key)
        if not isinstance(found, list) or not found:
            return [self.number(key)]
        parts = Fields({str(at): one for at, one in enumerate(found)}, f"{self.where}: {key}")
        return [parts.number(at) for at in parts.value]

    def fields(self, key: str) -> Fields:
        """An object; an empty one where the key is missing."""
        return Fields(self.value.get(key, {}), f"{self.where}: {key}")

    def _refuse(self, key: str, found: object, wanted: str) -> NoReturn:
        shown = "nothing" if found is None else printable(repr(found))[:40]
        name = f"{self.where}: {printable(key)}" if key else self.where
        raise ArgumentError(f"{name} is {shown}, not {wanted}: measure again or remove the file")


def printable(text: str) -> str:
    """Text in one line without control characters, cut where it is long."""
    line = "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
    return line if len(line) <= _LONGEST_TEXT else f"{line[: _LONGEST_TEXT - 1]}…"


def read_folder(folder: Path) -> dict[str, Fields]:
    """The records of a folder, by the names of their files.

    Raises:
        ArgumentError: there is no such folder, it has no records, or a file is no JSON object.

    """
    if not folder.is_dir():
        raise ArgumentError(f"{folder} is no folder: name one with records of benchmarks")
    found = {path.name: read_record(path) for path in sorted(folder.glob("*.json"))}
    if not found:
        raise ArgumentError(f"{folder} has no records: `ringcoll bench --json FILE` writes one")
    return found


def read_record(path: Path) -> Fields:
    """One record; ArgumentError naming the file if it cannot be read or is no JSON object."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ArgumentError(f"{path}: more than {_MOST_BYTES >> 20} MiB, too long for a record")
        return Fields(json.loads(content), str(path))
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path}: no JSON ({printable(str(error))}): measure again") from None
