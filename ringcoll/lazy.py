"""Names of a package that are loaded when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any


def attributes(
    package: str, homes: Mapping[str, str], modules: Mapping[str, str] = MappingProxyType({})
) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package.

    Args:
        package: its name.
        homes: the module that has each of its names.
        modules: of its modules that are used without an import, what is imported for them.

    """

    def find(name: str) -> Any:
        if name in modules:
            importlib.import_module(modules[name])
            return sys.modules[f"{package}.{name}"]
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
