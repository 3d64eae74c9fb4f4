"""Bootstrap over MPI: rank 0 sends the others an id over MPI, by which they meet over TCP.

MPI's collectives have no deadline, and notice no death. So one message to each rank is all that
goes over MPI: it is probed for, never waited for, and a later one replaces it, so that an ``init``
which has failed leaves nothing that the next one could take for its own. Two calls that MPI makes
for all of its ranks at once are needed: MPI_Init, where the program has not made it, and the one
that makes a communicator for messages between nodes. Each runs on a thread, which is left behind
at the deadline; the next ``init`` waits for the same call.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ringcoll.bootstrap.contract import Bootstrap, SingleBootstrap, mpi_running
from ringcoll.bootstrap.launcher import (
    OPEN_MPI,
    Launcher,
    check_library,
    check_world,
    launched_rank,
    launcher_of,
    one_host,
)
from ringcoll.bootstrap.overlap import LAUNCHER, check, enter
from ringcoll.bootstrap.tcp import id_bootstrap, unique_id
from ringcoll.errors import ArgumentTypeError, DeadlineError, MachineError
from ringcoll.folders import pip_install

_ID = 32749  # the reserved tag; MPI promises tags up to 32767
_SLEEP = 1e-3  # seconds between probes
_FINALIZING, _LOST = 60.0, 2.0  # seconds for MPI_Finalize where a rank may come, and where not

_kept: list[Any] = []  # messages that MPI has not yet sent
_begun: list[float] = []  # seconds that the last init over MPI may take; < 0: it has succeeded
_calls: dict[object, _Call] = {}  # those that have not ended
_lock = threading.Lock()


_INIT, _FINALIZE = "MPI_Init", "MPI_Finalize"


class _Call:
    """A call of MPI that waits for other ranks and has no deadline, on a thread of its own."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function, self.result = function, None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="ringcoll MPI", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error


def within(
    deadline: float, key: object, function: Callable[[], Any], check: Callable[[], None]
) -> Any:
    """What a call of MPI returns that all of its ranks have to make.

    At the deadline, or when ``check`` raises, it is left behind; who comes with the same ``key``
    later waits for that call.
    """
    started = time.monotonic()
    with _lock:
        call = _calls.get(key) or _calls.setdefault(key, _Call(function))
    while call.thread.is_alive():
        check()
        if time.monotonic() > deadline:
            rank = launched_rank(os.environ)
            raise DeadlineError(
                f"init: {'this rank' if rank is None else f'rank {rank}'} waited "
                f"{time.monotonic() - started:.3g} s in {key}: did every rank call init()?"
            )
        call.thread.join(_SLEEP)
    _calls.pop(key, None)  # unless another thread has waited for it too
    if call.error is not None:
        raise MachineError(f"init: {key} failed: {call.error}") from call.error
    return call.result


def left_behind() -> list[str]:
    """The calls of MPI that have not ended: MPI_Finalize would wait for them for ever."""
    calls = ((key, call) for key, call in _calls.items() if key != _FINALIZE)
    return [str(key) for key, call in calls if call.thread.is_alive()]


def unsettled(timeout: float) -> None:
    """Ranks begin that share MPI: until they have, MPI_Finalize is not waited for without end.

    A rank that is only late would be killed if the others left before it.
    """
    _begun[:] = [max(timeout, _FINALIZING)]


def settled(*, lost: bool = False) -> None:
    """All ranks have begun, and MPI_Finalize has them all; or one is ``lost`` and will not come."""
    _begun[:] = [_LOST if lost else -abs(seconds) for seconds in _begun]


def finalize_within(*, failed: bool) -> bool:
    """Whether MPI_Finalize ends in time, where an ``init`` over MPI or a rank since has ``failed``.

    It would wait for ranks that have ended, or left without it. Elsewhere true at once.
    """
    mpi = mpi_running()
    doubt = bool(_begun) and (failed or _begun[0] > 0)
    if mpi is None or not doubt or sys.modules["mpi4py"].rc.finalize is False:
        return True
    finalize = ctypes.CDLL(mpi.__file__).MPI_Finalize
    try:
        within(time.monotonic() + abs(_begun[0]), _FINALIZE, finalize, lambda: None)
    except (DeadlineError, MachineError):
        return False
    return True


def load_mpi(deadline: float = math.inf, check: Callable[[], None] = lambda: None) -> Any:
    """mpi4py's MPI module, initialized."""
    try:
        world = launcher_of(os.environ)
        if world is not None and (world.nranks > 1 or world.variable == OPEN_MPI):
            _initialize(world, deadline, check)
        from mpi4py import MPI
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


