"""Bootstrap over MPI: a few exchanges on a private communicator, each under a deadline.

Only buffers travel, nothing is pickled. MPI's collectives have no deadline, so they are started
and polled. Each rank first sends every other a one-byte hello: after the deadline those ranks are
absent whose hello has not come. Once the fabric is open MPI is used again only for messages between
nodes, so that no rank hangs in it when another dies.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.bootstrap.contract import named
from ringcoll.bootstrap.launcher import (
    OPEN_MPI,
    check_library,
    check_world,
    launcher_of,
    mpiexec,
)
from ringcoll.errors import ArgumentTypeError, DeadlineError, MachineError
from ringcoll.folders import pip_install

_HELLO, _PART = 32749, 32748  # the reserved tags; MPI promises tags up to 32767
_YIELDS = 200  # polls that yield before a poll sleeps
_SLEEP = 1e-3  # seconds

_kept: list[Any] = []  # requests that outlived their deadline, with the buffers they may touch
_keyval: list[int] = []  # under which a communicator remembers its private duplicate


def load_mpi() -> Any:
    """mpi4py's MPI module, initialised."""
    try:
        MPI = _import_mpi()  # noqa: N806
    except (ImportError, RuntimeError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MachineError(
            f"cannot load MPI through mpi4py ({first}): {pip_install('mpi')} for mpi4py with an "
            f"MPI library, {pip_install('mpi-system')} for mpi4py with the system's library"
        ) from error
    if not MPI.Is_initialized():
        raise MachineError("MPI is not initialized: call MPI.Init() before making a communicator")
    if MPI.Is_finalized():
        raise MachineError("MPI is finalized: make communicators before MPI.Finalize()")
    return MPI


def _import_mpi() -> Any:
    """mpi4py's MPI module; below Open MPI's launcher its library is checked before MPI_Init."""
    import mpi4py

    rc, launcher = mpi4py.rc, launcher_of(os.environ)
    below = launcher is not None and launcher.variable == OPEN_MPI
    checked = below and rc.initialize and "mpi4py.MPI" not in sys.modules
    if checked:  # what the import would do, in two steps
        rc.initialize, rc.finalize = False, rc.finalize is not False
    from mpi4py import MPI

    if checked:
        rc.initialize = True
        check_library(launcher, library_of(MPI), os.environ)
        if not MPI.Is_initialized():
            level = rc.thread_level if rc.threads else "single"
            MPI.Init_thread(getattr(MPI, f"THREAD_{level.upper()}"))
    return MPI


def library_of(mpi: Any) -> str:
    """The MPI library's name and version, a line."""
    return str(mpi.Get_library_version()).splitlines()[0].strip("\0 ")


def mpi_running() -> Any | None:
    """mpi4py's MPI module if it is loaded and between Init and Finalize."""
    package = sys.modules.get("mpi4py.MPI")
    if package is None or not package.Is_initialized() or package.Is_finalized():
        return None
    return package


def is_mpi_communicator(candidate: object) -> bool:
    """Whether this is an mpi4py communicator; loads nothing."""
    package = sys.modules.get("mpi4py.MPI")
    return package is not None and isinstance(candidate, package.Comm)


class MpiBootstrap:
    """The ranks of an MPI communicator, mpi4py's; None takes the world."""

    def __init__(
        self, communicator: Any | None, timeout: float, environ: Mapping[str, str] = os.environ
    ) -> None:
        mpi = load_mpi()
        given = mpi.COMM_WORLD if communicator is None else communicator
        if given == mpi.COMM_NULL or not isinstance(given, mpi.Intracomm):
            raise ArgumentTypeError(
                f"bootstrap must be an MPI intracommunicator with this process in it, not {given}"
            )
        check_world(launcher_of(environ), mpi.COMM_WORLD.Get_size(), library_of(mpi))
        self._mpi = mpi
        self._timeout = timeout
        self.rank: int = given.Get_rank()
        self.nranks: int = given.Get_size()
        if not _keyval:
            _keyval.append(mpi.Comm.Create_keyval())
        private = given.Get_attr(_keyval[0])
        self._greet(given if private is None else private)
        if private is None:
            private, request = given.Idup()
            self._finish(request, private)
            # Kept for later calls: freeing is collective, and contexts are few.
            given.Set_attr(_keyval[0], private)
        self._private = private

    @property
    def communicator(self) -> Any:
        """The private duplicate, which carries the messages between nodes too."""
        return self._private

    def allgather(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes: first the lengths, then the bytes."""
        length = np.array([len(payload)], np.int64)
        lengths = np.zeros(self.nranks, np.int64)
        self._finish(self._private.Iallgather(length, lengths), length, lengths)
        counts = [int(n) for n in lengths]
        starts = [sum(counts[:rank]) for rank in range(self.nranks)]
        sent = np.frombuffer(payload or b"\0", np.uint8)
        received = np.zeros(sum(counts) + 1, np.uint8)
        byte = self._mpi.BYTE
        request = self._private.Iallgatherv(
            [sent, len(payload), byte], [received, counts, starts, byte]
        )
        self._finish(request, sent, received)
        whole = received.tobytes()
        return [whole[s : s + n] for s, n in zip(starts, counts, strict=True)]

    def _greet(self, communicator: Any) -> None:
        others = [rank for rank in range(self.nranks) if rank != self.rank]
        self._word = np.ones(1, np.uint8)
        self._heard = {rank: np.zeros(1, np.uint8) for rank in others}
        self._hellos = {
            rank: communicator.Irecv(box, rank, _HELLO) for rank, box in self._heard.items()
        }
        self._sent = [communicator.Isend(self._word, rank, _HELLO) for rank in others]

    def _finish(self, request: Any, *buffers: object) -> None:
        """Poll a request, and the hellos, until done or too late."""
        started = time.monotonic()
        polls = count()
        while not (request.Test() and self._greeted()):
            if time.monotonic() - started > self._timeout:
                _kept.append((request, buffers, self._sent, self._word))
                raise DeadlineError(self._absence(time.monotonic() - started))
            _pause(next(polls))

    def _greeted(self) -> bool:
        self._hellos = {rank: call for rank, call in self._hellos.items() if not call.Test()}
        self._sent = [call for call in self._sent if not call.Test()]
        return not self._hellos and not self._sent

    def _absence(self, waited: float) -> str:
        self._greeted()
        absent = sorted(self._hellos)
        for call in self._hellos.values():
            call.Cancel()
            call.Wait()
        start = f"init: rank {self.rank} of {self.nranks} waited {waited:.3g} s over MPI for "
        if absent:
            return f"{start}{named(absent)}: no message came; did every rank call init()?"
        own = mpiexec() or "mpiexec"
        return f"{start}the others: all began, but one has stopped since (see {own}'s output)"


class PartOfMpi:
    """Some ranks of a bootstrap, this one among them, without a communicator of their own.

    MPI makes a smaller communicator only in a call that has no deadline. So these ranks exchange
    point to point; the messages of a pair keep their order, and with it the exchanges.
    """

    def __init__(self, whole: MpiBootstrap, members: Sequence[int], timeout: float) -> None:
        self.rank, self.nranks = members.index(whole.rank), len(members)
        self._members, self._timeout = tuple(members), timeout
        self._communicator = whole.communicator
        self._mpi = load_mpi()
        self._unsent: list[tuple[Any, npt.NDArray[np.uint8]]] = []

    def allgather(self, payload: bytes) -> list[bytes]:
        """Every member's bytes."""
        deadline = time.monotonic() + self._timeout
        sent = np.frombuffer(payload or b"\0", np.uint8)
        found: dict[int, bytes] = {self.rank: payload}
        others = [index for index in range(self.nranks) if index != self.rank]
        for index in others:
            message = [sent, len(payload), self._mpi.BYTE]
            request = self._communicator.Isend(message, self._members[index], _PART)
            self._unsent.append((request, sent))
        polls = count()
        while len(found) < self.nranks or self._unsent:
            for index in others:
                if index not in found:
                    self._take(index, found)
            self._unsent = [(call, array) for call, array in self._unsent if not call.Test()]
            if time.monotonic() > deadline:
                absent = [self._members[index] for index in others if index not in found]
                raise DeadlineError(
                    f"init: rank {self._members[self.rank]} waited {self._timeout:.3g} s over MPI "
                    f"for {named(absent) if absent else 'the others'}"
                )
            _pause(next(polls))
        return [found[index] for index in range(self.nranks)]

    def _take(self, index: int, found: dict[int, bytes]) -> None:
        status = self._mpi.Status()
        message = self._communicator.Improbe(self._members[index], _PART, status)
        if message is None:
            return
        length = status.Get_count(self._mpi.BYTE)
        received = np.zeros(length + 1, np.uint8)
        message.Recv([received, length, self._mpi.BYTE])
        found[index] = received[:length].tobytes()


def _pause(polls: int) -> None:
    """Yield the processor between the first polls, then sleep."""
    if polls < _YIELDS:
        os.sched_yield()
    else:
        time.sleep(_SLEEP)
