"""Connections between processes of different nodes: frames in order, and detection of a death.

MPI carries the data between nodes, but a process that dies leaves the others waiting in MPI for
ever: MPI has no deadline. So each rank has one TCP connection to each rank of another node. A
process that ends closes its connections, whatever has killed it, and the kernel's own keep-alive
finds a host that does not answer any more; no thread and no timer of ours is needed.

A frame is a kind, the number of the fabric that it belongs to, a length, and bytes. Several
fabrics of the same processes share their connections.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum

_HEADER = struct.Struct("<BQI")  # kind, fabric, length of what follows
_LONGEST = 1 << 28  # bytes of a frame
_READ = 1 << 16
_IDLE, _EVERY, _TIMES = 4, 2, 3  # seconds before a probe, between probes, probes without answer


class Frame(IntEnum):
    """What a frame holds: JOIN and WITHDRAW a token of a rendezvous, STATE a rank's state."""

    GATHER = 1
    STATE = 2
    JOIN = 3
    WITHDRAW = 4
    EXITING = 5


@dataclass(slots=True)
class Inbox:
    """What a peer has sent to one fabric and nobody has read yet."""

    gathers: deque[bytes] = field(default_factory=deque)
    state: bytes | None = None
    left: bytes | None = None  # a state that was sent after it
    since: int = 0
    tokens: dict[bytes, bytes] = field(default_factory=dict)
    over: bool = False  # nobody reads it any more


class Link:
    """This process's connection to a proven one, ``name`` in messages, of another node."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _EVERY)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _TIMES)
        # The same for what was sent and is never acknowledged.
        unanswered = 1000 * (_IDLE + _EVERY * _TIMES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unanswered)
        self.name = name
        self.broken = ""
        self.exiting = False
        self._socket = connection
        self._inboxes: dict[int, Inbox] = {}
        self._received = bytearray()
        self._unsent = bytearray()
        self._outbox: deque[bytes] = deque()
        self._over: deque[int] = deque()  # fabrics to forget
        self._lock = threading.Lock()

    @property
    def dead(self) -> bool:
        """Whether the peer is gone without having announced its exit."""
        return bool(self.broken) and not self.exiting

    def inbox(self, fabric: int) -> Inbox:
        """What has come for a fabric; :meth:`pump` fills it, in whichever thread."""
        found = self._inboxes.get(fabric)
        return self._inboxes.setdefault(fabric, Inbox()) if found is None else found

    def forget(self, fabric: int) -> None:
        """Drop what has come for a fabric that has ended, and what will until the peer ends it.

        Waits for no lock, as :meth:`send`.
        """
        self._over.append(fabric)
        self._send_rest()

    def send(self, kind: Frame, fabric: int, payload: bytes = b"") -> None:
        """Send a frame; what does not fit the kernel's buffer goes with a later :meth:`pump`.

        Waits for no lock: a finalizer may run here while its own thread holds it.
        """
        self._outbox.append(_HEADER.pack(kind, fabric, len(payload)) + payload)
        self._send_rest()

    def pump(self) -> None:
        """Send what is left and read what has come; waits for nothing."""
        # Another thread that does it meanwhile does it for this one too.
        if self._lock.acquire(blocking=False):
            try:
                self._flush()
                self._read()
            finally:
                self._lock.release()
            self._send_rest()

    def _send_rest(self) -> None:
        """Send what was queued, and forget what has ended, while the lock was held."""
        while (self._outbox or self._over) and self._lock.acquire(blocking=False):
            try:
                self._flush()
            finally:
                self._lock.release()

    def _flush(self) -> None:
        while self._over:
            fabric = self._over.popleft()
            if self.inbox(fabric).state is None and not self.broken:
                self._inboxes[fabric] = Inbox(over=True)
            else:
                del self._inboxes[fabric]
        while self._outbox:
            self._unsent += self._outbox.popleft()
        while self._unsent and not self.broken:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError as error:
                self._read()  # the peer's last frames, perhaps that it leaves
                self.broken = self.broken or str(error)
                return
            del self._unsent[:sent]

    def _read(self) -> None:
        while not self.broken:
            try:
                part = self._socket.recv(_READ)
            except BlockingIOError:
                break
            except OSError as error:
                self.broken = str(error)
                break
            if not part:
                self.broken = "its connection was closed"
            self._received += part
        at = 0
        while len(self._received) - at >= _HEADER.size:
            kind, fabric, length = _HEADER.unpack_from(self._received, at)
            if length > _LONGEST or kind not in Frame._value2member_map_:
                self.broken = f"it sent an invalid frame of kind {kind} and {length} bytes"
                break
            if len(self._received) - at < _HEADER.size + length:
                break
            start = at + _HEADER.size
            self._take(Frame(kind), fabric, bytes(self._received[start : start + length]))
            at = start + length
        del self._received[:at]

    def _take(self, kind: Frame, fabric: int, payload: bytes) -> None:
        if kind is Frame.EXITING:
            self.exiting = True
            return
        inbox = self.inbox(fabric)
        if inbox.over:
            if kind is Frame.STATE:  # the peer's last frame
                del self._inboxes[fabric]
        elif kind is Frame.GATHER:
            inbox.gathers.append(payload)
        elif kind is Frame.STATE and inbox.state is None:
            inbox.state, inbox.since = payload, time.monotonic_ns()
        elif kind is Frame.STATE:
            inbox.left = payload
        elif kind in (Frame.JOIN, Frame.WITHDRAW):
            members, _, token = payload.partition(b" ")
            if kind is Frame.JOIN:
                inbox.tokens[members] = token
            elif inbox.tokens.get(members) == token:
                del inbox.tokens[members]

    def __del__(self) -> None:
        self._socket.close()

    def close(self) -> None:
        """Close the connection; in a forked child that leaves the parent's alone."""
        self._socket.close()
        self.broken = self.broken or "closed here"
