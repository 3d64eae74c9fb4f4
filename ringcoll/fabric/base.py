"""What the ranks of a communicator share, whether they are threads, processes or on several nodes.

A fabric is the host side of a communicator: memory that the ranks of a host share, a control
plane with deadlines, and the liveness of every rank. It knows nothing of collectives. Its calls
``share``, ``allgather`` and ``subset`` are collective: every rank (of the subset) makes them in the
same order.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from ringcoll import finalize
from ringcoll.bootstrap.contract import named
from ringcoll.errors import (
    AbortedError,
    ArgumentError,
    ClosedError,
    DeadlineError,
    Error,
    RankLostError,
)
from ringcoll.fabric.liveness import State, Status, departure, raise_departed, raise_failed
from ringcoll.fabric.mpi import Messages
from ringcoll.fabric.poll import SPINS, LivenessTimer, poll
from ringcoll.host.fence import Fence
from ringcoll.host.limits import Available, available, require
from ringcoll.host.pages import PAGE, whole_pages

Ready = Callable[[], bool]
Missing = Callable[[], Sequence[int]]


@contextlib.contextmanager
def closing_if_it_fails(fabric: Fabric) -> Iterator[None]:
    """Close a fabric if its beginning fails; peers learn of an error that this rank alone meets."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Error):
            fabric.abort(f"{type(error).__name__}: {error}")
        fabric.close()
        raise