def library_of(mpi: Any) -> str:
    """The MPI library's name and version, a line."""
    return str(mpi.Get_library_version()).splitlines()[0].strip("\0 ")


def _initialize(world: Launcher, deadline: float, check: Callable[[], None]) -> None:
    """Import mpi4py, and make its MPI_Init where it can be left: mpi4py's own holds the GIL."""
    if _INIT not in _calls:
        if "mpi4py.MPI" in sys.modules:
            return
        import mpi4py

        settings = mpi4py.rc
        wanted = settings.initialize, settings.finalize
        if wanted[0] in (True, "yes"):
            settings.initialize = False
            settings.finalize = True if wanted[1] is None else wanted[1]
        try:
            from mpi4py import MPI
        finally:
            settings.initialize, settings.finalize = wanted
        if wanted[0] not in (True, "yes") or MPI.Is_initialized():
            return
        check_library(world, library_of(MPI), os.environ)
    within(deadline, _INIT, _enter_mpi, check)


def _enter_mpi() -> None:
    from mpi4py import MPI, rc

    level = rc.thread_level if rc.threads else "single"
    required = int(getattr(MPI, f"THREAD_{level.upper()}"))
    code = ctypes.CDLL(MPI.__file__).MPI_Init_thread(
        None, None, required, ctypes.byref(ctypes.c_int())
    )
    if code:
        raise MachineError(f"error {code}")
    if rc.errors == "exception":
        MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
        MPI.COMM_SELF.Set_errhandler(MPI.ERRORS_RETURN)


def is_mpi_communicator(candidate: object) -> bool:
    """Whether this is an mpi4py communicator; loads nothing."""
    package = sys.modules.get("mpi4py.MPI")
    return package is not None and isinstance(candidate, package.Comm)


class _NewerId(Exception):
    """Rank 0 has begun anew."""


def mpi_bootstrap(
    communicator: Any | None, timeout: float, environ: Mapping[str, str] = os.environ
) -> Bootstrap:
    """The ranks of an MPI communicator, mpi4py's; None takes the world."""
    deadline = time.monotonic() + timeout
    mpi = load_mpi(deadline)
    given = mpi.COMM_WORLD if communicator is None else communicator
    if given == mpi.COMM_NULL or not isinstance(given, mpi.Intracomm):
        raise ArgumentTypeError(
            f"bootstrap must be an MPI intracommunicator with this process in it, not {given}"
        )
    check_world(launcher_of(environ), mpi.COMM_WORLD.Get_size(), library_of(mpi))
    rank, nranks = given.Get_rank(), given.Get_size()
    if nranks == 1:
        return SingleBootstrap()
    enter(LAUNCHER)
    unsettled(timeout)
    try:
        if rank == 0:
            made = unique_id("127.0.0.1" if one_host(environ) else None)
            _send(mpi, given, made)
            return id_bootstrap(made, 0, nranks, timeout, once=True)
        while True:
            made = _received(mpi, given, deadline, timeout)
            begun = max(deadline, time.monotonic() + _SLEEP) - timeout
            news = partial(_newer, given)
            try:
                return id_bootstrap(made, rank, nranks, timeout, once=True, news=news, begun=begun)
            except _NewerId:
                continue
    except mpi.Exception as error:
        raise MachineError(f"init: MPI could not carry a message: {error}") from error


def _send(mpi: Any, given: Any, text: str) -> None:
    payload = text.encode()
    calls = [given.Isend([payload, mpi.BYTE], rank, _ID) for rank in range(1, given.Get_size())]
    with _lock:
        _kept[:] = [(call, text) for call, text in _kept if not call.Test()]
        _kept.extend((call, payload) for call in calls if not call.Test())


def _received(mpi: Any, given: Any, deadline: float, timeout: float) -> str:
    """The newest id that rank 0 has sent."""
    text = b""
    while True:
        status = mpi.Status()
        message = given.Improbe(0, _ID, status)
        if message is not None:
            received = bytearray(status.Get_count(mpi.BYTE))
            message.Recv([received, mpi.BYTE])
            text = bytes(received)
        elif text:
            return text.decode("ascii", "replace")
        elif time.monotonic() > deadline:
            raise DeadlineError(
                f"init: rank {given.Get_rank()} of {given.Get_size()} waited {timeout:.3g} s over "
                "MPI for rank 0: no message came; did every rank call init()?"
            )
        else:
            check(joined=False)
            time.sleep(_SLEEP)


def _newer(given: Any) -> None:
    if given.Iprobe(0, _ID):
        raise _NewerId
