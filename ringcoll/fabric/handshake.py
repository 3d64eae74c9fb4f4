"""The two ends of a new connection prove to each other that they are ranks of one world.

The caller says who it claims to be, the other answers; each proves on bytes that the other has
chosen that it knows the key, and the caller hears that it is welcome. Strangers may call too, say
nothing, or say it slowly: many are heard at once, and each for a while only.
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

__all__ = ["PATIENCE", "answer", "prove"]

PATIENCE = 5.0
"""Seconds for one attempt of a caller, and for one to prove itself."""

_NONCE = 16
_PROOF = 32
_CALL = struct.Struct(f"<I{_NONCE}s")  # the caller's rank, what the other is to prove itself on
_ANSWER = struct.Struct(f"<{_PROOF}s{_NONCE}s")  # its proof, what the caller is to prove itself on
_WELCOME = b"!"  # to a caller that has proven itself
_LOOK = 0.5  # seconds between looks at who takes too long
_CROWD = 64  # strangers at once; one more, and the first of them goes


def prove(connection: socket.socket, key: bytes, rank: int, peer: int, until: float) -> None:
    """The caller's end.

    Args:
        connection: to who should be ``peer``.
        key: that all ranks know, and nobody else.
        rank: this one.
        peer: the rank that is called.
        until: value of ``time.monotonic()``.

    Raises:
        OSError: the other is somebody else, has gone, or says nothing.

    """
    nonce = secrets.token_bytes(_NONCE)
    connection.sendall(_CALL.pack(rank, nonce))
    proof, asked = _ANSWER.unpack(exactly(connection, _ANSWER.size, until))
    if not hmac.compare_digest(proof, _proof(key, b"called", nonce, rank, peer)):
        raise ConnectionError("somebody else answered")
    connection.sendall(_proof(key, b"caller", asked, rank, peer))
    exactly(connection, len(_WELCOME), until)


@dataclass(slots=True)
class _Guest:
    """Who has called and has not proven yet to be a rank."""

    connection: socket.socket
    until: float
    said: bytearray = field(default_factory=bytearray)
    rank: int = -1
    nonce: bytes = b""

    def hear(self, key: bytes, called: int, missing: set[int]) -> bool:
        """Read what has come, and answer it; whether it is now known to be one of ``missing``.

        Raises:
            OSError: it is none, or has gone.

        """
        wanted = _PROOF if self.nonce else _CALL.size
        part = self.connection.recv(wanted - len(self.said))
        self.said += part
        if not part:
            raise ConnectionError("the connection was closed")
        if len(self.said) < wanted:
            return False
        said = bytes(self.said)
        self.said.clear()
        if self.nonce:
            own = _proof(key, b"caller", self.nonce, self.rank, called)
            if self.rank not in missing or not hmac.compare_digest(said, own):
                raise ConnectionError("no rank of ours")
            self.connection.sendall(_WELCOME)
            return True
        self.rank, asked = _CALL.unpack(said)
        self.nonce = secrets.token_bytes(_NONCE)
        own = _proof(key, b"called", asked, self.rank, called)
        self.connection.sendall(_ANSWER.pack(own, self.nonce))
        return False


def answer(
    door: socket.socket, key: bytes, rank: int, callers: set[int], deadline: float
) -> list[tuple[int, socket.socket]]:
    """Take the calls of some ranks; whoever else calls is sent away, and holds up nobody.

    Args:
        door: a socket that listens.
        key: that all ranks know, and nobody else.
        rank: this one.
        callers: who is to call.
        deadline: value of ``time.monotonic()``; may be ``math.inf``.

    Returns:
        Each caller with its connection.

    Raises:
        DeadlineError: some have not called; they are named.

    """
    taken: list[tuple[int, socket.socket]] = []
    guests: dict[int, _Guest] = {}
    try:
        with selectors.DefaultSelector() as selector:
            door.setblocking(False)
            selector.register(door, selectors.EVENT_READ)
            _take(door, selector, guests, taken, key, rank, set(callers), deadline)
    except BaseException:
        for _, connection in taken:
            connection.close()
        raise
    finally:
        for guest in guests.values():
            guest.connection.close()
    return taken


def _take(
    door: socket.socket,
    selector: selectors.BaseSelector,
    guests: dict[int, _Guest],
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
        return guests.pop(number).connection

    def admit() -> None:
        connection, _ = door.accept()
        connection.setblocking(False)
        if len(guests) >= most:
            dismiss(next(iter(guests))).close()
        guests[connection.fileno()] = _Guest(connection, time.monotonic() + PATIENCE)
        selector.register(connection, selectors.EVENT_READ)

    def serve(number: int) -> None:
        """Hear a guest, or the door; whoever has gone since is nobody."""
        try:
            if number == door.fileno():
                admit()
            elif number in guests and guests[number].hear(key, rank, missing):
                caller = guests[number].rank
                missing.discard(caller)
                taken.append((caller, dismiss(number)))
        except OSError as error:
            if number in guests and not isinstance(error, BlockingIOError):
                dismiss(number).close()

    while missing:
        now = time.monotonic()
        if now >= deadline:
            raise DeadlineError(f"init: rank {rank} waited for {named(sorted(missing))} in vain")
        for number in [number for number, guest in guests.items() if guest.until <= now]:
            dismiss(number).close()
        for event, _ in selector.select(min(deadline - now, _LOOK)):
            serve(event.fd)


def _proof(key: bytes, side: bytes, nonce: bytes, caller: int, called: int) -> bytes:
    text = side + nonce + struct.pack("<II", caller, called)
    return hmac.new(key, text, hashlib.sha256).digest()
