"""Beginning over MPI: a few exchanges on a private communicator, each under a deadline.

Only buffers travel, nothing is pickled. MPI's collectives have no deadline, so they are started
and polled. A rank that never comes is named by its silence: each rank first sends every other a
tiny hello, and after expiry those are absent whose hello has not come. Once the fabric stands
MPI is used again only for messages between nodes, so that no rank is caught in it when another
dies.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from ringcoll.bootstrap.contract import named
from ringcoll.bootstrap.launcher import check_world, launcher_of, mpiexec
from ringcoll.errors import ArgumentTypeError, DeadlineError, MachineError

__all__ = ["MpiBootstrap", "is_mpi_communicator", "load_mpi", "mpi_running"]

_HELLO = 32749  # the reserved tag; MPI promises tags up to 32767
_YIELDS = 200  # polls that yield before a poll sleeps
_SLEEP = 1e-3  # seconds

_kept: list[Any] = []  # requests that outlived their deadline, with the buffers they may touch
_keyval: list[int] = []  # under which a communicator remembers its private duplicate


def load_mpi() -> Any:
    """mpi4py's MPI module, initialised.

    Raises:
        MachineError: there is no mpi4py, no MPI library, or MPI is not running.

    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MachineError(
            f"no MPI to begin with ({first}); pip install 'ringcoll[mpi]' brings mpi4py and an "
            "MPI library, pip install 'ringcoll[mpi-system]' uses the system's"
        ) from error
    if not MPI.Is_initialized():
        raise MachineError("MPI is not initialised: call MPI.Init() first")
    if MPI.Is_finalized():
        raise MachineError("MPI is finalized already: make communicators before MPI.Finalize()")
    return MPI


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
    """The ranks of an MPI communicator.

    Args:
        communicator: mpi4py's; None takes the world.
        timeout: seconds for each exchange.
        environ: where the launcher has left its word.

    Raises:
        LauncherError: launcher and world disagree.
        DeadlineError: a rank did not come; it is named.

    """

    def __init__(
        self, communicator: Any | None, timeout: float, environ: Mapping[str, str] = os.environ
    ) -> None:
        mpi = load_mpi()
        given = mpi.COMM_WORLD if communicator is None else communicator
        if given == mpi.COMM_NULL or not isinstance(given, mpi.Intracomm):
            raise ArgumentTypeError(
                f"bootstrap must be an intracommunicator that this process belongs to, not {given}"
            )
        library = mpi.Get_library_version().splitlines()[0].strip("\0 ")
        check_world(launcher_of(environ), mpi.COMM_WORLD.Get_size(), library)
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
        """The private duplicate, on which ranks of several nodes go on to send messages."""
        return self._private

    def allgather(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes: first the lengths, then the bytes.

        Raises:
            DeadlineError: a rank did not take part.

        """
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
        self._said = [communicator.Isend(self._word, rank, _HELLO) for rank in others]

    def _finish(self, request: Any, *buffers: object) -> None:
        """Poll a request, and the hellos, until done or too late."""
        started = time.monotonic()
        polls = 0
        while not (request.Test() and self._greeted()):
            if time.monotonic() - started > self._timeout:
                _kept.append((request, buffers, self._said, self._word))
                raise DeadlineError(self._silence(time.monotonic() - started))
            polls += 1
            if polls < _YIELDS:
                os.sched_yield()
            else:
                time.sleep(_SLEEP)

    def _greeted(self) -> bool:
        self._hellos = {rank: call for rank, call in self._hellos.items() if not call.Test()}
        self._said = [call for call in self._said if not call.Test()]
        return not self._hellos and not self._said

    def _silence(self, waited: float) -> str:
        self._greeted()
        absent = sorted(self._hellos)
        for call in self._hellos.values():
            call.Cancel()
            call.Wait()
        start = f"init: rank {self.rank} of {self.nranks} waited {waited:.3g} s over MPI for "
        if absent:
            return f"{start}{named(absent)}: not one word came from there; did it call init()?"
        own = mpiexec() or "mpiexec"
        return f"{start}the others: all came, but one has stopped since (see {own}'s output)"
