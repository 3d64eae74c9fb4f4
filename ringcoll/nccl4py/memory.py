"""Memory by nccl4py's names: plain memory of the array libraries."""

from __future__ import annotations

import contextlib
import importlib
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from ringcoll.cuda.device import available
from ringcoll.errors import ArgumentError


def mem_alloc(size: int, device: Any = None) -> Any:
    """Bytes of a GPU as an array of CuPy's, or of the host where there is no GPU.

    Args:
        size: how many.
        device: the GPU's number, or an object with ``device_id``; None: the current one.

    """
    if available() is not None:
        return np.empty(size, np.uint8)
    import cupy

    number = getattr(device, "device_id", device)
    with contextlib.nullcontext() if number is None else cupy.cuda.Device(int(number)):
        return cupy.empty(size, np.uint8)


def mem_free(buf: Any) -> None:
    """Nothing: the array's memory is freed with its last reference."""


def _array(shape: int | tuple[int, ...], dtype: Any = float, order: Literal["C", "F"] = "C") -> Any:
    """An array of CuPy's, or of numpy's where there is no GPU."""
    xp: Any = np if available() is not None else importlib.import_module("cupy")
    return xp.empty(shape, dtype, order)


def _tensor(*size: Any, dtype: Any = None, device: Any = None, morder: str = "C") -> Any:
    """A tensor on a GPU, or of the host where there is no GPU."""
    library: Any = importlib.import_module("torch")
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
    if morder not in ("C", "F"):
        raise ArgumentError(f"morder={morder!r}: wanted 'C' or 'F'")
    if device is None:
        device = "cuda" if available() is None else "cpu"
    if morder == "C":
        return library.empty(shape, dtype=dtype, device=device)
    made = library.empty(shape[::-1], dtype=dtype, device=device)
    return made.permute(*reversed(range(len(shape))))


cupy = SimpleNamespace(empty=_array)
"""nccl4py's ``nccl.core.cupy``."""

torch = SimpleNamespace(empty=_tensor)
"""nccl4py's ``nccl.core.torch``."""
