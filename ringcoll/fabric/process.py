"""Ranks that are processes of one host: memory by memfd, news by pidfd, waits that yield."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
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
from ringcoll.fabric.base import Fabric
from ringcoll.fabric.control import CONTROL_BYTES, Control, Exchange, State
from ringcoll.fabric.identity import compare, identity
from ringcoll.fabric.mapping import map_all, outcome
from ringcoll.fabric.watch import Obituary, Process
from ringcoll.transports.fence import fence_of
from ringcoll.transports.limits import Available, available, require
from ringcoll.transports.shm import PAGE, pages

__all__ = ["ProcessFabric", "process_fabric"]

_SPINS = 40  # looks before the processor is yielded
_YIELDS = 200  # yields before the waiter sleeps
_FIRST_SLEEP, _LONGEST_SLEEP = 20e-6, 1e-3  # seconds
_serials = count(1)
_LOOK = 0.02  # seconds between looks at who has died or closed


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
        self._alarm = self._own.alarm
        others = {peer: process for peer, process in enumerate(processes) if peer != rank}
        self._obituary = Obituary(others)
        self._exchange = Exchange([control.calls for control in controls], rank)
        self._met: dict[int, str] = {}  # the last token by which each rank met us in a subset
        self._look_at = 0.0
        self._ended = ""
        self._serial = next(_serials)
        # Collected without close(): peers that wait for this rank must not wait for ever.
        self._forget = weakref.finalize(self, _collected, self._own, os.getpid())
        self._forget.atexit = False

    def share(self, nbytes: int, *, what: str) -> list[memoryview]:
        """Contribute a segment and map everybody's; refused by all where memory is short."""
        if nbytes < 0:
            raise ArgumentError(f"{what}: cannot share {nbytes} bytes")
        room = available()
        sent = json.dumps([nbytes, room.nbytes, room.source]).encode()
        said = [json.loads(text) for text in self.allgather(sent, what=what)]
        need = sum(pages(part) + PAGE for part, _, _ in said)
        least = min(said, key=lambda answer: int(answer[1]))
        require(need, Available(least[1], least[2]), f"{what} on {self.nranks} ranks")
        gather = partial(self._texts, what=what)
        views, _ = map_all(self.rank, nbytes, gather, self.deadline(), what)
        return views

    def _texts(self, text: str, *, what: str) -> list[str]:
        return [part.decode() for part in self.allgather(text.encode(), what=what)]

    def allgather(self, payload: bytes, *, what: str, timeout: float | None = None) -> list[bytes]:
        """Every rank's payload, through the mailboxes of the control segments."""
        self.check()
        started, deadline = time.monotonic(), self.deadline(timeout)
        try:
            return self._exchange.allgather(
                payload, what, partial(self._await, what, started, deadline)
            )
        except DeadlineError as error:
            # The others may still come: they must not take this round for a success.
            self.abort(str(error), expired=True)
            raise

    def _await(
        self,
        what: str,
        started: float,
        deadline: float,
        ready: Callable[[], bool],
        missing: Callable[[], list[int]],
    ) -> None:
        def describe() -> str:
            waited = time.monotonic() - started
            return f"{what}: rank {self.rank} waited {waited:.3g} s for {named(missing())}"

        self.wait(ready, deadline=deadline, describe=describe, peers=missing)

    def wait(
        self,
        ready: Callable[[], bool],
        *,
        deadline: float,
        describe: Callable[[], str],
        peers: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """Spin a few dozen times, then yield, then sleep; look around every 20 ms."""
        for _ in range(_SPINS):
            if ready():
                return
        self._usable()
        self._poll(ready, deadline, describe, partial(self._news, peers), self._alarm)

    def _poll(
        self,
        ready: Callable[[], bool],
        deadline: float,
        describe: Callable[[], str],
        look: Callable[[], None],
        alarm: memoryview,
    ) -> None:
        """Yield, then sleep, until ready; ``look`` raises when there is no more hope."""
        clock, yields, pause = time.monotonic, 0, _FIRST_SLEEP
        while not ready():
            now = clock()
            if alarm[0] or now >= self._look_at:
                try:
                    look()
                except (RankLostError, DeadlineError):
                    if ready():  # the flag came before the news
                        return
                    raise
            if now >= deadline:
                if ready():
                    return
                raise DeadlineError(describe())
            if yields < _YIELDS:
                yields += 1
                os.sched_yield()
            else:
                time.sleep(pause)
                pause = min(pause * 1.25, _LONGEST_SLEEP)

    def check(self) -> None:
        """Read one word of this rank's memory, and every 20 ms who has died."""
        if self._ended:
            raise ClosedError(self._ended)
        if self._alarm[0] or time.monotonic() >= self._look_at:
            self._news(None)

    def _usable(self) -> None:
        if self._ended:
            raise ClosedError(self._ended)

    def _news(self, peers: Callable[[], Sequence[int]] | None) -> None:
        """Raise if somebody has died or aborted, or has left although ``peers`` names it."""
        self._usable()
        self._look_at = time.monotonic() + _LOOK
        dead = self._obituary.read()
        # Read after the obituary: a rank says that it leaves before its process ends.
        states = [control.state for control in self.controls]
        given_up = [rank for rank, s in enumerate(states) if s in (State.ABORTED, State.EXPIRED)]
        if given_up:
            finalize.unresolved(self._serial)
            first = min(given_up, key=lambda rank: self.controls[rank].since)
            reason = self.controls[first].reason
            if states[first] is State.EXPIRED:
                raise DeadlineError(f"{named([first])} gave up: {reason}")
            who = "this rank" if first == self.rank else named([first])
            raise AbortedError(f"{who} aborted: {reason}")
        killed = [rank for rank in dead if states[rank] is State.OPEN]
        if killed:
            finalize.unresolved(self._serial)
            finalize.note_death()
            raise RankLostError(
                "; ".join(
                    f"rank {rank} died: its process {self.processes[rank].pid} is gone"
                    for rank in killed
                )
            )
        self._departed(states, peers)

    def _departed(self, states: Sequence[State], peers: Callable[[], Sequence[int]] | None) -> None:
        left = [rank for rank, s in enumerate(states) if s is not State.OPEN and rank != self.rank]
        if not left:
            return
        if peers is not None:
            awaited = peers()
            left = [rank for rank in left if rank in awaited]
        elif len(left) < self.nranks - 1:
            return
        for rank in left:
            finalize.unresolved(self._serial)
            if states[rank] is State.CLOSED:
                raise RankLostError(f"rank {rank} closed its communicator")
            raise RankLostError(f"rank {rank} exited without closing its communicator")

    def lost(self) -> tuple[int, ...]:
        """The other ranks that have died or closed."""
        self._usable()
        gone = set(self._obituary.read())
        for rank, control in enumerate(self.controls):
            if rank != self.rank and control.state in (State.CLOSED, State.EXITED):
                gone.add(rank)
        return tuple(sorted(gone))

    def abort(self, reason: str, *, expired: bool = False) -> None:
        """Store the reason in this rank's memory and raise everybody's alarm."""
        if self._ended:
            return
        self._own.say(State.EXPIRED if expired else State.ABORTED, reason)
        if self._own.state in (State.ABORTED, State.EXPIRED):
            for control in self.controls:
                control.alert()

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

    def _release(self) -> None:
        self._forget.detach()
        self.controls = ()
        self.processes = ()
        self._own = Control(memoryview(bytearray(CONTROL_BYTES)), None)
        self._alarm = self._own.alarm
        self._obituary = Obituary({})
        self._exchange = Exchange([], 0)

    def hold_exit(self) -> None:
        """Under MPI, remember whom this process meets in MPI_Finalize."""
        others = {rank: p for rank, p in enumerate(self.processes) if rank != self.rank}
        meeting = finalize.Exit(self._own, self.controls, Obituary(others), self.timeout)
        finalize.hold(frozenset(process.pid for process in self.processes), meeting)

    def forked(self) -> None:
        """This process is a child of the rank: the fabric stays the parent's."""
        self._ended = (
            f"this process was forked from rank {self.rank}, to which the communicator belongs; "
            "make a new one, or start processes by spawn"
        )
        self._release()

    def subset(self, members: Sequence[int], *, what: str) -> Fabric:
        """Meet the members over the control segments, then begin anew among them."""
        self._usable()
        chosen = tuple(members)
        legal = all(0 <= rank < self.nranks for rank in chosen)
        if not legal or len(set(chosen)) != len(chosen) or self.rank not in chosen:
            raise ArgumentError(
                f"{what}: {list(chosen)} must be different ranks below {self.nranks} that "
                f"include this rank, {self.rank}"
            )
        deadline = self.deadline()
        meeting = _Meeting(self, chosen, what, deadline)
        processes = [self.processes[rank] for rank in chosen]
        try:
            fabric = process_fabric(meeting, timeout=self.timeout, what=what, processes=processes)
        finally:
            self._own.subsets.clear()
        finalize.resolve(self._serial)
        return fabric

    def meet(self, members: Sequence[int], token: str, what: str, deadline: float) -> list[str]:
        """The tokens of all members, each sent for this meeting; the first step of a subset."""
        tag = _digest(json.dumps(members)) | 2
        self._own.subsets.post(tag, token.encode())
        tokens = {self.rank: token}

        def ready() -> bool:
            for rank in members:
                if rank not in tokens:
                    said = (self.controls[rank].subsets.read(tag) or b"").decode("ascii", "replace")
                    # What a former meeting has left in the box is no answer.
                    if said and said != self._met.get(rank):
                        tokens[rank] = said
            return len(tokens) == len(members)

        def missing() -> list[int]:
            return [rank for rank in members if rank not in tokens]

        self.meeting_wait(members, what, deadline, ready, missing)
        self._met.update(tokens)
        return [tokens[rank] for rank in members]

    def meeting_wait(
        self,
        members: Sequence[int],
        what: str,
        deadline: float,
        ready: Callable[[], bool],
        missing: Callable[[], list[int]],
    ) -> None:
        """Wait for members, whatever has become of the other ranks and of this fabric."""

        def describe() -> str:
            return f"{what}: rank {self.rank} waited for {named(missing())} in vain"

        def look() -> None:
            self._usable()
            self._look_at = time.monotonic() + _LOOK
            lost = [rank for rank in self.lost() if rank in members]
            if lost:
                raise RankLostError(f"{what}: {named(lost)} died or closed the communicator")

        self._poll(ready, deadline, describe, look, memoryview(bytes(8)).cast("Q"))


class _Meeting:
    """A bootstrap among some ranks of a fabric, over their control segments."""

    def __init__(
        self, fabric: ProcessFabric, members: tuple[int, ...], what: str, deadline: float
    ) -> None:
        self.rank = members.index(fabric.rank)
        self.nranks = len(members)
        self._what = what
        tokens = fabric.meet(members, secrets.token_hex(16), what, deadline)
        boxes = [fabric.controls[rank].subsets for rank in members]
        self._exchange = Exchange(boxes, self.rank, _digest(json.dumps(tokens)))

        def wait(ready: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
            def ranks() -> list[int]:
                return [members[index] for index in missing()]

            fabric.meeting_wait(members, what, deadline, ready, ranks)

        self._wait = wait

    def allgather(self, payload: bytes) -> list[bytes]:
        return self._exchange.allgather(payload, self._what, self._wait)


def process_fabric(
    bootstrap: Bootstrap,
    *,
    timeout: float,
    what: str = "init",
    processes: Sequence[Process] | None = None,
) -> ProcessFabric:
    """A fabric among processes of one host; collective among the ranks of the bootstrap.

    Args:
        bootstrap: who is who, and a first way to exchange bytes.
        timeout: seconds that later waits may take.
        what: the call that asks, for messages.
        processes: the ranks' processes where they are watched already.

    Raises:
        MachineError: the ranks are not on one host, or their memory cannot be mapped.
        MismatchError: the ranks run different versions of ringcoll.

    """
    rank, nranks = bootstrap.rank, bootstrap.nranks

    def gather(text: str) -> list[str]:
        return [part.decode() for part in bootstrap.allgather(text.encode())]

    compare([json.loads(text) for text in gather(json.dumps(identity()))], what)
    deadline = time.monotonic() + timeout
    views, handles = map_all(rank, CONTROL_BYTES, gather, deadline, what)
    fabric: ProcessFabric | None = None
    failure: MachineError | None = None
    try:
        fence = fence_of()
        watched = processes or [Process(handle.pid) for handle in handles]
        fabric = ProcessFabric(rank, timeout, [Control(view, fence) for view in views], watched)
    except MachineError as error:
        failure = error
    outcome(gather, True, failure)
    if fabric is None:
        raise MachineError(f"{what}: no fabric was made")
    try:
        # The control plane's first round: after it nobody needs the bootstrap any more.
        fabric.allgather(str(nranks).encode(), what=what)
    except Error:
        fabric.close()
        raise
    finalize.track(fabric)
    if processes is None:
        fabric.hold_exit()
    return fabric


def _digest(text: str) -> int:
    """An even number of 62 bits that stands for a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 3 << 1


def _collected(own: Control, pid: int) -> None:
    if os.getpid() == pid:
        own.say(State.CLOSED)
