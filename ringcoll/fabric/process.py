"""Ranks that are processes of one host: memory by memfd, deaths by pidfd, waits that yield."""

from __future__ import annotations

import contextlib
import os
import struct
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count

from ringcoll import finalize
from ringcoll.bootstrap.contract import Bootstrap
from ringcoll.errors import AbortedError, MachineError
from ringcoll.fabric.base import Fabric, closing_if_it_fails
from ringcoll.fabric.control import CONTROL_BYTES, Control, Exchange
from ringcoll.fabric.identity import compare, identity
from ringcoll.fabric.liveness import Process, ProcessMonitor, State, Status
from ringcoll.fabric.mapping import Gather, map_all, outcome, report, texts_of, together
from ringcoll.fabric.poll import LivenessTimer, spins_of
from ringcoll.fabric.rendezvous import Rendezvous, waiting_for
from ringcoll.host.fence import fence_of
from ringcoll.host.limits import no_descriptor

_exit_keys = count(1)
_SHORT = 200  # characters of a failure, which are a part of one post


class ProcessFabric(Fabric):
    """One process's view of the ranks of a communicator; made by :func:`process_fabric`."""

    threads = False
    notify = None

    def __init__(
        self,
        rank: int,
        timeout: float,
        controls: Sequence[Control],
        processes: Sequence[Process],
    ) -> None:
        self.rank, self.nranks = rank, len(controls)
        self.timeout = timeout
        self.fence = fence_of()
        different = len({process.pid for process in processes})
        self.spins = spins_of(different)
        # Where these are the ranks of one of several nodes, messages call them otherwise, and the
        # other nodes' ranks may fail too.
        self.names = range(self.nranks)
        self.check_beyond: Callable[[], None] | None = None
        self.controls, self.processes = tuple(controls), tuple(processes)
        self.mixed = different < self.nranks
        self._own = controls[rank]
        self._monitor = ProcessMonitor(self._others())
        self._timer = LivenessTimer(self._own.alarm)
        self._exchange = Exchange([control.calls for control in controls], rank)
        self._seen: dict[int, str] = {}
        self._meeting = False  # whether this rank is in an exchange or a rendezvous
        self._exit_key = next(_exit_keys)
        # Collected without close(): peers that wait for this rank must not wait for ever.
        self._forget = weakref.finalize(self, _collected, self._own, os.getpid())
        self._forget.atexit = False

    def _others(self) -> dict[int, Process]:
        return {rank: p for rank, p in enumerate(self.processes) if rank != self.rank}

    # -- memory and the control plane ----------------------------------------------------------

    def share(self, nbytes: int, *, what: str) -> list[memoryview]:
        """Contribute a segment and map everybody's; refused by all where memory is short."""
        self._require_memory(nbytes, what)
        return map_all(self.rank, nbytes, self.texts(what), self.deadline(), what)[0]

    def allgather(
        self, payload: bytes, *, what: str, timeout: float | None = None, call: str = ""
    ) -> list[bytes]:
        """Every rank's payload, through the mailboxes of the control segments.

        ``call`` is what messages name where ``what`` is not to be compared here.
        """
        self.check()
        started, deadline = time.monotonic(), self.deadline(timeout)
        wait = partial(self._await_all, call=call or what, started=started, deadline=deadline)
        self._meeting = True
        try:
            return self._exchange.allgather(payload, what, wait, self.entered)
        finally:
            self._meeting = False

    def conclude(self, what: str) -> None:
        """Meet all ranks, whatever has become of those that have come already."""
        deadline, intact = self.deadline(), self._intact()
        wait = partial(self._await_members, what=what, deadline=deadline, intact=intact)
        self._exchange.allgather(b"", what, wait, self.entered)

    def ahead(self) -> dict[int, tuple[str, int]]:
        """The calls of the control plane in which other processes wait for this rank."""
        try:
            found = {rank: (what, n) for rank, (what, n, _) in self._exchange.ahead().items()}
        except struct.error:
            return {}
        # Another thread looks: parts of an exchange that is under way have no header.
        return {} if self._meeting else {**found, **self.rendezvous()}

    def rendezvous(self) -> dict[int, tuple[str, int]]:
        """Those that wait for this rank in a rendezvous, unless that follows a loss."""
        found = waiting_for(self.controls, self.rank, self._seen)
        return found if found and self._intact() else {}

    def posted(self) -> dict[int, bytes]:
        """The payloads of other ranks that have come to the next exchange."""
        return {rank: payload for rank, (_, _, payload) in self._exchange.ahead().items()}

    # -- liveness ------------------------------------------------------------------------------

    @property
    def alarm(self) -> memoryview:
        """The word of this rank that is not zero when a rank has failed."""
        return self._own.alarm

    def check(self) -> None:
        """Read one word of this rank's memory, and every 20 ms who has died."""
        timer = self._timer
        if self._ended:
            self._require_open()
        if timer.alarm[0] or time.monotonic() >= timer.due:  # saves a call
            timer.tick(self.check_failures)

    @property
    def liveness(self) -> LivenessTimer:
        """Once the fabric has ended it is always due."""
        return self._timer

    def _end(self, state: State) -> None:
        super()._end(state)
        self._timer.stop()

    def check_failures(self) -> None:
        """Raise if a rank has died or aborted, on another node too where one is waited for."""
        if self.check_beyond is not None:
            self.check_beyond()
        super().check_failures()

    def _statuses(self) -> Mapping[int, Status]:
        # Before the states: a rank declares that it leaves before its process ends.
        dead = self._monitor.dead()
        found = {}
        for rank, control in enumerate(self.controls):
            state = control.state
            reason = control.reason if state.failed else ""
            death = f"its process {self.processes[rank].pid} is gone" if rank in dead else ""
            if state.failed and control.left:
                death = death or "it has closed its communicator"
            found[rank] = Status(state, control.since, reason, death)
        return found

    def abort(self, reason: str, *, error: type[BaseException] = AbortedError) -> None:
        """Store the reason in this rank's memory and raise everybody's alarm."""
        if self._ended:
            return
        self._own.declare(State.of(error), reason)
        if self._own.state.failed:
            for control in self.controls:
                control.alert()

    # -- the end -------------------------------------------------------------------------------

    def _declare(self, state: State) -> None:
        self._own.declare(state)

    def close(self) -> None:
        """Leave and unmap the control segments; shared memory lives on in its views."""
        self.leave()
        finalize.resolve(self._exit_key)
        self._release()

    def _release(self) -> None:
        self._forget.detach()
        self.controls, self.processes = (), ()
        self._own = Control(memoryview(bytearray(CONTROL_BYTES)), None)
        self._timer.stop()
        self._monitor = ProcessMonitor({})
        self._exchange = Exchange([], 0)

    # -- children ------------------------------------------------------------------------------

    def subset(
        self,
        members: Sequence[int],
        *,
        what: str,
        whole: Sequence[int] = (),
        beyond: Callable[[], None] = lambda: None,
    ) -> Fabric:
        """Meet the members over the control segments, then begin anew among them.

        ``whole``: all members, of other nodes too, which those that meet have in common; ``beyond``
        raises if one of another node is lost.
        """
        ranks = self._members(members, what)
        processes = [self.processes[rank] for rank in ranks]
        deadline, intact = self.deadline(), self._intact()
        wait = partial(
            self._await_members, what=what, deadline=deadline, intact=intact, beyond=beyond
        )
        self._meeting = True
        met = None
        try:
            met = Rendezvous(
                *(self.controls, ranks, self.rank, self._seen, what, wait, self.entered, whole)
            )
            fabric = process_fabric(met, timeout=self.timeout, what=what, processes=processes)
        except Exception as error:
            if met is not None:
                with contextlib.suppress(Exception):  # of members that are lost or late meanwhile
                    met.fail(report(error, _SHORT))
            raise
        finally:
            self._meeting = False
            self._own.subsets.clear()
        finalize.resolve(self._exit_key)
        return fabric

    def hold_exit(self) -> None:
        """Under MPI, remember the processes that this one meets in MPI_Finalize."""
        own, controls = self._own, self.controls

        def ready() -> bool:
            # A rank that has dropped its half-made fabric says no more there.
            return all(c.exiting or c.state is State.EXITED for c in controls)

        meeting = finalize.Exit(own.exit, ready, ProcessMonitor(self._others()).dead)
        processes: set[object] = {process.pid for process in self.processes}
        if self.mixed:  # each rank of a process lets the others know
            processes.add(f"rank {self.rank}")
        finalize.hold(frozenset(processes), meeting)


