"""Ranks without MPI: one process starts the others and relays their exchanges.

The parent makes a socket pair for each rank and starts it as a fresh interpreter, so that the
parent's modules and threads do not matter. It then relays exchanges and collects exit statuses.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence

from ringcoll.bootstrap.contract import named
from ringcoll.bootstrap.frames import exactly, joined, split
from ringcoll.errors import DeadlineError, MachineError, RankLostError

_VARIABLE = "_RINGCOLL_SOCKET"  # descriptor, rank, nranks, parent's process id
_FRAME = struct.Struct("<cQ")  # kind, length of what follows
_WORD = struct.Struct("<Q")
_GATHER, _WHO, _LOST = b"G", b"W", b"L"
_LONGEST = 1 << 30  # bytes of a frame
_ANSWER = 2.0  # seconds for the parent to name the missing ranks
_PATIENCE = 50  # milliseconds between checks of which ranks have ended
_PR_SET_PDEATHSIG = 1

_adopted: list[SocketBootstrap] = []


class SocketBootstrap:
    """One of the ranks that :func:`run_ranks` has started, with its socket to the parent."""

    def __init__(self, link: socket.socket, rank: int, nranks: int, timeout: float) -> None:
        self.rank = rank
        self.nranks = nranks
        self.timeout = timeout
        self._link = link
        self._broken = ""

    def allgather(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes, relayed by the parent."""
        if self._broken:
            raise MachineError(self._broken)
        deadline = time.monotonic() + self.timeout
        try:
            self._link.sendall(_FRAME.pack(_GATHER, len(payload)) + payload)
            kind, answer = self._receive(deadline)
        except TimeoutError:
            self._broken = "an earlier exchange among the ranks has failed"
            raise DeadlineError(
                f"init: rank {self.rank} waited {self.timeout:.3g} s for {self._absent()}"
            ) from None
        except OSError as error:
            self._broken = f"the process that started this rank is gone ({error})"
            raise MachineError(self._broken) from error
        if kind == _LOST:
            self._broken = "an earlier exchange among the ranks has failed"
            raise RankLostError(f"init: {named(_unpacked(answer))} ended before joining")
        return split(answer, self.nranks, "the parent")

    def _absent(self) -> str:
        try:
            self._link.settimeout(None)
            self._link.sendall(_FRAME.pack(_WHO, 0))
            deadline = time.monotonic() + _ANSWER
            while True:
                kind, answer = self._receive(deadline)
                if kind == _WHO:
                    return named(_unpacked(answer))
        except OSError:
            return "the others"

    def _receive(self, deadline: float) -> tuple[bytes, bytes]:
        kind, length = _FRAME.unpack(exactly(self._link, _FRAME.size, deadline))
        if length > _LONGEST:
            raise MachineError(f"the parent sent a frame of {length} bytes")
        return kind, exactly(self._link, length, deadline)


def adopted(timeout: float) -> SocketBootstrap | None:
    """The bootstrap that this process was started with by :func:`run_ranks`, if it was."""
    if not _adopted:
        # Taken out of the environment: a child of this process is no rank.
        words = os.environ.pop(_VARIABLE, "").split()
        if len(words) != 4 or not all(word.isdigit() for word in words):
            return None
        fd, rank, nranks, parent = map(int, words)
        os.set_inheritable(fd, False)
        # A rank ends with the process that started it, however that ends.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            raise MachineError("the process that started this rank is gone")
        link = socket.socket(fileno=fd)
        atexit.register(link.close)
        _adopted.append(SocketBootstrap(link, rank, nranks, timeout))
    _adopted[0].timeout = timeout
    return _adopted[0]


