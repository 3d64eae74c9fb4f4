"""The end or fork of a process that holds open fabrics.

At exit every fabric that is still open declares how the process ends: in order, or by an uncaught
error whose text the peers will show. After a fork the child's copies are closed at once, so that
nothing the child does, its exit included, touches what belongs to the parent.

MPI_Finalize waits for all ranks of the world, a dead one too. So a process of an MPI world
announces that it is about to enter it and waits until all others have done so, or until one has
died: then it leaves by ``os._exit``. mpi4py finalizes after the last of Python's own exit
functions, and this module's runs before; an explicit ``MPI.Finalize()`` runs it through an
attribute of MPI_COMM_SELF, whose delete function MPI calls first.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from ringcoll.bootstrap.contract import mpi_running
from ringcoll.errors import AbortedError, Error, RankLostError, message_of

if TYPE_CHECKING:
    from ringcoll.bootstrap.launcher import Launcher

# Seconds for the others to come: long work at the end of one rank is no fault. The bound is for a
# peer that never announces its exit, as when its init failed while this one's did not.
_LONGEST_WAIT = 600.0
_SLEEP = 2e-3  # seconds between looks


class Tracked(Protocol):
    """A fabric, as far as this module needs it."""

    def abort(self, reason: str, *, error: type[BaseException] = AbortedError) -> None:
        """Give up."""

    def exited(self) -> None:
        """The process ends."""

    def mpi_finalized(self) -> None:
        """The program calls MPI.Finalize()."""

    def forked(self) -> None:
        """The process is a child."""


@dataclass(frozen=True, slots=True, eq=False)
class Exit:
    """How ranks meet in MPI_Finalize.

    Args:
        announce: lets the others know that this process is about to enter it.
        ready: whether all others have announced the same.
        dead: which of the others have died.

    """

    announce: Callable[[], None]
    ready: Callable[[], bool]
    dead: Callable[[], Sequence[int]]


_open: weakref.WeakSet[Tracked] = weakref.WeakSet()
_exits: dict[frozenset[object], Exit] = {}  # by the processes; the first of each kind
_unresolved: set[int] = set()  # fabrics with a lost rank that were neither closed nor shrunk
_status: list[int] = []  # what sys.exit was last given, once a rank is known to be dead
_hooked: list[Any] = []  # the attribute of MPI_COMM_SELF
_in_child: list[Any] = []  # the exit function of a child of multiprocessing


def track(fabric: Tracked) -> None:
    """Tell ``fabric`` when this process forks or exits."""
    _open.add(fabric)
    # A child of multiprocessing leaves by os._exit, after exit functions of its own kind.
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None and not _in_child:
        from multiprocessing.util import Finalize

        _in_child.append(Finalize(None, _exit, exitpriority=0))


def unresolved(serial: int) -> None:
    """A fabric has met a death or an abort."""
    _unresolved.add(serial)


def resolve(serial: int) -> None:
    """A fabric that has met a death or an abort was closed or shrunk."""
    _unresolved.discard(serial)


def hold(processes: frozenset[object], meeting: Exit) -> None:
    """Wait for these processes before MPI_Finalize, if they share an MPI world.

    An earlier ``meeting`` of the same processes stays.
    """
    mpi, world = mpi_running(), _launcher()
    # Where ranks have begun without MPI, the program may still use it.
    if (mpi.COMM_WORLD.Get_size() if mpi is not None else world.nranks if world else 1) == 1:
        return
    _exits.setdefault(processes, meeting)
    if mpi is not None and not _hooked:

        def finalizing(*_: object) -> None:  # the communicator, keyval and value of MPI
            _finalizing()
            for fabric in list(_open):
                fabric.mpi_finalized()

        keyval = mpi.Comm.Create_keyval(delete_fn=finalizing)
        mpi.COMM_SELF.Set_attr(keyval, True)
        _hooked.append(keyval)


def note_death() -> None:
    """A rank has died, or may have: from now on the status given to sys.exit must be remembered.

    Python does not pass it on, and ``os._exit`` needs it.
    """
    if _status or not _exits:
        return
    _status.append(0)
    leave = sys.exit

    def recording(status: str | int | None = None, /) -> NoReturn:
        _status[0] = status if isinstance(status, int) else int(status is not None)
        leave(status)

    sys.exit = recording


def uncaught() -> BaseException | None:
    """The error by which this process ends, if it does."""
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return None  # at a prompt, a former line's error
    # On its way out of a child of multiprocessing, or shown already by Python's own hook.
    error = sys.exc_info()[1] or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit) or not isinstance(error, BaseException):
        return None
    return error


def _say(text: str) -> None:
    """Write a line on stderr with the launcher's rank; nothing where no launcher started this.

    mpiexec mixes what its ranks write, and a traceback does not say whose it is.
    """
    world = _launcher()
    if world is not None and world.nranks > 1 and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(f"ringcoll: {_launched()} {text}\n", end="", file=sys.stderr, flush=True)


# Ranks that are threads of one process end without what the next two load.
def _launcher() -> Launcher | None:
    from ringcoll.bootstrap.launcher import launcher_of

    return launcher_of(os.environ)


def _launched() -> str:
    from ringcoll.bootstrap.launcher import launched_rank

    return f"rank {launched_rank(os.environ)}"


def _names_ranks(error: BaseException, text: str) -> bool:
    """Whether the text of an error, which its traceback shows, names this rank or a lost one."""
    if isinstance(error, Error) and re.search(rf" on {_launched()}\b|^{_launched()}(:| of )", text):
        return True
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        if isinstance(one, RankLostError) and str(one) in message_of(error):
            return True  # such as ClosedError after it, and the program's own that quotes it
        seen.add(id(one))
        one = one.__cause__ or one.__context__
    return False


def _exit() -> None:
    error = uncaught()
    if error is not None:
        text = [*message_of(error).splitlines(), ""][0]
        if not _names_ranks(error, text):
            _say(f"(pid {os.getpid()}) ends: uncaught {type(error).__name__}: {text}")
    for fabric in list(_open):
        if error is not None:
            fabric.abort(f"uncaught {type(error).__name__}: {message_of(error)}")
        fabric.exited()
    _finalizing()
    if mpi_running() is None:
        return
    from ringcoll.bootstrap.mpi import finalize_within

    if not finalize_within(failed=bool(_status)):
        _say("ends without MPI_Finalize, which waits for other ranks since one has failed")
        _leave()


def _finalizing() -> None:
    """Return when all ranks are about to enter MPI_Finalize; leave if one never will."""
    mpi = mpi_running()
    if mpi is None and _exits and _unresolved:
        _leave()  # with the status that it would have with MPI
    if mpi is None:
        return
    from ringcoll.bootstrap.mpi import left_behind

    if not (_exits or left_behind()):
        return
    if left_behind():
        _say(f"ends without MPI_Finalize, which would wait for {', '.join(left_behind())}")
        _leave()
    for meeting in _exits.values():
        meeting.announce()
    deadline = time.monotonic() + _LONGEST_WAIT
    while time.monotonic() < deadline:
        dead = {rank for meeting in _exits.values() for rank in meeting.dead()}
        if dead:
            if not _unresolved and uncaught() is None:  # no error has named them
                ranks = ", ".join(map(str, sorted(dead)))
                _say(
                    f"ends without MPI_Finalize: ranks that have ended without it: {ranks} (of "
                    f"those that the launcher started)"
                )
            _leave()
        if all(meeting.ready() for meeting in _exits.values()):
            break
        mpi.COMM_SELF.Iprobe()  # lets messages move that others still wait for
        time.sleep(_SLEEP)
    _exits.clear()


def _leave() -> None:
    """End the process without MPI_Finalize."""
    failed = uncaught() is not None or bool(_unresolved)
    status = _status[0] if _status else 0
    if "logging" in sys.modules:
        sys.modules["logging"].shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(status or int(failed))


def _forked() -> None:
    for fabric in list(_open):
        fabric.forked()
    _open.clear()
    _exits.clear()
    _unresolved.clear()
    _in_child.clear()


os.register_at_fork(after_in_child=_forked)
atexit.register(_exit)
