"""The ranks' end of a :mod:`relay <ringcoll.bootstrap.relay>`: a bootstrap over one connection."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence

from ringcoll.bootstrap.addresses import connected, listening_at, resolved
from ringcoll.bootstrap.contract import Failure, named, shortage, this_process
from ringcoll.bootstrap.frames import exactly, left, split
from ringcoll.bootstrap.handshake import PATIENCE, KeyMismatch, prove
from ringcoll.bootstrap.overlap import check
from ringcoll.bootstrap.relay import CALLED, FRAME, LONGEST, RANK, Kind, Relay
from ringcoll.errors import (
    ArgumentError,
    DeadlineError,
    Error,
    MachineError,
    MismatchError,
    OutOfMemory,
    RankLostError,
)
from ringcoll.host.fd_passing import credentials
from ringcoll.host.processes import start_of_process

_FIRST, _LAST = 1e-3, 2e-2  # seconds between attempts, which grow from the one to the other
_BACKLOG = 128  # connections that wait to be accepted; strangers' too
_TURN = 0.1  # seconds between looks whether another thread begins over the same world
_LATE = 2.0  # seconds for ranks that come late to learn that another has ended
_PARTING = 0.5  # seconds for the relay to take the last frame
_ANSWER = 2.0  # seconds for the relay to name the missing ranks
_FOREIGN = 1.0  # seconds for a process with another secret to free the port of an id

Address = tuple[str | None, int] | str
"""Host (None, of a listener: any) and port, or the name of a Unix socket."""


class RelayedBootstrap:
    """A rank of a world whose exchanges a relay carries; ``timeout`` is for all of them together.

    ``relay`` is the one that this process runs for this world; ``where`` names it in messages.
    """

    def __init__(
        self,
        rank: int,
        nranks: int,
        timeout: float,
        where: str,
        relay: Relay | None = None,
        begun: float | None = None,
    ) -> None:
        if not 0 <= rank < nranks:
            raise ArgumentError(f"rank {rank} of {nranks}: wanted 0 <= rank < nranks")
        self.rank, self.nranks, self._where = rank, nranks, where
        self._relay, self._kept = relay, False
        self.local: Relay | None = None  # one that this process runs for other worlds too
        self.unlike = ""  # for an id: the error where its secret is not that of the listener
        self.advice = "did every rank call init()?"
        self._link: socket.socket | None = None
        self._received = bytearray()
        self._failure: Failure | None = None  # that has ended this session
        self._has_joined = False
        self._limit(timeout, begun)

    def _limit(self, timeout: float, begun: float | None = None) -> None:
        begun = time.monotonic() if begun is None else begun
        self.timeout, self._deadline = timeout, begun + timeout

    def over(self, link: socket.socket, timeout: float) -> RelayedBootstrap:
        """Join over a connection that this rank keeps for its next ``init``."""
        if self._link is not None:
            self.close()
        self._limit(timeout)
        self._link, self._kept = link, True
        try:
            link.settimeout(left(self._deadline))
            self._join(link)
        except Error:
            raise
        except TimeoutError:
            raise DeadlineError(
                f"init: rank {self.rank} of {self.nranks} waited {timeout:.3g} s for an answer of "
                f"{self._where}"
            ) from None
        except OSError as error:
            raise self._ended(error) from error
        return self

    def reach(
        self, addresses: Sequence[Address], key: bytes, news: Callable[[], object] = lambda: None
    ) -> RelayedBootstrap:
        """Connect to the relay at one of the addresses, and join.

        ``news`` is called between attempts; what it raises ends them.
        """
        try:
            self._link = self._connected(addresses, key, news)
        except BaseException:
            self.close()
            raise
        return self

    def _connected(
        self, addresses: Sequence[Address], key: bytes, news: Callable[[], object]
    ) -> socket.socket:
        pause, error, advice = _FIRST, OSError("no address"), self.advice
        foreign = math.inf  # since when each address has another key
        while True:
            began, same = time.monotonic(), False
            for address, soon in _turns(addresses, self._deadline):
                news()
                check(joined=False)
                try:
                    return self._joined(address, key, soon)
                except Error:
                    raise
                except OSError as failed:
                    if (lack := shortage(failed, self.rank) or self._lacking()) is not None:
                        raise lack from failed
                    error = failed
                    if isinstance(failed, KeyMismatch):
                        advice = self.unlike or "another program listens there"
                    same = same or not isinstance(failed, KeyMismatch)
            foreign = math.inf if same else min(foreign, began)
            if self.unlike and time.monotonic() >= foreign + _FOREIGN:
                raise MismatchError(f"init: rank {self.rank} of {self.nranks}: {self.unlike}")
            if time.monotonic() + pause > self._deadline:
                raise DeadlineError(
                    f"init: rank {self.rank} of {self.nranks} tried {self.timeout:.3g} s to reach "
                    f"{self._where} ({error}): {advice}"
                )
            time.sleep(pause)  # it may not be there yet
            pause = min(pause * 1.5, _LAST)

    def _joined(self, address: Address, key: bytes, soon: float) -> socket.socket:
        """Connect to the relay at an address, prove the key and join."""
        link = _connect(address, soon)
        try:
            self._received.clear()
            prove(link, key, self.rank, CALLED, soon)
            self._join(link)
        except BaseException:
            link.close()
            raise
        return link

    def _lacking(self) -> OutOfMemory | None:
        """Why a relay of this process can take no rank."""
        relay = self._relay or self.local
        lack = None if relay is None else relay.lacking()
        return None if lack is None else shortage(lack, self.rank)

    def _join(self, link: socket.socket) -> None:
        said = {"rank": self.rank, "nranks": self.nranks, "name": this_process(), "age": _age()}
        payload = json.dumps(said).encode()
        self._failure = None
        _send(link, Kind.HELLO, payload)
        while self._frame(link, self._deadline)[0] != Kind.HELLO:
            pass  # of an earlier session over this connection
        self._has_joined = True

    # -- exchanges -----------------------------------------------------------------------------

    def allgather(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes."""
        return self.exchange(payload, ())

    def exchange(self, payload: bytes, members: Sequence[int]) -> list[bytes]:
        """The bytes of some ranks, this one among them; of none: of all."""
        link = self._link
        if link is None:
            raise MachineError(f"init: the connections of rank {self.rank} are closed")
        if self._failure is not None:
            raise self._failure.error()
        words = b"".join(map(RANK.pack, (len(members), *members)))
        try:
            link.settimeout(left(self._deadline))
            _send(link, Kind.GATHER, words + payload)
            answer = self._await(link, Kind.GATHER, self._deadline)
        except Error:
            raise
        except TimeoutError:
            raise self._late(link) from None
        except OSError as error:
            with contextlib.suppress(OSError):  # what the relay said before its end
                self._await(link, Kind.GATHER, time.monotonic() + _ANSWER)
            raise self._ended(error) from error
        return split(answer, len(members) or self.nranks, "init: the relay of the bootstrap")

    def part(self, members: Sequence[int]) -> Part:
        """Some of the ranks, this one among them; other parts may begin at the same time."""
        return Part(self, members)

    def check(self) -> None:
        """Raise if a rank has failed or ended."""
        link = self._link
        if link is None:
            return
        if self._failure is not None:
            raise self._failure.error()
        poll = select.poll()
        poll.register(link, select.POLLIN)
        try:
            while True:  # an answer and a failure may have come together, or a part of one
                while (frame := self._complete()) is not None:
                    self._refuse(*frame)
                if not poll.poll(0):
                    return
                self._receive(link, time.monotonic())
        except Error:
            raise
        except OSError as error:
            raise self._ended(error) from error

    def fail(self, error: BaseException) -> None:
        """End with an error, which the others raise."""
        self._leave(Kind.FAIL, Failure.of(error, self.rank).encode())

    def close(self) -> None:
        """End: this rank needs the others no more. Idempotent."""
        self._leave(Kind.BYE, b"")

    def _leave(self, kind: Kind, payload: bytes) -> None:
        link, self._link, self._has_joined = self._link, None, False
        if link is not None:
            with contextlib.suppress(OSError, MachineError):
                link.settimeout(_PARTING)
                _send(link, kind, payload)
                # A relay of this process may end with it: not before the others have the error.
                # And what the relay has sent meanwhile is not for the next session.
                late = time.monotonic() + _PARTING
                while (self._kept or kind is Kind.FAIL) and self._frame(link, late)[0] != Kind.BYE:
                    pass
            if not self._kept:
                link.close()
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.halt(max(0.0, min(_LATE, self._deadline - time.monotonic())))

    def _await(self, link: socket.socket, kind: Kind, deadline: float) -> bytes:
        """The next frame of a kind; a failure that the relay reports is raised."""
        while True:
            found, payload = self._frame(link, deadline)
            self._refuse(found, payload)
            if found == kind:
                return payload

    def _refuse(self, kind: Kind, payload: bytes) -> None:
        """Raise what the relay reports."""
        if kind == Kind.FAIL:
            self._failure = Failure.decode(payload)
            raise self._failure.error()

    def _refuse_received(self, link: socket.socket) -> None:
        """Raise what the relay has reported, without waiting for more."""
        link.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self._received += link.recv(1 << 16)
        while (frame := self._complete()) is not None:
            self._refuse(*frame)

    def _frame(self, link: socket.socket, deadline: float) -> tuple[Kind, bytes]:
        """The next frame; one that has come in part by the deadline is kept."""
        while (frame := self._complete()) is None:
            self._receive(link, deadline)
        return frame

    def _complete(self) -> tuple[Kind, bytes] | None:
        """The next frame if all of it has been received."""
        received = self._received
        if len(received) < FRAME.size:
            return None
        kind, length = FRAME.unpack_from(received)
        if length > LONGEST or kind not in {one.value for one in Kind}:
            raise MachineError(f"init: {self._where} sent what ringcoll does not send")
        end = FRAME.size + length
        if len(received) < end:
            return None
        payload = bytes(received[FRAME.size : end])
        del received[:end]
        return Kind(kind), payload

    def _receive(self, link: socket.socket, deadline: float) -> None:
        part = None
        while part is None:
            check(joined=self._has_joined)
            seconds = left(deadline) or math.inf
            link.settimeout(min(seconds, _TURN))
            with contextlib.suppress(*() if seconds <= _TURN else (TimeoutError,)):
                part = link.recv(1 << 16)
        if not part:
            raise ConnectionError("end of file")
        self._received += part

    def _late(self, link: socket.socket) -> Error:
        if (lack := self._lacking()) is not None:
            return lack
        absent = "the others"
        try:
            deadline = time.monotonic() + _ANSWER
            self._refuse_received(link)  # sending to a relay that has ended drops what it has said
            link.settimeout(_ANSWER)
            _send(link, Kind.ABSENT, b"")
            ranks = [int(rank) for rank in json.loads(self._await(link, Kind.ABSENT, deadline))]
            absent = named(ranks) if ranks else absent
        except Error:
            raise  # of a rank that was late, too
        except (OSError, ValueError, TypeError):
            pass
        relay, advice = self._relay or self.local, "did every rank call init()?"
        if relay is not None and relay.refused():
            advice += " A caller with another secret was refused: has every rank the same id?"
        return DeadlineError(
            f"init: rank {self.rank} of {self.nranks} waited {self.timeout:.3g} s for {absent}: "
            f"{advice}"
        )

    def _ended(self, error: OSError) -> RankLostError:
        return RankLostError(
            f"init: {self._where} closed its connection to rank {self.rank} ({error}): it has "
            "ended, or its init() has"
        )


