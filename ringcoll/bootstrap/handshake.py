"""The two ends of a new connection prove to each other that they are ranks of one world.

The caller sends its rank, the other answers; each proves on bytes that the other has chosen that
it has the key, and the caller gets an acknowledgement. Strangers may connect too, and send nothing
or slowly: many connections are served at once, each for a limited time.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ringcoll.bootstrap.contract import named
from ringcoll.bootstrap.frames import exactly
from ringcoll.errors import DeadlineError
from ringcoll.host.fd_passing import credentials

PATIENCE = 5.0
"""Seconds for one attempt of a caller, and for one to prove itself."""

_NONCE = 16
_PROOF = 32
_CALL = struct.Struct(f"<I{_NONCE}s")  # the caller's rank, the nonce for the other's proof
_ANSWER = struct.Struct(f"<{_PROOF}s{_NONCE}s")  # its proof, the nonce for the caller's
_ACCEPTED = b"!"  # to a caller that has proven its rank
INTERVAL = 0.5
"""Seconds between checks for connections that take too long."""
_CROWD = 64  # strangers at once; one more, and the first of them is closed
_SHORTAGE = 0.01  # seconds until the next attempt where no descriptor was left


class KeyMismatch(ConnectionError):
    """The process at an address has another key than the caller."""


def prove(connection: socket.socket, key: bytes, rank: int, peer: int, until: float) -> None:
    """The caller's end: ``rank`` calls ``peer``; all ranks have the key, and nobody else."""
    nonce = os.urandom(_NONCE)
    connection.sendall(_CALL.pack(rank, nonce), socket.MSG_NOSIGNAL)
    proof, challenge = _ANSWER.unpack(exactly(connection, _ANSWER.size, until))
    if not hmac.compare_digest(proof, _proof(key, b"called", nonce, rank, peer)):
        raise KeyMismatch("the answer is not from a rank of this program")
    connection.sendall(_proof(key, b"caller", challenge, rank, peer), socket.MSG_NOSIGNAL)
    exactly(connection, len(_ACCEPTED), until)


@dataclass(slots=True)
class _Pending:
    """A connection whose caller has not yet proven its rank."""

    connection: socket.socket
    until: float
    received: bytearray = field(default_factory=bytearray)
    rank: int = -1
    nonce: bytes = b""

    def read(self, key: bytes, called: int, legal: Callable[[int], bool]) -> bool:
        """Read and answer; whether the caller has now proven a rank that is ``legal``."""
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
            if not legal(self.rank) or not hmac.compare_digest(received, own):
                raise ConnectionError("the caller is no rank of this program")
            self.connection.sendall(_ACCEPTED, socket.MSG_NOSIGNAL)
            return True
        self.rank, challenge = _CALL.unpack(received)
        self.nonce = os.urandom(_NONCE)
        own = _proof(key, b"called", challenge, self.rank, called)
        self.connection.sendall(_ANSWER.pack(own, self.nonce), socket.MSG_NOSIGNAL)
        return False


class Callers:
    """The callers of a listener that have not yet proven their ranks; served with a selector.

    ``legal`` are the ranks that may call. At most ``expected`` and :data:`_CROWD` callers are
    served at once: strangers neither delay a rank nor use up the descriptors of this process.
    """

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        key: bytes,
        called: int,
        legal: Callable[[int], bool] = lambda rank: True,
        expected: int = 0,
    ) -> None:
        self._listener, self._selector = listener, selector
        self._key, self._called, self._legal = key, called, legal
        self._most = _CROWD + expected
        self._pending: dict[int, _Pending] = {}
        self.lacking: OSError | None = None  # why the last caller could not be taken
        self.refused = False  # whether a caller left, or was sent away, without the proof
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)

    def serve(self, number: int) -> tuple[int, socket.socket] | None:
        """Serve a readable descriptor; a caller that has proven its rank, and its connection."""
        try:
            if number == self._listener.fileno():
                self._admit()
            elif number in self._pending:
                call = self._pending[number]
                if call.read(self._key, self._called, self._legal):
                    return call.rank, self._dismiss(number)
        except BlockingIOError:
            pass
        except OSError as error:
            if number in self._pending:
                self.refused = self.refused or bool(self._pending[number].nonce)
                self._dismiss(number).close()
            else:  # no descriptor is left: the oldest call gives up its own
                self.lacking = error
                self.expire(1)
                time.sleep(_SHORTAGE)
        return None

    def expire(self, most: int | None = None) -> bool:
        """Close the connections that have taken too long, or the ``most`` oldest; whether any wait.

        Call it every :data:`INTERVAL` seconds while some do.
        """
        now = time.monotonic()
        late = [number for number, call in self._pending.items() if call.until <= now]
        for number in late if most is None else list(self._pending)[:most]:
            self._dismiss(number).close()
        return bool(self._pending)

    def close(self) -> None:
        """Close the listener and all that wait there."""
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            self._listener.close()
        self.expire(len(self._pending))

    def forked(self) -> None:
        """Close the descriptors of a forked child; the selector is its parent's."""
        self._listener.close()
        for call in self._pending.values():
            call.connection.close()

    def _admit(self) -> None:
        connection, _ = self._listener.accept()
        self.lacking = None
        if connection.family == socket.AF_UNIX and credentials(connection)[1] != os.geteuid():
            connection.close()
            return
        connection.setblocking(False)
        if len(self._pending) >= self._most:
            self.expire(1)
        self._pending[connection.fileno()] = _Pending(connection, time.monotonic() + PATIENCE)
        self._selector.register(connection, selectors.EVENT_READ)

    def _dismiss(self, number: int) -> socket.socket:
        self._selector.unregister(number)
        return self._pending.pop(number).connection


def answer(
    listener: socket.socket, key: bytes, rank: int, callers: set[int], deadline: float
) -> list[tuple[int, socket.socket]]:
    """Accept the connections of ``callers`` and close all others, which delay nobody."""
    taken: list[tuple[int, socket.socket]] = []
    missing = set(callers)
    with selectors.DefaultSelector() as selector:
        pending = Callers(listener, selector, key, rank, missing.__contains__, len(missing))
        try:
            while missing:
                now = time.monotonic()
                if now >= deadline:
                    raise DeadlineError(
                        f"init: rank {rank} waited for {named(sorted(missing))} to connect"
                    )
                pending.expire()
                for event, _ in selector.select(min(deadline - now, INTERVAL)):
                    proven = pending.serve(event.fd)
                    if proven is not None:
                        taken.append(proven)
                        missing.discard(proven[0])
        except BaseException:
            for _, connection in taken:
                connection.close()
            raise
        finally:
            pending.close()
    return taken


def _proof(key: bytes, side: bytes, nonce: bytes, caller: int, called: int) -> bytes:
    text = side + nonce + struct.pack("<II", caller, called)
    return hmac.new(key, text, hashlib.sha256).digest()
