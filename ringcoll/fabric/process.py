"""Ranks that are processes of one host: memory by memfd, news by pidfd, waits that yield."""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from ringcoll import finalize
from ringcoll.bootstrap.contract import Bootstrap, named
from ringcoll.errors import (
    AbortedError,
    ArgumentError,
    ClosedError,
    DeadlineError,
    Error,
    MachineError,
    RankLostError,
)
from ringcoll.fabric.base import Fabric, chosen
from ringcoll.fabric.control import CONTROL_BYTES, Control, Exchange, State
from ringcoll.fabric.identity import compare, identity
from ringcoll.fabric.mapping import map_all, outcome
from ringcoll.fabric.meeting import Meeting
from ringcoll.fabric.poll import SPINS, Lookout, poll
from ringcoll.fabric.watch import Obituary, Process
from ringcoll.host.fence import fence_of
from ringcoll.host.limits import Available, available, require
from ringcoll.host.pages import PAGE, whole_pages

__all__ = ["ProcessFabric", "process_fabric"]

_serials = count(1)


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
        self.rank = rank
        self.nranks = len(controls)
        self.timeout = timeout
        self.fence = fence_of()
        self.controls = tuple(controls)
        self.processes = tuple(processes)
        self._own = controls[rank]
        others = {peer: process for peer, process in enumerate(processes) if peer != rank}
        self._obituary = Obituary(others)
        self._lookout = Lookout(self._own.alarm)
        self._exchange = Exchange([control.calls for control in controls], rank)
        # Where these are the ranks of one of several nodes: what messages call them, and who else
        # may have news.
        self.names: Sequence[int] = range(self.nranks)
        self.beyond: Callable[[], None] | None = None
        self._seen: dict[int, str] = {}
        self._ended = ""
        self._serial = next(_serials)
        # Collected without close(): peers that wait for this rank must not wait for ever.
        self._forget = weakref.finalize(self, _collected, self._own, os.getpid())
        self._forget.atexit = False

    # -- memory and the control plane ----------------------------------------------------------

    def share(self, nbytes: int, *, what: str) -> list[memoryview]:
        """Contribute a segment and map everybody's; refused by all where memory is short."""
        if nbytes < 0:
            raise ArgumentError(f"{what}: cannot share {nbytes} bytes")
        room = available()
        sent = json.dumps([nbytes, room.nbytes, room.source]).encode()
        said = [json.loads(text) for text in self.allgather(sent, what=what)]
        need = sum(whole_pages(part) + PAGE for part, _, _ in said)
        least = min(said, key=lambda answer: int(answer[1]))
        require(need, Available(least[1], least[2]), f"{what} on {self.nranks} ranks")
        gather = partial(self._texts, what=what)
        return map_all(self.rank, nbytes, gather, self.deadline(), what)[0]

    def expose(self, memory: memoryview, *, what: str) -> None:
        """Nothing: no process reaches into another's own memory."""

    def _texts(self, text: str, *, what: str) -> list[str]:
        return [part.decode() for part in self.allgather(text.encode(), what=what)]

    def allgather(
        self, payload: bytes, *, what: str, timeout: float | None = None, call: str = ""
    ) -> list[bytes]:
        """Every rank's payload, through the mailboxes of the control segments.

        ``call`` is what messages name where ``what`` is not to be compared here.
        """
        self.check()
        started, deadline = time.monotonic(), self.deadline(timeout)

        def await_all(ready: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
            def describe() -> str:
                waited = time.monotonic() - started
                names = [self.names[rank] for rank in missing()]
                who = f"{call or what}: rank {self.names[self.rank]}"
                return f"{who} waited {waited:.3g} s for {named(names)}"

            self.wait(ready, deadline=deadline, describe=describe, peers=missing)

        try:
            return self._exchange.allgather(payload, what, await_all)
        except DeadlineError as error:
            # The others may still come: they must not take this round for a success.
            self.abort(str(error), error=DeadlineError)
            raise

    def wait(
        self,
        ready: Callable[[], bool],
        *,
        deadline: float,
        describe: Callable[[], str],
        peers: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """Spin a few dozen times, then yield, then sleep; look around every 20 ms."""
        for _ in range(SPINS):
            if ready():
                return
        self._usable()
        poll(ready, deadline, describe, self._lookout, lambda: self.look(peers))

    # -- news ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Read one word of this rank's memory, and every 20 ms who has died."""
        if self._ended:
            raise ClosedError(self._ended)
        self._lookout.glance(self._news)

    def look(self, peers: Callable[[], Sequence[int]] | None) -> None:
        """Read who has died, aborted or left."""
        if self.beyond is not None:
            self.beyond()
        self._news()
        self._departed(peers)

    @property
    def alarm(self) -> memoryview:
        """The word of this rank that is not zero when there is news."""
        return self._own.alarm

    def _usable(self) -> None:
        if self._ended:
            raise ClosedError(self._ended)

    def _news(self) -> None:
        """Raise if somebody has died or aborted."""
        self._usable()
        dead = self._obituary.read()
        # Read after the obituary: a rank says that it leaves before its process ends.
        states = [control.state for control in self.controls]
        given_up = [rank for rank, state in enumerate(states) if state.given_up]
        killed = [rank for rank in dead if states[rank] is State.OPEN]
        if given_up or killed:
            finalize.unresolved(self._serial)
            finalize.note_death()  # who has given up may soon be gone
        if given_up:
            first = min(given_up, key=lambda rank: self.controls[rank].since)
            who = "this rank" if first == self.rank else named([self.names[first]])
            raise states[first].error(who, self.controls[first].reason)
        if killed:
            graves = (
                f"rank {self.names[rank]} died: its process {self.processes[rank].pid} is gone"
                for rank in killed
            )
            raise RankLostError("; ".join(graves))

    def _departed(self, peers: Callable[[], Sequence[int]] | None) -> None:
        """Raise if a rank has left that ``peers`` names; None: if all have."""
        states = {rank: c.state for rank, c in enumerate(self.controls) if rank != self.rank}
        # One that has given up since the news were read is in the next news, with its reason.
        left = [rank for rank, state in states.items() if state.left]
        if not left or (peers is None and len(left) < len(states)):
            return
        awaited = left if peers is None else peers()
        for rank in left:
            if rank in awaited:
                finalize.unresolved(self._serial)
                how = "closed" if states[rank] is State.CLOSED else "left without closing"
                raise RankLostError(f"rank {self.names[rank]} {how} its communicator")

    def lost(self) -> tuple[int, ...]:
        """The other ranks that have died or closed."""
        self._usable()
        gone = set(self._obituary.read())
        for rank, control in enumerate(self.controls):
            if rank != self.rank and control.state in (State.CLOSED, State.EXITED):
                gone.add(rank)
        return tuple(sorted(gone))

    def abort(self, reason: str, *, error: type[BaseException] = AbortedError) -> None:
        """Store the reason in this rank's memory and raise everybody's alarm."""
        if self._ended:
            return
        self._own.say(State.of(error), reason)
        if self._own.state.given_up:
            for control in self.controls:
                control.alert()

    # -- the end -------------------------------------------------------------------------------

    def leave(self) -> None:
        """Declare the orderly end; the memory stays mapped."""
        self._leave(State.CLOSED)

    def exited(self) -> None:
        """The process ends without having closed this fabric."""
        self._leave(State.EXITED)

    def _leave(self, state: State) -> None:
        if self._ended:
            return
        self._own.say(state)
        self._ended = f"rank {self.rank} has closed this communicator"

    def close(self) -> None:
        """Leave and unmap the control segments; shared memory lives on in its views."""
        self.leave()
        finalize.resolve(self._serial)
        self._release()

    def forked(self) -> None:
        """This process is a child of the rank: the fabric stays the parent's."""
        self._ended = (
            f"this process was forked from rank {self.rank}, to which the communicator belongs; "
            "make a new one, or start processes by spawn"
        )
        self._release()

    def _release(self) -> None:
        self._forget.detach()
        self.controls = ()
        self.processes = ()
        self._own = Control(memoryview(bytearray(CONTROL_BYTES)), None)
        self._lookout = Lookout()
        self._obituary = Obituary({})
        self._exchange = Exchange([], 0)

    # -- children ------------------------------------------------------------------------------

    def subset(self, members: Sequence[int], *, what: str) -> Fabric:
        """Meet the members over the control segments, then begin anew among them."""
        self._usable()
        ranks = chosen(self, members, what)
        processes = [self.processes[rank] for rank in ranks]
        deadline = self.deadline()
        try:
            meeting = Meeting(
                self.controls, ranks, self.rank, self.lost, self._seen, what, deadline
            )
            fabric = process_fabric(meeting, timeout=self.timeout, what=what, processes=processes)
        finally:
            self._own.subsets.clear()
        finalize.resolve(self._serial)
        return fabric

    def hold_exit(self) -> None:
        """Under MPI, remember whom this process meets in MPI_Finalize."""
        others = {rank: p for rank, p in enumerate(self.processes) if rank != self.rank}
        meeting = finalize.Exit(self._own, self.controls, Obituary(others))
        finalize.hold(frozenset(process.pid for process in self.processes), meeting)


def process_fabric(
    bootstrap: Bootstrap,
    *,
    timeout: float,
    what: str = "init",
    processes: Sequence[Process] | None = None,
    compared: bool = False,
) -> ProcessFabric:
    """A fabric among processes of one host; collective among the ranks of the bootstrap.

    Args:
        bootstrap: who is who, and a first way to exchange bytes.
        timeout: seconds that later waits may take.
        what: the call that asks, for messages.
        processes: the ranks' processes where they are watched already.
        compared: their identities are known to fit.

    Raises:
        MachineError: the ranks are not on one host, or their memory cannot be mapped.
        MismatchError: the ranks run different versions of ringcoll.

    """

    def gather(text: str) -> list[str]:
        return [part.decode() for part in bootstrap.allgather(text.encode())]

    if not compared:
        compare([json.loads(text) for text in gather(json.dumps(identity()))], what)
    deadline = time.monotonic() + timeout
    views, handles = map_all(bootstrap.rank, CONTROL_BYTES, gather, deadline, what)
    fabric: ProcessFabric | None = None
    failure: MachineError | None = None
    try:
        fence = fence_of()
        controls = [Control(view, fence) for view in views]
        watched = processes or [Process(handle.pid) for handle in handles]
        fabric = ProcessFabric(bootstrap.rank, timeout, controls, watched)
    except MachineError as error:
        failure = error
    outcome(gather, True, failure)
    if fabric is None:
        raise MachineError(f"{what}: no fabric was made")
    if processes is None:
        fabric.hold_exit()
    try:
        # The control plane's first round: after it nobody needs the bootstrap any more.
        fabric.allgather(b"", what=what)
    except Error:
        fabric.close()
        raise
    finalize.track(fabric)
    return fabric


def _collected(own: Control, pid: int) -> None:
    if os.getpid() == pid:
        own.say(State.EXITED)
