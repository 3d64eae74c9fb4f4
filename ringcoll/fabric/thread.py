"""Ranks that are threads of one process, or take turns in one.

Everything lives in one shared world; ranks wake each other by conditions and never spin.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ringcoll import finalize
from ringcoll.bootstrap.contract import named
from ringcoll.errors import (
    AbortedError,
    ArgumentError,
    DeadlineError,
    MachineError,
    MismatchError,
    RankLostError,
    message_of,
)
from ringcoll.fabric.base import Fabric, Ready
from ringcoll.fabric.control import compare_calls
from ringcoll.fabric.liveness import State, Status
from ringcoll.fabric.world import World
from ringcoll.host.fence import fence_of
from ringcoll.host.limits import start
from ringcoll.host.pages import whole_pages
from ringcoll.host.shm import private

T = TypeVar("T")

_NAP = 0.5  # seconds between looks at the clock of a waiter that nobody wakes
OURS = "ringcoll "  # how the names of the library's own threads begin
_LOOK = 0.5  # seconds between looks for a signal
_ENDING = 0.5  # seconds for the calls of interrupted ranks to end
_GRACE = 1.0  # seconds after a thread's end in which another may take its rank over


class _Local(threading.local):
    """What is this thread's alone: its number may be a dead one's, and to read this takes 50 ns."""

    mark: object = None


_local = _Local()


class ThreadFabric(Fabric):
    """One rank's view of a world of threads; made by :func:`thread_fabrics`."""

    threads = True

    def __init__(self, world: World, rank: int, timeout: float) -> None:
        self.rank, self.nranks = rank, world.nranks
        self.names = range(world.nranks)
        self.timeout = timeout
        # The interpreter's own lock orders what threads store; without it a fence must.
        self.fence = None if getattr(sys, "_is_gil_enabled", lambda: True)() else fence_of()
        self._world = world
        self._condition = world.conditions[rank]
        world.fabrics[rank] = self
        self._round = 0
        self._caller = object()  # the mark of the thread that made the last call
        self._gone: set[threading.Thread] = set()  # that had ended before this one came
        self._older: set[threading.Thread] = set()  # that were there then
        self._look_at = 0.0  # when threads that have ended are looked for next
        self._seen: dict[threading.Thread, float] = {}  # when they were first seen to have ended
        self._forget = weakref.finalize(self, _collected, world, rank)
        self._forget.atexit = False
        finalize.track(self)

    def notify(self, rank: int) -> None:
        """Wake ``rank``, which may wait for a flag that was just stored."""
        condition = self._world.conditions[rank]
        with condition:
            condition.notify_all()

    def share(self, nbytes: int, *, what: str) -> list[memoryview]:
        """Contribute memory of this process and see everybody's."""
        self._require_memory(nbytes, what)
        mine: memoryview | MachineError
        try:
            mine = private(nbytes, what)[: whole_pages(nbytes)]
        except MachineError as error:
            mine = error
        parts = self._swap(mine, what, None)
        for rank, part in enumerate(parts):
            if isinstance(part, MachineError):
                raise type(part)(f"rank {rank} failed: {part}") from part
        return parts

    def expose(self, memory: memoryview, *, what: str) -> list[memoryview] | None:
        """Hand the memory itself to the other threads."""
        return self._swap(memory, what, None)

    def allgather(self, payload: bytes, *, what: str, timeout: float | None = None) -> list[bytes]:
        """Every rank's payload."""
        return self._swap(bytes(payload), what, timeout)

    def ahead(self) -> dict[int, tuple[str, int]]:
        """The calls of the control plane in which other threads wait for this rank."""
        found = self._world.waiting(self._round, self.rank)
        return found if found and self._intact() else {}

    def conclude(self, what: str) -> None:
        """Meet all ranks, whatever has become of those that have come already."""
        wait = partial(self._await_members, what=what, intact=self._intact())
        self._swap(None, what, None, wait)

    def _swap(
        self, value: Any, what: str, timeout: float | None, wait: Callable[..., None] | None = None
    ) -> list[Any]:
        """Every rank's object, in rank order; collective."""
        if wait is None:
            self.check()
            wait = partial(self._await_all, call=what, started=time.monotonic())
        number = self._round
        self._round += 1
        round_ = self._world.contribute(number, self.rank, what, value, self.entered)

        def missing() -> list[int]:
            return [rank for rank in range(self.nranks) if rank not in round_.values]

        def full() -> bool:
            return len(round_.values) == self.nranks

        wait(full, missing, deadline=self.deadline(timeout))
        return self._world.collect(number, self.rank, round_)

    def _sleep(
        self,
        ready: Ready,
        deadline: float,
        describe: Callable[[], str],
        check: Callable[[], None],
        *,
        alarmed: bool = True,
    ) -> None:
        with self._condition:
            while not ready():
                try:
                    check()
                except (RankLostError, DeadlineError, MismatchError):
                    if ready():  # the flag came before the failure
                        return
                    raise
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineError(describe())
                self._condition.wait(min(left, _NAP))

    def _statuses(self) -> Mapping[int, Status]:
        found = dict(enumerate(self._world.statuses))
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _NAP / 2
            for rank, threads in list(self._world.threads.items()):
                status = found[rank]
                if not status.lost and rank != self.rank and self._has_left(rank, threads):
                    self._look_at = 0.0
                    found[rank] = status.ended()
        return found

    def _has_left(self, rank: int, threads: tuple[threading.Thread, ...]) -> bool:
        """Whether the threads of a rank have ended, the last after this one came, for some time."""
        last = threads[-1]
        if any(thread.is_alive() for thread in threads) or last in self._gone:
            return False
        other = self._world.fabrics.get(rank)
        busy = other is not None and other.busy()  # with asynchronous calls that it has left behind
        if busy or self._may_be_taken_over():
            self._seen.pop(last, None)
            return False
        return time.monotonic() - self._seen.setdefault(last, time.monotonic()) >= _GRACE

    def _may_be_taken_over(self) -> bool:
        """Whether there is a thread, newer than this one, that has made nobody's calls yet."""
        callers = {thread for threads in list(self._world.threads.values()) for thread in threads}
        new = {*threading.enumerate()} - callers - self._older
        return not all(thread.name.startswith(OURS) for thread in new)

    def drop(self, ranks: Collection[int]) -> None:
        """Declare that these ranks have left: another may not have looked at their threads yet."""
        for rank in ranks:
            self._world.drop(rank)

    def adopt(self) -> None:
        """Note that this thread makes this rank's calls; the library's own count for nobody."""
        thread, known = threading.current_thread(), self._world.threads
        _local.mark = self._caller = _local.mark or object()
        mine = known.get(self.rank, ())
        if not thread.name.startswith(OURS) and thread not in mine:
            known[self.rank] = *(t for t in mine if t.is_alive()), thread
            self._older = {*threading.enumerate()}
            self._gone = {last for *_, last in list(known.values()) if not last.is_alive()}

    def check(self) -> None:
        """Read whether any rank has raised the alarm."""
        if _local.mark is not self._caller:
            self.adopt()
        if self._ended:
            self._require_open()
        if self._world.alarm:
            self.check_failures()

    def abort(self, reason: str, *, error: type[BaseException] = AbortedError) -> None:
        """Give up, and wake all."""
        self._declare(State.of(error), reason)

    def _declare(self, state: State, reason: str = "") -> None:
        if not self._ended:
            self._world.declare(self.rank, state, reason)

    def exited(self) -> None:
        """The process ends, and all of its threads with it."""

    def close(self) -> None:
        """Leave; shared memory lives on in its views."""
        self.leave()
        self._release()

    def _release(self) -> None:
        self._forget.detach()

    def subset(self, members: Sequence[int], *, what: str) -> Fabric:
        """Meet the members in the shared world, and make them a new one."""
        ranks, deadline, intact = self._members(members, what), self.deadline(), self._intact()
        rendezvous = self._world.join(ranks, self.rank, what, self.entered)

        def missing() -> list[int]:
            return [rank for rank in ranks if rank not in rendezvous.calls]

        def met() -> bool:
            return rendezvous.world is not None

        try:
            self._await_members(met, missing, what, deadline, intact)
        except (RankLostError, DeadlineError):
            self._world.withdraw(rendezvous, self.rank)
            raise
        compare_calls([rendezvous.calls[rank] for rank in ranks])
        if rendezvous.world is None:
            raise DeadlineError(f"{what}: the other members did not join rank {self.rank} in time")
        return ThreadFabric(rendezvous.world, ranks.index(self.rank), self.timeout)