def process_fabric(
    bootstrap: Bootstrap,
    *,
    timeout: float,
    what: str = "init",
    processes: Sequence[Process] | None = None,
    compared: bool = False,
) -> ProcessFabric:
    """A fabric among processes of one host; collective among the ranks of the bootstrap.

    ``processes`` are the ranks' where they are watched already; their identities need no comparison
    if they are ``compared``.
    """
    gather = texts_of(bootstrap)
    if not compared:
        compare(_identities(gather, what), what)
    deadline = time.monotonic() + timeout
    views, handles = map_all(bootstrap.rank, CONTROL_BYTES, gather, deadline, what)

    def make() -> ProcessFabric:
        fence = fence_of()
        for rank, view in enumerate(views):
            if len(view) < CONTROL_BYTES:
                raise MachineError(f"{what}: rank {rank} has sent {len(view)} bytes of memory")
        controls = [Control(view, fence) for view in views]
        watched = processes or [Process(handle.pid) for handle in handles]
        return ProcessFabric(bootstrap.rank, timeout, controls, watched)

    fabric = together(gather, make)
    with closing_if_it_fails(fabric):
        if processes is None:
            fabric.hold_exit()
        # The control plane's first round: after it nobody needs the bootstrap any more.
        fabric.allgather(b"", what=what)
        finalize.track(fabric)
    return fabric


def _identities(gather: Gather, what: str) -> list[Mapping[str, str]]:
    """What the ranks are; one that cannot say what it is fails on all."""
    own, failure = {}, None
    try:
        own = identity()
    except OSError as error:
        failure = no_descriptor(error, what) or MachineError(f"{what}: {error}")
    return outcome(gather, own, failure)


def _collected(own: Control, pid: int) -> None:
    if os.getpid() == pid:
        own.declare(State.EXITED)
