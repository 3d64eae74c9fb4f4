"""Which CUDA stream a call goes to: the one it was given, or its array library's current one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from ringcoll.errors import ArgumentError, ArgumentTypeError

__all__ = ["foreign_streams", "stream_of", "stream_pointer"]


def stream_pointer(
    stream: Any, like: Any = None, *, ordinal: int | None = None, where: str = "stream"
) -> int:
    """The handle of a stream alone, see :func:`stream_of`."""
    return stream_of(stream, like, ordinal=ordinal, where=where)[0]


def stream_of(
    stream: Any, like: Any = None, *, ordinal: int | None = None, where: str = "stream"
) -> tuple[int, object | None]:
    """The handle of a stream, 0 being the default one, and what keeps the stream alive.

    Args:
        stream: CuPy's, torch's or numba's stream, any object with ``__cuda_stream__``, the handle
            itself as an integer; None: the current stream of the library that made ``like``.
        like: a buffer of the call; None: CuPy's current stream.
        ordinal: the rank's device; None takes the current one.
        where: the call and the rank, for messages.

    Returns:
        The handle; the object that owns it, or None where the handle is all that is known: who
        gave it may destroy the stream as soon as the call has returned.

    Raises:
        ArgumentTypeError: no stream.
        ArgumentError: a stream of another device, or a negative handle.

    """
    if stream is None:
        return _current(like, ordinal)
    if isinstance(stream, (int, np.integer)) and not isinstance(stream, bool):
        if stream < 0:
            raise ArgumentError(f"{where}: stream={stream}, wanted a handle of at least 0")
        return int(stream), None
    _refuse_foreign(stream, ordinal, where)
    handle = _handle(stream)
    if handle is None:
        raise ArgumentTypeError(
            f"{where}: stream is a {type(stream).__name__}, wanted CuPy's, torch's or numba's "
            "stream, an object with __cuda_stream__, or the handle as an integer"
        )
    return handle, _owner(stream)


def foreign_streams() -> type | None:
    """CuPy's class for streams that others own and which it keeps not alive; None: none."""
    cupy = sys.modules.get("cupy")
    found: type | None = getattr(cupy.cuda, "ExternalStream", None) if cupy is not None else None
    return found


def _owner(stream: Any) -> object | None:
    """A stream, unless others own it and nobody here keeps it alive.

    Torch numbers its own streams, and for others' takes the handle; numba says so.
    """
    handle = getattr(stream, "cuda_stream", None)
    foreign = (
        type(stream) is foreign_streams()
        or (handle is not None and getattr(stream, "stream_id", None) == handle)
        or (type(stream).__module__.startswith("numba.") and getattr(stream, "external", False))
    )
    return None if foreign else stream


def _current(like: Any, ordinal: int | None) -> tuple[int, object | None]:
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(like, torch.Tensor):
        stream = torch.cuda.current_stream(ordinal)
        return int(stream.cuda_stream), _owner(stream)
    if like is not None and (cupy is None or not isinstance(like, cupy.ndarray)):
        # What numba and others say of the stream on which their data will be ready.
        said = getattr(like, "__cuda_array_interface__", None)
        ready = said.get("stream") if isinstance(said, Mapping) else None
        if ready is not None:
            return int(ready), None
    from cupy.cuda import get_current_stream

    stream = get_current_stream(-1 if ordinal is None else ordinal)
    return int(stream.ptr), _owner(stream)


def _handle(stream: Any) -> int | None:
    """By CuPy's attribute, torch's, the protocol, and numba's, whose handle is a ctypes object."""
    for name in ("ptr", "cuda_stream"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        said = protocol() if callable(protocol) else protocol
        if isinstance(said, tuple) and len(said) == 2 and isinstance(said[1], int):
            return said[1]
        return None
    handle = getattr(stream, "handle", None)
    value = getattr(handle, "value", handle)
    if type(stream).__module__.startswith("numba."):
        return 0 if value is None else int(value)
    return None


def _refuse_foreign(stream: Any, ordinal: int | None, where: str) -> None:
    """A stream of another device; CuPy's default and foreign ones belong to none (-1)."""
    if ordinal is None:
        return
    home = getattr(stream, "device_id", None)
    if home is None:
        home = getattr(getattr(stream, "device", None), "index", None)
    if isinstance(home, int) and home not in (-1, ordinal):
        raise ArgumentError(
            f"{where}: stream belongs to device {home}, and this rank is on device {ordinal}"
        )
