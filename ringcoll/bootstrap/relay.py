"""The process in the middle of a bootstrap over sockets: it relays the ranks' exchanges.

Every rank has one connection to it, so that the end of a process shows as the end of a connection,
which the relay reports to the others at once. It runs in the process that has started the ranks,
or as a thread of one rank. A frame is a kind, a length and bytes.

A session begins with every rank's HELLO and ends with every rank's BYE, FAIL or end of file. A rank
that comes again after the first of these begins another session, as in its next ``init``. A rank
that comes late learns why the session has failed, unless a deadline was the reason, or its process
has begun since, as that of a program that is started again: then it begins another session.

The failure of a process without a valid rank ends the session in which ranks wait. Where none waits
it is kept for ranks that come soon, but not for the processes of a program that has met before; it
is dropped when that process itself comes again, with a valid rank.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from dataclasses import dataclass, field
from enum import Enum

from ringcoll.bootstrap.contract import Failure, named
from ringcoll.bootstrap.frames import joined
from ringcoll.bootstrap.handshake import INTERVAL, PATIENCE, Callers

FRAME = struct.Struct("<cQ")  # kind, length of what follows
RANK = struct.Struct("<I")
CALLED = 0xFFFFFFFF
"""The number by which callers know the relay."""
LONGEST = 1 << 30
"""Bytes of a frame."""
_FIRST = 1 << 12  # bytes of a rank's first frame
_MOST = 1 << 20  # ranks
_KEPT = 5.0  # seconds for ranks to come that a failure without a rank concerns
_HALT, _TURN = 0.5, 0.05  # seconds for a relay to send what it still has, and of one turn


class Kind(bytes, Enum):
    """What a frame is; the answer to a frame has its kind.

    HELLO: JSON of rank, nranks, the process and its age in seconds. GATHER: how many of the ranks
    exchange (0: all), these, and bytes. ABSENT: which of them have not come. FAIL: a
    :class:`Failure`, to and from the relay, without HELLO from a process that has no valid rank.
    BYE: this rank needs the others no more.
    """

    HELLO = b"H"
    GATHER = b"G"
    ABSENT = b"A"
    FAIL = b"F"
    BYE = b"B"


@dataclass(slots=True, eq=False)
class _Link:
    """A connection of a rank; ``fixed``: the rank that this process gave it."""

    connection: socket.socket
    fixed: int | None = None
    rank: int = -1
    name: str = ""
    until: float = math.inf  # when it must have joined
    session: _Session | None = None
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class _Session:
    nranks: int = 0  # as the first rank has said
    links: dict[int, _Link] = field(default_factory=dict)  # of all ranks that have come
    active: set[int] = field(default_factory=set)  # those that have not left
    rounds: dict[tuple[int, ...], dict[int, bytes]] = field(default_factory=dict)
    failure: Failure | None = None
    failed: float = math.inf  # when, by time.monotonic()
    since: float = -math.inf  # the failure concerns processes that have begun after this
    lapses: float = math.inf  # when the failure is dropped if no rank has come
    over: bool = False

    def concerns(self, begun: float, name: str = "") -> bool:
        """Whether a late rank must learn of the failure: when its process has begun, and which."""
        failure = self.failure
        if failure is None or failure.kind == "DeadlineError" or (name and name == failure.origin):
            return False
        kept = bool(self.links) or time.monotonic() < self.lapses
        return kept and self.since <= begun < self.failed


class Relay:
    """Relays for ``nranks`` ranks (0: the first rank says how many) that call a listener."""

    def __init__(
        self, listener: socket.socket | None = None, key: bytes = b"", nranks: int = 0
    ) -> None:
        self._nranks = nranks
        self._selector = selectors.DefaultSelector()
        self._links: dict[int, _Link] = {}
        self._gone: set[int] = set()  # ranks whose only connection has ended
        self._session = _Session(nranks)
        self._met = -math.inf  # when a session has last ended without a failure
        self._callers: Callers | None = None
        self._thread: threading.Thread | None = None
        self._halted, self._patience = False, _HALT
        if listener is not None:
            self._callers = Callers(listener, self._selector, key, CALLED, expected=nranks)
        _relays.add(self)

    def add(self, rank: int, connection: socket.socket) -> None:
        """Take the only connection that a rank will ever have."""
        self._add(_Link(connection, rank, rank, f"rank {rank}"))

    def start(self) -> None:
        """Relay on a thread of this process."""
        self._wake, woken = socket.socketpair()
        self._selector.register(woken, selectors.EVENT_READ)
        self._woken = woken
        self._thread = threading.Thread(target=self._run, name="ringcoll relay", daemon=True)
        self._thread.start()

    def halt(self, patience: float = _HALT) -> None:
        """End when all is sent; for a while late ranks are still told of one that has ended."""
        self._halted, self._patience = True, patience
        if self._thread is not None:
            with contextlib.suppress(OSError):
                self._wake.send(b"\0", socket.MSG_NOSIGNAL)
            self._thread.join(patience + _HALT)

    def lacking(self) -> OSError | None:
        """Why no rank that calls can be taken, where this process has no descriptor for it."""
        callers = self._callers
        return None if callers is None else callers.lacking

    def refused(self) -> bool:
        """Whether a caller had no proof of this relay's key."""
        return self._callers is not None and self._callers.refused

    def _run(self) -> None:
        try:
            while not self._halted:
                self.step(None)
            late = time.monotonic() + max(self._patience, _TURN)
            self.step(0.0)  # what this process's own rank has just sent
            while self._needed() and time.monotonic() < late:
                self.step(_TURN)
        finally:
            self.close()

    def _needed(self) -> bool:
        """Whether something is left to be sent, or a rank has yet to learn that another ended."""
        session = self._session
        missing = session.concerns(-math.inf) and len(session.links) < session.nranks
        return missing or any(link.unsent for link in self._links.values())

    def close(self) -> None:
        """Close all connections."""
        if self._callers is not None:
            self._callers.close()
        for link in self._links.values():
            link.connection.close()
        self._links.clear()
        if self._thread is not None:
            self._wake.close()
            self._woken.close()
        self._selector.close()

    def step(self, seconds: float | None) -> None:
        """Serve what comes within so many seconds."""
        if self._callers is not None and self._strangers():
            seconds = INTERVAL if seconds is None else min(seconds, INTERVAL)
        for event, mask in self._selector.select(seconds):
            link = self._links.get(event.fd)
            if link is None:
                proven = None if self._callers is None else self._callers.serve(event.fd)
                if proven is not None:
                    self._add(_Link(proven[1], until=time.monotonic() + PATIENCE))
            elif mask & selectors.EVENT_WRITE:
                self._flush(link)
            else:
                self._read(link)

    def _strangers(self) -> bool:
        """Close what takes too long to join; whether connections are left that have not joined."""
        now, waiting = (
            time.monotonic(),
            [link for link in self._links.values() if link.until < math.inf],
        )
        for link in waiting:
            if link.until <= now:
                self._close(link)
        pending = self._callers is not None and self._callers.expire()
        return pending or bool(waiting)

    def _add(self, link: _Link) -> None:
        link.connection.setblocking(False)
        self._links[link.connection.fileno()] = link
        self._selector.register(link.connection, selectors.EVENT_READ)

    def _read(self, link: _Link) -> None:
        try:
            part = link.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self._ended(link)
            return
        link.received += part
        while link.connection.fileno() >= 0 and len(link.received) >= FRAME.size:
            kind, length = FRAME.unpack_from(link.received)
            if length > (LONGEST if link.session else _FIRST):
                self._malformed(link)
                return
            end = FRAME.size + length
            if len(link.received) < end:
                return
            payload = bytes(link.received[FRAME.size : end])
            del link.received[:end]
            try:
                self._serve(link, Kind(kind), payload)
            except (ValueError, TypeError, KeyError, struct.error, RecursionError):
                self._malformed(link)
                return

    def _serve(self, link: _Link, kind: Kind, payload: bytes) -> None:
        session = link.session
        if kind is Kind.HELLO:
            self._join(link, payload)
        elif session is None and kind is Kind.FAIL and link.fixed is None:
            failure = Failure.decode(payload)
            if self._session.over:
                self._session = _Session(self._nranks)
            if not self._session.links:
                self._session.since = self._met
                self._session.lapses = time.monotonic() + _KEPT
            self._fail(self._session, failure)
            self._send(link, Kind.BYE, b"")
        elif session is None:
            raise ValueError
        elif kind is Kind.GATHER:
            self._gather(session, link.rank, payload)
        elif kind is Kind.ABSENT:
            members = next((m for m, parts in session.rounds.items() if link.rank in parts), ())
            came = session.rounds.get(members, {})
            absent = [r for r in members or range(session.nranks) if r not in came]
            self._send(link, Kind.ABSENT, json.dumps(absent).encode())
        else:
            session.over = True
            self._leave(link)
            if kind is Kind.FAIL:
                self._fail(session, Failure.decode(payload))
            elif session.failure is None:
                self._met = time.monotonic()
            self._send(link, Kind.BYE, b"")

    def _join(self, link: _Link, payload: bytes) -> None:
        said = json.loads(payload)
        rank, nranks, name, age = (said[word] for word in ("rank", "nranks", "name", "age"))
        if [type(value) for value in (rank, nranks, name, age)] != [int, int, str, float]:
            raise TypeError
        if not 0 <= rank < nranks < _MOST:
            raise ValueError
        if link.session is not None or rank != (rank if link.fixed is None else link.fixed):
            raise ValueError
        session = self._session
        told = rank not in session.links and session.concerns(time.monotonic() - age, name)
        if session.over and not told:
            session = self._session = _Session(self._nranks)
        other = session.links.get(rank)
        session.nranks = session.nranks or nranks
        link.rank, link.name, link.session, link.until = rank, name, session, math.inf
        if other is None:
            session.links[rank] = link
            session.active.add(rank)
        self._send(link, Kind.HELLO, b"")
        if session.failure is not None:
            self._send(link, Kind.FAIL, session.failure.encode())
            return
        why = ""
        if other is not None:
            why = f"init: two processes are rank {rank}: {other.name} and {name}"
        elif nranks != session.nranks:
            first = next((peer for peer in session.links if peer != rank), 0)
            why = (
                f"init: rank {first} was given nranks={session.nranks} and rank {rank} ({name}) "
                f"nranks={nranks}: pass the same on every rank"
            )
        if why:
            failure = Failure("MismatchError", why)
            if other is not None:
                self._send(link, Kind.FAIL, failure.encode())
            self._fail(session, failure)
        elif self._gone:
            self._lose(session)
        elif self._callers is not None and len(session.links) == self._nranks:
            self._callers.close()
            self._callers = None

    def _gather(self, session: _Session, rank: int, payload: bytes) -> None:
        (length,) = RANK.unpack_from(payload)
        start = RANK.size * (1 + length)
        members = tuple(word for (word,) in RANK.iter_unpack(payload[RANK.size : start]))
        if len(members) != length or (members and rank not in members) or session.failure:
            return
        parts = session.rounds.setdefault(members, {})
        parts[rank] = payload[start:]
        ranks = members or range(session.nranks)
        if len(parts) == len(ranks):
            del session.rounds[members]
            answer = joined([parts[member] for member in ranks])
            for member in ranks:
                self._send(session.links[member], Kind.GATHER, answer)

    def _lose(self, session: _Session) -> None:
        """Fail a session that ranks have not joined whose only connection has ended."""
        lost = [rank for rank in sorted(self._gone) if rank not in session.links]
        if lost and not session.over:
            text = f"init: {named(lost)} ended before joining"
            self._fail(session, Failure("RankLostError", text))

    def _fail(self, session: _Session, failure: Failure) -> None:
        """Report the first failure to all ranks that have come; the others hear it as they come."""
        session.over = True
        session.rounds.clear()
        if session.failure is None:
            session.failure, session.failed = failure, time.monotonic()
            for rank in sorted(session.active):
                self._send(session.links[rank], Kind.FAIL, failure.encode())

    def _ended(self, link: _Link) -> None:
        session = link.session
        self._close(link)
        if link.fixed is not None:
            self._gone.add(link.fixed)
            if session is None and self._session.links:
                self._lose(self._session)
        if session is not None and session.links.get(link.rank) is link:
            session.active.discard(link.rank)
            text = f"init: rank {link.rank} ({link.name}) ended, or closed its connection"
            if not session.over:
                self._fail(session, Failure("RankLostError", text))

    def _malformed(self, link: _Link) -> None:
        session = link.session
        self._close(link)
        if session is not None:
            session.active.discard(link.rank)
            text = f"init: rank {link.rank} ({link.name}) sent what ringcoll does not send"
            self._fail(session, Failure("MachineError", text))

    def _leave(self, link: _Link) -> None:
        """A rank has left its session; a connection that is its only one stays."""
        if link.session is not None:
            link.session.active.discard(link.rank)
        link.session = None

    def _send(self, link: _Link, kind: Kind, payload: bytes) -> None:
        link.unsent += FRAME.pack(kind.value, len(payload)) + payload
        self._flush(link)

    def _flush(self, link: _Link) -> None:
        if link.connection.fileno() < 0:
            return
        mask = selectors.EVENT_READ
        try:
            sent = link.connection.send(link.unsent, socket.MSG_NOSIGNAL)
            del link.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            link.unsent.clear()  # its end will be read
        if link.unsent:
            mask |= selectors.EVENT_WRITE
        self._selector.modify(link.connection, mask)

    def _close(self, link: _Link) -> None:
        self._selector.unregister(link.connection)
        del self._links[link.connection.fileno()]
        link.connection.close()


def _forked() -> None:
    """A child must hold no connection of its parent's open."""
    for relay in list(_relays):
        for link in relay._links.values():
            link.connection.close()
        if relay._callers is not None:
            relay._callers.forked()
        if relay._thread is not None:
            relay._wake.close()
            relay._woken.close()
        relay._selector.close()
    _relays.clear()


_relays: weakref.WeakSet[Relay] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forked)