def post(
    addresses: Sequence[Address], key: bytes, failure: Failure, timeout: float, refused: float
) -> None:
    """Report the failure of a process without a valid rank to the ranks that meet at a relay.

    It tries for ``timeout`` seconds to reach the relay, which may begin later, but only for
    ``refused`` seconds while no address takes a connection.
    """
    began = time.monotonic()
    deadline, listens = began + timeout, False
    while time.monotonic() < deadline and (listens or time.monotonic() < began + refused):
        for address, soon in _turns(addresses, deadline):
            with contextlib.suppress(OSError):
                with _connect(address, soon) as link:
                    listens = True
                    prove(link, key, CALLED, CALLED, soon)
                    _send(link, Kind.FAIL, failure.encode())
                    exactly(link, FRAME.size, soon)  # the answer: the ranks that came have it
                return
        time.sleep(_LAST)


class Part:
    """Some ranks of a relayed world, as a bootstrap."""

    def __init__(self, whole: RelayedBootstrap, members: Sequence[int]) -> None:
        self.rank, self.nranks = members.index(whole.rank), len(members)
        self._whole, self._members = whole, members

    def allgather(self, payload: bytes) -> list[bytes]:
        """Every member's bytes."""
        return self._whole.exchange(payload, self._members)


def _age() -> float:
    """Seconds since this process began, whatever the clocks of other hosts say."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_of_process() / os.sysconf("SC_CLK_TCK")


def _send(link: socket.socket, kind: Kind, payload: bytes) -> None:
    """Send a frame; a closed connection is an error, whatever the program has made of SIGPIPE."""
    link.sendall(FRAME.pack(kind.value, len(payload)) + payload, socket.MSG_NOSIGNAL)


def _turns(addresses: Sequence[Address], deadline: float) -> Iterator[tuple[Address, float]]:
    """The addresses, those of a name one by one, and when to go on to the next.

    One that does not answer leaves time for the rest.
    """
    places: list[Address] = []
    for address in addresses:
        if isinstance(address, str) or address[0] is None:
            places.append(address)
        else:
            places += [(host, address[1]) for host in resolved(address[0])]
    for number, place in enumerate(places):
        now = time.monotonic()
        yield place, now + min(PATIENCE, (deadline - now) / (len(places) - number))


def _connect(address: Address, until: float) -> socket.socket:
    seconds = left(until)
    if not isinstance(address, str):
        return connected(address, seconds)
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        link.settimeout(seconds)
        link.connect(f"\0{address}")
        if credentials(link)[1] != os.geteuid():
            raise PermissionError(f"another user listens at {address}")
    except BaseException:
        link.close()
        raise
    return link


def listening(address: Address, backlog: int = 1) -> socket.socket:
    """A listener at an address; the name of a Unix socket is free when its last one is closed."""
    if not isinstance(address, str):
        return listening_at(*address, max(backlog, _BACKLOG))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind(f"\0{address}")
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def serving(listener: socket.socket, key: bytes, nranks: int) -> Relay:
    """A relay on a thread of this process."""
    relay = None
    try:
        relay = Relay(listener, key, nranks)
        relay.start()
    except BaseException:
        if relay is not None:
            relay.close()
        listener.close()
        raise
    return relay
