"""Symmetric memory as an array of the library that the caller names, without a copy."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from ringcoll.dtypes import DType
from ringcoll.errors import ArgumentError, ArgumentTypeError, MachineError

_LIBRARIES = ("numpy", "cupy", "torch")


def library_of(like: object, row: DType, device: str, where: str) -> Callable[[Any], Any]:
    """The conversion of a numpy or CuPy array on ``device`` to the library that ``like`` names."""
    own = "numpy" if device == "cpu" else "cupy"
    if like is None or like == own:
        return _itself
    if not isinstance(like, str):
        raise ArgumentTypeError(f"{where}: like={like!r}, wanted one of {', '.join(_LIBRARIES)}")
    if like == "torch":
        torch = _torch(where)
        kind = getattr(torch, row.name, None)
        if kind is None:
            raise ArgumentTypeError(f"{where}: torch {torch.__version__} has no {row}")
        return lambda array: _tensor(torch, kind, array, device)
    if like not in _LIBRARIES:
        raise ArgumentError(f"{where}: like={like!r}, wanted one of {', '.join(_LIBRARIES)}")
    other = "cpu" if like == "numpy" else "cuda"
    raise ArgumentError(
        f"{where}: like={like!r}, but this rank's arrays are on {device}: pass like={own!r} or "
        f"like='torch', or make the communicator with device={other!r}"
    )


def _itself(array: Any) -> Any:
    return array


def _torch(where: str) -> ModuleType:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise MachineError(
            f"{where}: like='torch' needs torch, which cannot be imported ({error}); "
            "pip install torch"
        ) from error


def _tensor(torch: Any, kind: Any, array: Any, device: str) -> Any:
    """A tensor of the array's memory, which keeps the array alive.

    It is viewed as bytes on the way: the exchange protocols have no name for bfloat16.
    """
    if not array.size:
        return torch.empty(array.shape, dtype=kind, device=device)
    flat = array.reshape(-1).view(np.uint8)
    found = torch.from_numpy(flat) if device == "cpu" else torch.from_dlpack(flat)
    return found.view(kind).reshape(array.shape)