def thread_fabrics(nranks: int, timeout: float = 60.0) -> list[Fabric]:
    """The fabrics of ``nranks`` ranks in this process, one per rank."""
    if nranks < 1:
        raise ArgumentError(f"a communicator has at least 1 rank, not {nranks}")
    if not timeout > 0 or math.isnan(timeout):
        raise ArgumentError(f"timeout must be a positive number of seconds, not {timeout}")
    world = World(nranks)
    return [ThreadFabric(world, rank, timeout) for rank in range(nranks)]


def each(fabrics: Sequence[Fabric], function: Callable[[Fabric], T]) -> list[T]:
    """Call ``function`` for every fabric at once, one short-lived thread each.

    It makes collective calls for ranks that take turns in one thread. The first failure in the
    order of ``fabrics`` is raised.
    """
    results: dict[int, T] = {}
    failures: dict[int, BaseException] = {}

    def call(index: int) -> None:
        try:
            results[index] = function(fabrics[index])
        except BaseException as error:
            failures[index] = error

    if len(fabrics) == 1:
        return [function(fabrics[0])]
    indices = range(len(fabrics))  # named, since these threads make nobody's calls
    threads = [RankThread(call, i, f"{OURS}init {i}") for i in indices]
    start_all(threads, lambda index, reason: fabrics[index].abort(reason))
    if failures:
        # Who was aborted only reports another's failure.
        raise min(failures.items(), key=lambda kept: (isinstance(kept[1], AbortedError), kept[0]))[
            1
        ]
    return [results[index] for index in range(len(fabrics))]


