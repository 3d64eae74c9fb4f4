"""The process that the user started: it starts the ranks' launcher, and ends the whole job in time.

The launcher is a child in a session of its own, so that a terminal's Ctrl-C reaches this process
alone. Ranks report to it through a pipe: that they have begun, have rows to save, have failed, or
end. An interruption is passed to the rank that has rows; the others serve its last calls. After
``GRACE`` seconds, and at once where there are no rows, every descendant is killed: this process is
the subreaper of its descendants, so that none is lost when the launcher dies. When this process
dies, the kernel kills the launcher and, with the launcher, the ranks.

Ranks wait in loops. Where many share a core, this process has the share of one of them but has to
look at all: it stops the job first, and has the core to itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from ringcoll import interrupts
from ringcoll.bench.launch import kept, marker_of
from ringcoll.bench.leftovers import leftovers, remove, shared_memory
from ringcoll.bootstrap.launcher import launcher_ended, launcher_of
from ringcoll.host.limits import waitable

__all__ = ["GRACE", "Channel", "limit", "supervise"]

GRACE = 2.0
"""Seconds that a job has to end by itself once it is interrupted or a rank has failed."""

_LAUNCHER_SECONDS = 0.5  # for the launcher, to clean up after SIGTERM
_KILL_SECONDS = 1.0
_POLL_SECONDS = 0.01
_MESSAGE_BYTES = select.PIPE_BUF  # a write of so many is not mixed with others'
# Of a rank or of the launcher's own processes, as MPICH and Open MPI report them.
_DEATHS = ("BAD TERMINATION", "exited on signal", "process manager error")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Channel:
    """A rank's way to report to the supervisor; ``marker`` of None: there is no supervisor."""

    def __init__(self, marker: str | None) -> None:
        pipe, _, errors = (marker or "").partition(",")
        self._fd = kept(pipe)
        if marker is None:
            if launcher_of(os.environ) is not None:  # the user's: its ranks end with it
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
                if launcher_ended(os.environ):  # before this process asked for the signal
                    os._exit(2)
            return
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() in (1, int(pipe.partition(":")[0])):
            os._exit(2)  # the launcher has died: the subreaper is the parent now
        stream = kept(errors)
        if stream is not None:
            # Not descriptor 2: MPICH writes pages there when a rank dies during its call, which
            # the supervisor says in a line.
            sys.stderr = os.fdopen(stream, "w", buffering=1, errors="backslashreplace")

    def send(self, kind: str, text: object = "") -> bool:
        """Report to the supervisor; False where there is none."""
        if self._fd is None:
            return False
        words = " ".join(str(text).split())
        message = f"{kind} {os.getpid()} {words}".encode()[: _MESSAGE_BYTES - 1]
        try:
            os.write(self._fd, message + b"\n")
        except OSError:
            return False
        return True


def supervise(
    start: Callable[[str], int], name: str, *, quiet: bool, command: str = "bench"
) -> int:
    """Call ``start(marker)`` in a child process and end its job in time; the exit status.

    Args:
        start: starts the ranks with ``--supervisor marker``; its result is the child's status.
        name: what the child is, for the error of its death.
        command: of ringcoll, for its errors.
        quiet: keep what the child prints until the end, and show it if nothing else explains it.

    """
    return _Job(name, command, quiet=quiet).run(start)


