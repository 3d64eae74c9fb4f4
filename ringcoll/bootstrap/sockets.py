"""Ranks of one host without MPI: one process starts the others, or a launcher has.

:func:`run_ranks`: the parent makes a socket pair for each rank and starts it as a fresh
interpreter, so that the parent's modules and threads do not matter. It then relays exchanges and
collects exit statuses.

:class:`HostBootstrap`: the ranks that MPICH's launcher has started on one host know their numbers
and a name for their job. So they meet at a Unix socket of rank 0, and need no MPI.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import math
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ringcoll.bootstrap.contract import shortage
from ringcoll.bootstrap.overlap import LAUNCHER, enter
from ringcoll.bootstrap.relay import Relay
from ringcoll.bootstrap.relayed import RelayedBootstrap, listening, serving
from ringcoll.errors import DeadlineError, MachineError

if TYPE_CHECKING:
    import subprocess

_VARIABLE = "_RINGCOLL_SOCKET"  # descriptor, rank, nranks, parent's process id
_PATIENCE = 0.05  # seconds between checks of which ranks have ended
_PR_SET_PDEATHSIG = 1

_adopted: list[tuple[socket.socket, RelayedBootstrap]] = []


def adopted(timeout: float) -> RelayedBootstrap | None:
    """The bootstrap that this process was started with by :func:`run_ranks`, if it was."""
    if not _adopted and _VARIABLE not in os.environ:
        return None
    enter(LAUNCHER)
    if not _adopted:
        words = os.environ.get(_VARIABLE, "").split()
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
        where = "the process that started the ranks"
        _adopted.append((link, RelayedBootstrap(rank, nranks, timeout, where)))
        del os.environ[_VARIABLE]  # a child of this process is no rank
    link, bootstrap = _adopted[0]
    return bootstrap.over(link, timeout)


def _forked() -> None:
    """A child is no rank, and holds no connection of its parent's open."""
    for link, _ in _adopted:
        link.close()
    _adopted.clear()


os.register_at_fork(after_in_child=_forked)


class HostBootstrap(RelayedBootstrap):
    """One of the ranks that a launcher has started on one host as ``job``."""

    def __init__(self, job: str, rank: int, nranks: int, timeout: float) -> None:
        super().__init__(rank, nranks, timeout, "rank 0 on this host")
        key = job.encode()
        if rank == 0:
            self._relay = serving(self._listener(job), key, nranks)
        self.reach([job], key)

    def _listener(self, job: str) -> socket.socket:
        while True:
            try:
                return listening(job, self.nranks)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    text = f"init: rank 0 cannot listen: {error}"
                    raise shortage(error, 0) or MachineError(text) from error
            if time.monotonic() > self._deadline:
                raise DeadlineError(
                    f"init: rank 0 waited {self.timeout:.3g} s for another init() of rank 0 to end"
                )
            time.sleep(_PATIENCE)


def run_ranks(
    argv: Sequence[str],
    nranks: int,
    *,
    env: Mapping[str, str] | None = None,
    grace: float = 5.0,
    after_death: float = math.inf,
) -> list[int]:
    """Run ``nranks`` processes that ``init()`` connects; their exit statuses, 128 + signal.

    Ctrl-C is passed on once; a process that runs ``grace`` seconds later is killed, and one that
    runs ``after_death`` seconds after a signal has ended another. ``env`` of None takes this
    process's.
    """
    ranks = _Ranks(nranks)
    try:
        for rank in range(nranks):
            ranks.start(argv, rank, dict(os.environ if env is None else env))
        try:
            ranks.run(math.inf, after_death)
        except KeyboardInterrupt:
            ranks.signal(signal.SIGINT)
            ranks.run(time.monotonic() + grace)
    finally:
        ranks.signal(signal.SIGKILL)
        ranks.close()
    return [code if code >= 0 else 128 - code for code in ranks.codes()]


class _Ranks:
    """The ranks that this process has started, and their relay."""

    def __init__(self, nranks: int) -> None:
        self._nranks = nranks
        self._children: list[subprocess.Popen[bytes]] = []
        self._relay = Relay(nranks=nranks)

    def start(self, argv: Sequence[str], rank: int, env: dict[str, str]) -> None:
        import subprocess  # not at every rank's start: ranks start none

        ours, theirs = socket.socketpair()
        self._relay.add(rank, ours)
        with theirs:
            env[_VARIABLE] = f"{theirs.fileno()} {rank} {self._nranks} {os.getpid()}"
            # A session of its own: Ctrl-C reaches it once, from here.
            child = subprocess.Popen(
                list(argv), env=env, pass_fds=(theirs.fileno(),), start_new_session=True
            )
        self._children.append(child)

    def run(self, deadline: float, after_death: float = math.inf) -> None:
        """Relay until every rank has ended, or the deadline."""
        while None in (ends := [child.poll() for child in self._children]):
            if any(end is not None and end < 0 for end in ends):
                deadline, after_death = min(deadline, time.monotonic() + after_death), math.inf
            if time.monotonic() > deadline:
                return
            self._relay.step(_PATIENCE)

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
        self._relay.close()
        self.codes()