class Fabric(ABC):
    """The ranks of a communicator, as one of them sees them; ``timeout`` is in seconds.

    ``fence`` goes between data and flag, on both sides; ``notify`` wakes rank p after a flag that
    it may wait for was stored; None where waits poll, ``spins`` times at once (``polls`` of
    :mod:`ringcoll.fabric.poll`). ``messages`` is None once it is closed. ``names`` are what errors
    call the ranks.
    """

    rank: int
    nranks: int
    threads: bool
    mixed: bool = False  # several processes, one of which has several ranks, threads of it
    timeout: float
    fence: Fence | None
    notify: Callable[[int], None] | None
    spins: int = 0
    nodes: tuple[int, ...] = ()
    messages: Messages | None = None
    names: Sequence[int]
    busy: Callable[[], bool] = staticmethod(lambda: False)  # whether asynchronous calls are left
    entered: int = 0  # collectives that this rank has entered; peers see it in an exchange
    _timer: LivenessTimer
    _ended: str = ""  # why the fabric cannot be used any more
    _exit_key: int = 0  # under which finalize knows it; 0: its ranks do not meet in MPI_Finalize

    # -- memory and the control plane ----------------------------------------------------------

    @abstractmethod
    def share(self, nbytes: int, *, what: str) -> list[memoryview]:
        """Contribute zeroed memory and map everybody's; collective.

        A writable view for each rank, empty for one of another node, which lives as long as a view
        of it, here or at a peer. Parts may differ in size, and are rounded up to whole pages.
        ``what``, the memory's purpose, is the same text on every rank.
        """

    def expose(self, memory: memoryview, *, what: str) -> list[memoryview] | None:
        """Let peers map existing memory; None where ranks are processes. Collective."""
        return None

    @abstractmethod
    def allgather(self, payload: bytes, *, what: str, timeout: float | None = None) -> list[bytes]:
        """Every rank's payload, in rank order; collective, lengths may differ.

        ``what`` is the call, the same on every rank, else MismatchError. A DeadlineError names the
        ranks that did not come, and aborts the fabric.
        """

    def conclude(self, what: str) -> None:
        """Return on all ranks or raise on all: the last step of making a communicator.

        A rank that is lost counts only if it has not come. Between nodes that does not hold for one
        that ends while it comes.
        """
        self.allgather(b"", what=what)

    def ahead(self) -> dict[int, tuple[str, int]]:
        """The exchange or rendezvous in which other ranks wait for this one, which is in none.

        By rank: the call, and how many collectives the rank had entered before it.
        """
        return {}

    def _intact(self) -> bool:
        """Whether no rank has died, left or failed: then a rendezvous is no way out of that."""
        return not any(s.death or s.state is not State.OPEN for s in self._statuses().values())

    def texts(self, what: str) -> Callable[[str], list[str]]:
        """:meth:`allgather` for texts, bound to the call that needs it."""

        def gather(text: str) -> list[str]:
            return [part.decode() for part in self.allgather(text.encode(), what=what)]

        return gather

    def _require_memory(self, nbytes: int, what: str) -> None:
        """Refuse, on every rank alike, to share more memory than a rank sees available."""
        if nbytes < 0:
            raise ArgumentError(f"{what}: cannot share {nbytes} bytes")
        room = available()
        sent = json.dumps([nbytes, room.nbytes, room.source])
        received = [json.loads(text) for text in self.texts(what)(sent)]
        header = 0 if self.threads else PAGE
        need = sum(whole_pages(part) + header for part, _, _ in received)
        least = min(received, key=lambda answer: int(answer[1]))
        require(need, Available(least[1], least[2]), f"{what} on {self.nranks} ranks")

    # -- waiting -------------------------------------------------------------------------------

    def wait(
        self,
        ready: Ready,
        *,
        deadline: float,
        describe: Callable[[], str],
        peers: Missing | None = None,
    ) -> None:
        """Return as soon as ``ready()`` is true, without burning the processor.

        ``ready`` must be cheap and have no effect; ``deadline`` is of ``time.monotonic()``. A rank
        of ``peers`` (None: all others together) that closed in order counts as lost.
        """
        for _ in range(SPINS):
            if ready():
                return
        self._require_open()
        self._sleep(ready, deadline, describe, lambda: self.check_peers(peers))

    def _sleep(
        self,
        ready: Ready,
        deadline: float,
        describe: Callable[[], str],
        check: Callable[[], None],
        *,
        alarmed: bool = True,
    ) -> None:
        """Wait for ``ready()``; ``check`` raises when it cannot become true.

        ``check`` is called at regular intervals and, if ``alarmed``, whenever the alarm is up.
        """
        poll(ready, deadline, describe, self._timer if alarmed else LivenessTimer(), check)

    def _await_all(
        self, ready: Ready, missing: Missing, call: str, started: float, deadline: float
    ) -> None:
        """Wait for the ranks that are still missing from an exchange."""

        def describe() -> str:
            waited = time.monotonic() - started
            own = self.names[self.rank]
            return f"{call}: rank {own} waited {waited:.3g} s for {self._named(missing())}"

        try:
            self.wait(ready, deadline=deadline, describe=describe, peers=missing)
        except DeadlineError as error:
            # The others may still come: they must not take this exchange for a success.
            self.abort(str(error), error=DeadlineError)
            raise

    def _await_members(
        self,
        ready: Ready,
        missing: Missing,
        what: str,
        deadline: float,
        intact: bool,
        beyond: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait for the ranks that are still missing from a rendezvous of :meth:`subset`.

        ``intact``: :meth:`_intact` before this rank's call was posted, as a peer may fail by what
        it reads there. ``beyond`` is called meanwhile, and may raise.
        """

        def describe() -> str:
            own, remedy = self.names[self.rank], "did all make this call?"
            if what == "shrink":
                remedy += " shrink(exclude=[...]) leaves out ranks that will not come"
            return f"{what}: rank {own} waited for {self._named(missing())}: {remedy}"

        def check() -> None:
            beyond()
            if intact:  # else an alarm is up, by what the ranks may be leaving behind
                with contextlib.suppress(AbortedError, DeadlineError, RankLostError):
                    self.check_failures()  # a peer that has found that it makes another call
            lost = {*self.lost()}.intersection(missing())
            if lost:
                self.drop(lost)
                who = self._named(sorted(lost))
                raise RankLostError(f"{what}: {who} died or closed the communicator")

        self._sleep(ready, deadline, describe, check, alarmed=False)

    def progress(self) -> None:
        """Let messages between nodes move on, where there are several."""
        return

    def deadline(self, timeout: float | None = None) -> float:
        """The value of ``time.monotonic()`` at which a wait that starts now must end."""
        seconds = self.timeout if timeout is None else timeout
        return math.inf if seconds == math.inf else time.monotonic() + seconds

    # -- liveness ------------------------------------------------------------------------------

    @abstractmethod
    def _statuses(self) -> Mapping[int, Status]:
        """What is known of every rank now."""

    def adopt(self) -> None:
        """Note that this thread makes this rank's calls."""
        return

    @abstractmethod
    def check(self) -> None:
        """Raise if a peer has died or aborted, or if this fabric was closed; very cheap."""

    @property
    def liveness(self) -> LivenessTimer | None:
        """What :meth:`check` goes by, which does nothing before its alarm or time; None: more."""
        return None

    def check_failures(self) -> None:
        """Raise if a rank has died or aborted; reads every rank's status."""
        self._require_open()
        raise_failed(self._statuses(), self.rank, self.names, self._note_failure)

    def check_peers(self, peers: Missing | None) -> None:
        """Raise also if a rank has left that a wait needs; ``peers`` as in :meth:`wait`."""
        self.check_failures()
        others = {rank: status for rank, status in self._statuses().items() if rank != self.rank}
        raise_departed(others, self.names, peers, self._note_departure)

    def lost(self) -> tuple[int, ...]:
        """The other ranks that have died or closed, as far as is known now."""
        self._require_open()
        statuses = self._statuses().items()
        return tuple(sorted(r for r, status in statuses if status.lost and r != self.rank))

    def left(self) -> dict[int, bool]:
        """The other ranks that have left and whose kernels have all ended; whether for good.

        A process that exits without closing may leave kernels behind, until it is gone. A rank
        whose thread has ended may go on in a new one.
        """
        return {
            rank: not self.threads or status.state is State.CLOSED
            for rank, status in self._statuses().items()
            if rank != self.rank
            and (
                status.state is State.CLOSED
                or (status.state is State.EXITED and (self.threads or bool(status.death)))
            )
        }

    def departure(self, rank: int) -> RankLostError:
        """The error of a call that needs a rank of :meth:`left`."""
        self._note_departure(rank)
        return departure(self.names[rank], self._statuses()[rank].state)

    def drop(self, ranks: Collection[int]) -> None:
        """Count these ranks as lost from now on, on every rank, whatever they do."""
        return

    def _note_failure(self) -> None:
        if self._exit_key:
            finalize.unresolved(self._exit_key)
            finalize.note_death()  # a rank that has failed may soon be gone

    def _note_departure(self, rank: int) -> None:
        self.drop((rank,))
        if self._exit_key:
            finalize.unresolved(self._exit_key)

    def _named(self, ranks: Sequence[int]) -> str:
        return named([self.names[rank] for rank in ranks])

    # -- the end -------------------------------------------------------------------------------

    @abstractmethod
    def abort(self, reason: str, *, error: type[BaseException] = AbortedError) -> None:
        """Tell every rank that this one gives up, and wake all; idempotent.

        Peers raise an ``error`` that is a DeadlineError, MismatchError or RankLostError, else an
        AbortedError.
        """

    @abstractmethod
    def _declare(self, state: State) -> None:
        """Let the peers know that this rank closes or exits."""

    def leave(self) -> None:
        """Declare the orderly end: a later exit is not a death; idempotent, not collective."""
        self._end(State.CLOSED)

    def exited(self) -> None:
        """The process ends without having closed this fabric."""
        self._end(State.EXITED)

    def mpi_finalized(self) -> None:
        """The program calls MPI.Finalize(); of no concern inside one node."""
        return

    def _end(self, state: State) -> None:
        if not self._ended:
            self._declare(state)
            self._ended = f"rank {self.rank} has closed this communicator"

    @abstractmethod
    def close(self) -> None:
        """Leave, and release the fabric's own memory; idempotent, not collective."""

    def forked(self) -> None:
        """This process is a child of the rank's: the fabric stays the parent's."""
        self._ended = (
            f"this process was forked from rank {self.rank}, to which the communicator belongs; "
            "make a new one, or start processes by spawn"
        )
        self._release()

    @abstractmethod
    def _release(self) -> None:
        """Release what the fabric holds in this process, without declaring anything to peers."""

    def _require_open(self) -> None:
        if self._ended:
            raise ClosedError(self._ended)

    # -- children ------------------------------------------------------------------------------

    @abstractmethod
    def subset(self, members: Sequence[int], *, what: str) -> Fabric:
        """A fabric of the ranks ``members``, in this order; collective among these alone.

        Works when ranks outside have died, and when this fabric has been aborted.
        """

    def _members(self, members: Sequence[int], what: str) -> tuple[int, ...]:
        """The members of a subset, checked."""
        self._require_open()
        ranks = tuple(members)
        legal = all(0 <= rank < self.nranks for rank in ranks)
        if not legal or len(set(ranks)) != len(ranks) or self.rank not in ranks:
            raise ArgumentError(
                f"{what}: {list(ranks)} must be different ranks below {self.nranks} that "
                f"include this rank, {self.rank}"
            )
        return ranks
