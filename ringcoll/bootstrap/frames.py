"""What bootstraps over sockets share: reading a number of bytes, and framing many ranks' bytes."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence

from ringcoll.errors import MachineError
from ringcoll.host.limits import waitable

_WORD = struct.Struct("<Q")


def left(deadline: float) -> float | None:
    """Seconds to a deadline of ``time.monotonic``, as a socket takes them; None for ever."""
    return waitable(max(1e-3, deadline - time.monotonic()))


def exactly(link: socket.socket, length: int, deadline: float) -> bytes:
    """Read ``length`` bytes; OSError if the socket is closed before or the deadline has passed."""
    parts = bytearray()
    while len(parts) < length:
        link.settimeout(left(deadline))
        part = link.recv(min(length - len(parts), 1 << 20))
        if not part:
            raise ConnectionError("end of file")
        parts += part
    return bytes(parts)


def joined(parts: Sequence[bytes]) -> bytes:
    """Every rank's bytes, each behind its length."""
    return b"".join(_WORD.pack(len(part)) + part for part in parts)


def split(answer: bytes, nranks: int, who: str) -> list[bytes]:
    """Undo :func:`joined`; ``who`` sent it, for the message."""
    parts: list[bytes] = []
    start = 0
    for _ in range(nranks):
        begin = start + _WORD.size
        length = _WORD.unpack_from(answer, start)[0] if len(answer) >= begin else 0
        if len(answer) < begin + length:
            raise MachineError(f"{who} sent a truncated answer")
        parts.append(answer[begin : begin + length])
        start = begin + length
    return parts
