"""CUDA graphs that are being captured: which of them a stream is part of, and leaving them whole.

A capture only records. It may take in what is part of it alone, and whatever waits for a stream of
it ends it by an error. In a thread of the usual capture mode so does every wait for the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from ringcoll.cuda.device import runtime
from ringcoll.cuda.driver import call

__all__ = ["capture_of", "spared", "untouchable"]

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_IMPLICIT = 906  # cudaErrorStreamCaptureImplicit


def capture_of(stream: int) -> int:
    """The number that a capture has in this process, by a stream of it; 0: it is part of none.

    Raises:
        RuntimeError: it cannot be told: the stream is gone, or the default one beside a blocking
            one that is being captured, or something has spoilt its capture.

    """
    if not runtime().streamIsCapturing(stream):
        return 0
    status, number = ctypes.c_int(), ctypes.c_uint64()
    answers = ctypes.byref(status), ctypes.byref(number)
    call("cuStreamGetCaptureInfo_v2", stream, *answers, None, None, None)
    return number.value


def untouchable(stream: int) -> bool:
    """Whether to wait for a stream would end a capture."""
    cuda = runtime()
    try:
        return bool(cuda.streamIsCapturing(stream))
    except cuda.CUDARuntimeError as error:  # else its owner has destroyed it
        return bool(error.status == _IMPLICIT)
    except RuntimeError:  # CuPy's word for a capture that something has spoilt
        return True


@contextmanager
def spared() -> Iterator[None]:
    """Let this thread wait for streams and events that are part of no capture, during one."""
    mode = ctypes.c_int(_RELAXED)
    call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