def run_ranks(
    argv: Sequence[str], nranks: int, *, env: Mapping[str, str] | None = None, grace: float = 5.0
) -> list[int]:
    """Run ``nranks`` processes that ``init()`` connects; their exit statuses, 128 + signal.

    Ctrl-C is passed on once; a process that runs ``grace`` seconds later is killed. ``env`` of None
    takes this process's.
    """
    relay = _Relay(nranks)
    try:
        for rank in range(nranks):
            relay.start(argv, rank, dict(os.environ if env is None else env))
        try:
            relay.run(float("inf"))
        except KeyboardInterrupt:
            relay.signal(signal.SIGINT)
            relay.run(time.monotonic() + grace)
    finally:
        relay.signal(signal.SIGKILL)
        relay.close()
    return [code if code >= 0 else 128 - code for code in relay.codes()]


class _Relay:
    """The parent's side."""

    def __init__(self, nranks: int) -> None:
        self._nranks = nranks
        self._children: list[subprocess.Popen[bytes]] = []
        self._links: dict[int, socket.socket] = {}
        self._buffers = [bytearray() for _ in range(nranks)]
        self._round: dict[int, bytes] = {}
        self._lost: list[int] = []  # the first to end before a round was complete

    def start(self, argv: Sequence[str], rank: int, env: dict[str, str]) -> None:
        self._links[rank], theirs = socket.socketpair()
        with theirs:
            env[_VARIABLE] = f"{theirs.fileno()} {rank} {self._nranks} {os.getpid()}"
            # A session of its own: Ctrl-C reaches it once, from here.
            child = subprocess.Popen(
                list(argv), env=env, pass_fds=(theirs.fileno(),), start_new_session=True
            )
        self._children.append(child)

    def run(self, deadline: float) -> None:
        """Relay until every rank has ended, or the deadline."""
        while any(child.poll() is None for child in self._children):
            if time.monotonic() > deadline:
                return
            poll = select.poll()
            by_fd = {link.fileno(): rank for rank, link in self._links.items()}
            for fd in by_fd:
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll(_PATIENCE):
                if by_fd[fd] in self._links:
                    self._read(by_fd[fd])

    def _read(self, rank: int) -> None:
        try:
            part = self._links[rank].recv(1 << 16)
        except OSError:
            part = b""
        if not part:
            self._links.pop(rank).close()
            self._answer()
            return
        buffer = self._buffers[rank]
        buffer += part
        while len(buffer) >= _FRAME.size:
            kind, length = _FRAME.unpack_from(buffer)
            if len(buffer) < _FRAME.size + length:
                break
            payload = bytes(buffer[_FRAME.size : _FRAME.size + length])
            del buffer[: _FRAME.size + length]
            if kind == _GATHER:
                self._round[rank] = payload
                self._answer()
            else:
                absent = [r for r in range(self._nranks) if r not in self._round]
                self._send(rank, _WHO, b"".join(map(_WORD.pack, absent)))

    def _answer(self) -> None:
        """Complete the round if all have come, or fail it if one no longer can."""
        if not self._round:
            return
        if not self._lost:
            # Those that end later may do so because these did.
            links, round_ = self._links, self._round
            self._lost = [r for r in range(self._nranks) if r not in links and r not in round_]
        if len(self._round) == self._nranks:
            kind, answer = _GATHER, joined([self._round[r] for r in range(self._nranks)])
        elif self._lost:
            kind, answer = _LOST, b"".join(map(_WORD.pack, self._lost))
        else:
            return
        waiting, self._round = list(self._round), {}
        for rank in waiting:
            self._send(rank, kind, answer)

    def _send(self, rank: int, kind: bytes, answer: bytes) -> None:
        link = self._links.get(rank)
        if link is not None:
            try:
                link.sendall(_FRAME.pack(kind, len(answer)) + answer)
            except OSError:
                self._links.pop(rank).close()

    def signal(self, number: int) -> None:
        """Send a signal to the ranks that still run."""
        for child in self._children:
            if child.poll() is None:
                child.send_signal(number)

    def codes(self) -> list[int]:
        """The exit status of every rank that was started."""
        return [child.wait() for child in self._children]

    def close(self) -> None:
        """Close the sockets and collect the ranks."""
        for link in self._links.values():
            link.close()
        self.codes()


def _unpacked(answer: bytes) -> list[int]:
    return [word[0] for word in _WORD.iter_unpack(answer[: len(answer) // 8 * 8])]
