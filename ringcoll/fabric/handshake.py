"""The two ends of a new connection prove to each other that they are ranks of one world.

The caller sends its rank, the other answers; each proves on bytes that the other has chosen that
it has the key, and the caller gets an acknowledgement. Strangers may connect too, and send nothing
or slowly: many connections are served at once, each for a limited time.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import selectors
import socket
import struct
import time
from dataclasses import dataclass, field

from ringcoll.bootstrap.contract import named
from ringcoll.bootstrap.frames import exactly
from ringcoll.errors import DeadlineError

PATIENCE = 5.0
"""Seconds for one attempt of a caller, and for one to prove itself."""

_NONCE = 16
_PROOF = 32
_CALL = struct.Struct(f"<I{_NONCE}s")  # the caller's rank, the nonce for the other's proof
_ANSWER = struct.Struct(f"<{_PROOF}s{_NONCE}s")  # its proof, the nonce for the caller's
_ACCEPTED = b"!"  # to a caller that has proven its rank
_INTERVAL = 0.5  # seconds between checks for connections that take too long
_CROWD = 64  # strangers at once; one more, and the first of them is closed


def prove(connection: socket.socket, key: bytes, rank: int, peer: int, until: float) -> None:
    """The caller's end: ``rank`` calls ``peer``; all ranks have the key, and nobody else."""
    nonce = secrets.token_bytes(_NONCE)
    connection.sendall(_CALL.pack(rank, nonce))
    proof, challenge = _ANSWER.unpack(exactly(connection, _ANSWER.size, until))
    if not hmac.compare_digest(proof, _proof(key, b"called", nonce, rank, peer)):
        raise ConnectionError("the answer is not from a rank of this program")
    connection.sendall(_proof(key, b"caller", challenge, rank, peer))
    exactly(connection, len(_ACCEPTED), until)


@dataclass(slots=True)
class _Pending:
    """A connection whose caller has not yet proven its rank."""

    connection: socket.socket
    until: float
    received: bytearray = field(default_factory=bytearray)
    rank: int = -1
    nonce: bytes = b""

    def read(self, key: bytes, called: int, missing: set[int]) -> bool:
        """Read and answer; whether the caller is now proven to be one of ``missing``."""
        wanted = _PROOF if self.nonce else _CALL.size
        part = self.connection.recv(wanted - len(self.received))
        self.received += part
        if not part:
            raise ConnectionError("the connection was closed")
        if len(self.received) < wanted:
            return False
        received = bytes(self.received)
        self.received.clear()
        if self.nonce:
            own = _proof(key, b"caller", self.nonce, self.rank, called)
            if self.rank not in missing or not hmac.compare_digest(received, own):
                raise ConnectionError("the caller is no rank of this program")
            self.connection.sendall(_ACCEPTED)
            return True
        self.rank, challenge = _CALL.unpack(received)
        self.nonce = secrets.token_bytes(_NONCE)
        own = _proof(key, b"called", challenge, self.rank, called)
        self.connection.sendall(_ANSWER.pack(own, self.nonce))
        return False


def answer(
    listener: socket.socket, key: bytes, rank: int, callers: set[int], deadline: float
) -> list[tuple[int, socket.socket]]:
    """Accept the connections of ``callers``, and close all others, which delay nobody."""
    taken: list[tuple[int, socket.socket]] = []
    pending: dict[int, _Pending] = {}
    try:
        with selectors.DefaultSelector() as selector:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
            _take(listener, selector, pending, taken, key, rank, set(callers), deadline)
    except BaseException:
        for _, connection in taken:
            connection.close()
        raise
    finally:
        for call in pending.values():
            call.connection.close()
    return taken


def _take(
    listener: socket.socket,
    selector: selectors.BaseSelector,
    pending: dict[int, _Pending],
    taken: list[tuple[int, socket.socket]],
    key: bytes,
    rank: int,
    missing: set[int],
    deadline: float,
) -> None:
    """Fill ``taken`` until nobody is missing."""
    most = _CROWD + len(missing)

    def dismiss(number: int) -> socket.socket:
        selector.unregister(number)
        return pending.pop(number).connection

    def admit() -> None:
        connection, _ = listener.accept()
        connection.setblocking(False)
        if len(pending) >= most:
            dismiss(next(iter(pending))).close()
        pending[connection.fileno()] = _Pending(connection, time.monotonic() + PATIENCE)
        selector.register(connection, selectors.EVENT_READ)

    def serve(number: int) -> None:
        """Read one connection, or accept from the listener."""
        try:
            if number == listener.fileno():
                admit()
            elif number in pending and pending[number].read(key, rank, missing):
                caller = pending[number].rank
                missing.discard(caller)
                taken.append((caller, dismiss(number)))
        except OSError as error:
            if number in pending and not isinstance(error, BlockingIOError):
                dismiss(number).close()

    while missing:
        now = time.monotonic()
        if now >= deadline:
            raise DeadlineError(f"init: rank {rank} waited for {named(sorted(missing))} to connect")
        for number in [number for number, call in pending.items() if call.until <= now]:
            dismiss(number).close()
        for event, _ in selector.select(min(deadline - now, _INTERVAL)):
            serve(event.fd)


def _proof(key: bytes, side: bytes, nonce: bytes, caller: int, called: int) -> bytes:
    text = side + nonce + struct.pack("<II", caller, called)
    return hmac.new(key, text, hashlib.sha256).digest()
