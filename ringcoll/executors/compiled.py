"""The compiled parts of the package, where they have been built."""

from __future__ import annotations

import importlib
from typing import Any

from ringcoll.errors import MachineError


def load(name: str, interface: int) -> Any | None:
    """A compiled part; None where there is none, or that of other sources than who asks."""
    try:  # it is built where the package is installed, if there is a C compiler
        found = importlib.import_module(name)
    except ImportError:
        return None
    return found if interface == found.INTERFACE else None


def is_wanted(setting: bool | None, part: Any | None) -> bool:
    """Whether the setting ``compiled`` asks for a part; None: where it has been built.

    Raises:
        MachineError: it is to be used, and has not been built.

    """
    if setting and part is None:
        raise MachineError(
            "init: compiled=True, but the package has no compiled part for this Python: install it "
            "anew where there is a C compiler, or leave compiled out"
        )
    return part is not None and setting is not False
