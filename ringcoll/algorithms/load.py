"""Algorithms by what a person types: a name of ours, ``FILE.py:FUNCTION``, ``MODULE:FUNCTION``.

Loading a function runs its file. So only words of this process's own command line come here: never
what another rank, a cache or an environment variable says.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from ringcoll.algorithms import ALGORITHMS, Algorithm, Builder, unknown_algorithm
from ringcoll.errors import ArgumentError, message_of
from ringcoll.plan import Plan


def find(collective: str, name: str) -> Algorithm:
    """An algorithm of a collective, as :func:`ringcoll.algorithms.build` takes it.

    Args:
        collective: a key of :data:`ringcoll.algorithms.ALGORITHMS`.
        name: one of ours, which is returned as it is, or what :func:`load` takes.

    Raises:
        ArgumentError: there is no such algorithm; the message names those that there are.

    """
    if is_own(name):
        return load(name)
    if name not in ALGORITHMS[collective]:
        raise unknown_algorithm(collective, name)
    return name


def find_all(collective: str, names: str) -> tuple[Algorithm, ...]:
    """The algorithms that a list such as ``ring,star.py:star`` names, as :func:`find` does."""
    return tuple(find(collective, name.strip()) for name in names.split(","))


def is_own(name: str) -> bool:
    """Whether a name is for :func:`load`: it has a colon, or is a file without its function."""
    return ":" in name or _is_file(name)


def load(text: str) -> Builder:
    """A function that a person has written, from ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``.

    The function takes ``nranks`` (and ``root``, ``rings`` or ``nodes`` by keyword, if it names
    them) and returns a Plan. The builder that is returned can be sent to another process, which
    loads the file again.

    >>> from ringcoll.algorithms.load import load
    >>> load("ringcoll.algorithms.ring:all_reduce")(4).collective.name
    'all_reduce'

    Raises:
        ArgumentError: there is no such file, module or function, or it raised while it was loaded.
            A call of the builder raises it too, if the function raises or returns no Plan.

    """
    place, _, name = text.rpartition(":") if ":" in text else (text, "", "")
    if not place or not (name or _is_file(place)):
        raise ArgumentError(f"algorithm {text!r}: write FILE.py:FUNCTION or MODULE:FUNCTION")
    module = _run_file(text, place) if _is_file(place) else _import(text, place)
    function = getattr(module, name, None) if name else None
    if not callable(function):
        made = [n for n, v in vars(module).items() if _is_own_function(module, v)]
        functions = f"its functions are {', '.join(made)}" if made else "it has no function"
        if not name:
            form = f"{place}:{made[0] if made else 'FUNCTION'}"
            raise ArgumentError(
                f"algorithm {text!r}: name the function too, as {form}; {functions}"
            )
        raise ArgumentError(f"algorithm {text!r}: {place} has no function {name}; {functions}")
    return _Loaded(text, function)


class _Loaded:
    """A person's function as a builder, whose failures name the function and the remedy."""

    def __init__(self, text: str, function: Builder) -> None:
        functools.update_wrapper(self, function)
        place, _, name = text.rpartition(":")
        # With the colon that no name of ours has: nobody takes it for the built-in one.
        self.__qualname__ = f"{_last(place)}:{name}"
        self.text, self.function = text, function

    def __call__(self, nranks: int, **options: Any) -> Plan:
        try:
            plan = self.function(nranks, **options)
        except (Exception, SystemExit) as error:  # the command would end as if it had succeeded
            given = ", ".join(
                [str(nranks), *(f"{key}={value!r}" for key, value in options.items())]
            )
            raise ArgumentError(
                f"algorithm {self.text!r}: {self.function.__name__}({given}) raised "
                f"{_reason(error)}; mend it there, or try another number of ranks"
            ) from error
        if not isinstance(plan, Plan):
            raise ArgumentError(
                f"algorithm {self.text!r}: {self.function.__name__}({nranks}) returned a "
                f"{type(plan).__name__}; it must return a ringcoll.Plan"
            )
        return plan

    def __reduce__(self) -> tuple[Any, ...]:
        return load, (self.text,)

    def __repr__(self) -> str:
        return f"<algorithm {self.text}>"


def _last(place: str) -> str:
    """``star.py`` of ``/home/me/star.py``, ``star`` of ``mine.star``."""
    return Path(place).name if _is_file(place) else place.rpartition(".")[2]


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place


def _run_file(text: str, place: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ArgumentError(f"algorithm {text!r}: there is no file {place} in {Path.cwd()}")
    # One module for a file, however many of its functions are named.
    name = f"{path.stem}_{hashlib.blake2b(os.fsencode(path), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ArgumentError(f"algorithm {text!r}: {place} is no Python file; name it FILE.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # At the end: what the file imports from its folder hides nothing that is installed.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ArgumentError(
            f"algorithm {text!r}: {place} raised {_reason(error)} while it was loaded; what only a "
            f"program needs belongs under `if __name__ == '__main__':`"
        ) from error
    return module


def _import(text: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise ArgumentError(f"algorithm {text!r}: {place} raised {_reason(error)}") from error
        file = f"{place.replace('.', '/')}.py"
        raise ArgumentError(
            f"algorithm {text!r}: there is no module {error.name}; install it or put its folder on "
            f"PYTHONPATH, or name a file: {file}:{text.rpartition(':')[2]}"
        ) from None
    except (Exception, SystemExit) as error:
        raise ArgumentError(f"algorithm {text!r}: {place} raised {_reason(error)}") from error


def _is_own_function(module: ModuleType, value: Any) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _reason(error: BaseException) -> str:
    """The error and the line that raised it."""
    text = message_of(error)
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError):
        return said  # its text names file and line
    frames = traceback.extract_tb(error.__traceback__)
    return f"{said} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