class _Job:
    def __init__(self, name: str, command: str, *, quiet: bool) -> None:
        self._name, self._command = name, command
        self._reading, self._writing = os.pipe()
        self._printed = os.memfd_create("ringcoll-launcher") if quiet else None
        self._child = 0
        self._others = frozenset(_children().get(os.getpid(), ()))
        self._status: int | None = None
        self._ranks: dict[int, int] = {}  # by process id, a descriptor that waits for its end
        self._rows: int | None = None  # the rank that has rows to save
        self._errors: list[str] = []
        self._died = ""
        self._signal: int | None = None
        self._deadline = float("inf")
        self._files: set[str] = set()  # that ranks would remove as they end
        self._pending = b""

    def run(self, start: Callable[[str], int]) -> int:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {*_SIGNALS, signal.SIGCHLD})
        before = self._handle()
        try:
            self._fork(start, blocked)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            while self._status is None and time.monotonic() < self._deadline:
                self._step()
            self._end()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0)
            os.close(self._reading)
            os.close(self._writing)
        return self._conclude()

    def _handle(self) -> dict[int, Any]:
        """Make messages of signals; the handlers that were there before."""

        def report(number: int, _: FrameType | None) -> None:
            with contextlib.suppress(OSError):
                os.write(self._writing, f"signal {number}\n".encode())

        os.set_blocking(self._writing, False)
        before: dict[int, Any] = {}
        for number in (*_SIGNALS, signal.SIGCHLD):
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, report)
        return before

    def _fork(self, start: Callable[[str], int], blocked: set[int | signal.Signals]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        markers = [marker_of(self._writing)]
        if self._printed is not None:
            markers.append(marker_of(os.dup(2)))
        parent = os.getpid()
        self._child = os.fork()
        if self._child:
            return
        status = 2
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()
            for number in (*_SIGNALS, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            if self._printed is not None:
                os.dup2(self._printed, 2)
            if os.getppid() == parent:
                status = start(",".join(markers))
        finally:
            os._exit(status)

    def _step(self) -> None:
        """Wait for a message, the end of a rank, or the deadline."""
        poll = select.poll()
        poll.register(self._reading, select.POLLIN)
        ends = {fd: pid for pid, fd in self._ranks.items()}
        for fd in ends:
            poll.register(fd, select.POLLIN)
        left = waitable(self._deadline - time.monotonic())
        for fd, _ in poll.poll(None if left is None else max(0.0, left * 1e3)):
            if fd == self._reading:
                self._read()
        ended = [pid for fd, pid in ends.items() if pid in self._ranks and _is_ready(fd)]
        self._read()  # the last messages of those
        died = [pid for pid in ended if pid in self._ranks]
        for pid in died:
            os.close(self._ranks.pop(pid))
        if died and not self._died:
            # The launcher may have killed the others by now: then nobody knows who was first.
            whose = f"process {died[0]}, a rank," if len(died) == 1 else "a rank"
            self._died = f"{whose} died; the other ranks were ended"
            self._limit()
        self._collect(self._child)  # what it leaves behind can wait for the end

    def _read(self) -> None:
        while _is_ready(self._reading):
            self._pending += os.read(self._reading, 1 << 16)
        *lines, self._pending = self._pending.split(b"\n")
        for line in lines:
            kind, number, *text = line.decode(errors="replace").split(" ", 2)
            self._heed(kind, int(number), "".join(text))

    def _heed(self, kind: str, number: int, text: str) -> None:
        if kind == "signal":
            if number != signal.SIGCHLD:
                self._interrupt(number)
        elif kind == "begin":
            with contextlib.suppress(OSError):
                self._ranks[number] = os.pidfd_open(number)
        elif kind == "rows":
            self._rows = number
        elif kind == "error":
            self._errors.append(text)
            self._limit()
        elif kind == "end":
            fd = self._ranks.pop(number, None)
            if fd is not None:
                os.close(fd)
            if text == "130":
                self._signal = self._signal or signal.SIGINT
            if text not in ("0", "1"):
                self._limit()

    def _interrupt(self, number: int) -> None:
        """Let the rank that has rows save them; a second interruption ends everything at once."""
        first, self._signal = self._signal is None, number
        self._deadline = min(self._deadline, time.monotonic())
        if first and self._rows is not None:
            self._note_files()
            if _send(self._rows, signal.SIGINT):
                self._deadline = time.monotonic() + GRACE

    def _limit(self) -> None:
        """A rank has failed: the others have a moment to end, which begins with the first."""
        if self._deadline == float("inf"):
            self._deadline = time.monotonic() + GRACE
            self._note_files()

    def _note_files(self) -> None:
        """Find the files that ranks have now, while no process of the job runs."""
        stopped, _ = self._stop()
        self._files |= leftovers(stopped)
        for pid in stopped:
            _send(pid, signal.SIGCONT)

    def _stop(self) -> tuple[set[int], set[int]]:
        """Stop every process of the job; which they are, and which of them started others."""
        stopped = set(self._ranks)
        for pid in stopped:  # before anything is read: most of those that wait in loops
            _send(pid, signal.SIGSTOP)
        while True:
            children = _children()
            found = [pid for pid in self._reap(children) if pid not in stopped]
            for pid in found:  # the launcher first, which may be starting more
                _send(pid, signal.SIGSTOP)
            stopped.update(found)
            if not found:
                return stopped, {self._child, *children} & stopped

    def _collect(self, pid: int) -> None:
        """Let a child go that has ended; the status of the launcher is kept."""
        with contextlib.suppress(ChildProcessError):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended == self._child:
                self._status = os.waitstatus_to_exitcode(status)

    def _reap(self, children: Mapping[int, list[int]] | None = None) -> list[int]:
        """Collect what has ended; the processes of the job that run."""
        children = _children() if children is None else children
        found, left = [*children.get(os.getpid(), ())], []
        for pid in found:  # which grows
            if pid not in self._others:
                found += children.get(pid, ())
                left.append(pid)
        for pid in left:
            self._collect(pid)
        return [pid for pid in left if _is_alive(pid)]

    def _end(self) -> None:
        """End every process of the job."""
        stopped, starters = self._stop()
        self._files |= leftovers(stopped)
        late = time.monotonic() + _LAUNCHER_SECONDS
        if self._status is None:
            os.kill(self._child, signal.SIGTERM)
        for pid in starters:  # to clean up; the ranks wait for their end
            _send(pid, signal.SIGCONT)
        while self._status is None and time.monotonic() < late:
            self._reap()
            time.sleep(_POLL_SECONDS)
        late = time.monotonic() + _KILL_SECONDS
        while (left := self._reap()) and time.monotonic() < late:
            for pid in left:
                _send(pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)
        if not left:
            remove(self._files)
        self._read()

    def _conclude(self) -> int:
        """Say in one line why the job did not end by itself; the exit status."""
        if self._signal is not None:
            interrupts.tell()
            return 128 + self._signal
        line, printed = self._errors[0] if self._errors else self._died, ""
        if self._printed is not None:
            with os.fdopen(self._printed, "rb") as file:
                file.seek(0)
                printed = file.read().decode(errors="replace")
        died = any(words in printed for words in _DEATHS)
        if not line and (died or (self._status or 0) > 128):
            line = f"a rank or its launcher died; {self._name} ended with status {self._status}"
        if not line and self._status is not None and self._status < 0:
            line = f"{self._name} was killed by {signal.Signals(-self._status).name}"
        if line:
            print(f"ringcoll {self._command}: {line}\n", end="", file=sys.stderr, flush=True)
            return 2
        if printed:
            sys.stderr.write(printed)
        return 2 if self._status is None else self._status


def limit() -> None:
    """From a signal on, end this process after ``GRACE`` seconds, also where it is inside C.

    Python handles a signal between two lines of its main thread.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def wait() -> None:
        while os.read(reading, 1)[0] not in (signal.SIGINT, signal.SIGTERM):
            pass
        remove(shared_memory([os.getpid()]))  # mpiexec gives no rank the time for MPI_Finalize
        # The kernel handles the signal of this timer, whatever Python does.
        signal.setitimer(signal.ITIMER_REAL, GRACE)
        time.sleep(GRACE - _LAUNCHER_SECONDS)
        interrupts.tell()

    threading.Thread(target=wait, name="ringcoll-limit", daemon=True).start()


def _children() -> Mapping[int, list[int]]:
    """The children of each process."""
    found: dict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            found[int(_stat(path)[1])].append(int(path.parent.name))
    return found


def _send(pid: int, number: int) -> bool:
    """Send a signal; False where the process has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _is_alive(pid: int) -> bool:
    try:
        return _stat(Path(f"/proc/{pid}/stat"))[0] not in "ZX"
    except OSError:
        return False


def _stat(path: Path) -> list[str]:
    """A process's state, its parent and so on."""
    return path.read_text(errors="replace").rpartition(")")[2].split()


def _is_ready(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])