class RankThread(threading.Thread):
    """A thread of a rank, which calls ``function(argument)``; :meth:`await_end` joins it."""

    def __init__(self, function: Callable[[T], object], argument: T, name: str) -> None:
        super().__init__(target=function, args=(argument,), name=name, daemon=True)
        self._over = threading.Event()

    def run(self) -> None:
        """Call the function."""
        try:
            super().run()
        finally:
            self._over.set()

    def await_end(self, seconds: float | None = None) -> bool:
        """Wait for its end, if it has begun, but no longer; whether it does not run any more.

        Before Python 3.13 a ``join`` that a signal ends takes a thread for ended that runs on. So
        only one is joined that is over.
        """
        if self.ident is None:
            return True
        over = self._over.wait(_LOOK if seconds is None else seconds)
        while seconds is None and not over:  # a signal that another thread got wakes nobody here
            over = self._over.wait(_LOOK)
        if over:
            self.join()
        return over


def start_all(threads: Sequence[RankThread], abort: Callable[[int, str], None]) -> None:
    """Start the threads of all ranks, and wait for their ends; all abort if one cannot start.

    Ctrl-C, or what another signal handler raises, aborts all ranks too: their calls end at once,
    and those that run the program's own code are named and left behind.
    """
    __tracebackhide__ = True
    try:
        for rank, thread in enumerate(threads):
            start(thread.start, f"rank {rank} of {len(threads)}")
        for thread in threads:
            thread.await_end()
    except BaseException as error:
        for rank in range(len(threads)):
            abort(rank, message_of(error) or f"interrupted by {type(error).__name__}")
        late = math.inf if isinstance(error, MachineError) else time.monotonic() + _ENDING
        running = [
            rank
            for rank, thread in enumerate(threads)
            if not thread.await_end(None if late == math.inf else max(0.0, late - time.monotonic()))
        ]
        if running and type(error) is KeyboardInterrupt:
            places = ", ".join(f"rank {rank} at {_place(threads[rank])}" for rank in running)
            error.args = (
                f"{named(running)} of {len(threads)} had not returned from the program's own code: "
                f"{places}; these threads end with the process",
            )
        raise


def _place(thread: threading.Thread) -> str:
    """File and line of a running thread, the innermost outside of Python's own library."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "its end"
    import traceback  # for a report alone

    stack = traceback.extract_stack(frame)
    library = str(Path(threading.__file__).parent)
    own = [at for at in stack if not at.filename.startswith(library) or "-packages" in at.filename]
    at = (own or stack)[-1]
    return f"{Path(at.filename).name}:{at.lineno}, {at.line}"


def _collected(world: World, rank: int) -> None:
    """A fabric was collected without close(): nobody may wait for it for ever."""
    status = world.statuses[rank]
    if status.state is State.OPEN:
        status.state = State.EXITED
