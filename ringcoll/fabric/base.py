"""What the ranks of a communicator that live on one host share, whatever a rank is.

A fabric gives memory that all ranks see, a control plane with deadlines, and the news of who
died, aborted or left. It knows nothing of collectives. Its calls ``share``, ``allgather`` and
``subset`` are collective: every rank (of the subset) makes them in the same order.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ringcoll.bootstrap.contract import named
from ringcoll.errors import AbortedError, ArgumentError
from ringcoll.fabric.mpi import Messages
from ringcoll.host.fence import Fence

__all__ = ["Fabric", "chosen", "named"]


class Fabric(ABC):
    """The ranks of a communicator, as one of them sees them.

    Args:
        rank: this rank.
        nranks: how many there are.
        threads: ranks are threads of (or take turns in) one process.
        timeout: seconds that a wait may take where a call names no other; may be ``math.inf``.
        fence: what to call between data and flag, on both sides; None where nothing is needed.
        notify: wakes rank p after a flag that it may wait for was stored; None where waits poll.
        nodes: the node of each rank where there are several; else empty.
        messages: what moves data between nodes, where there are several; None once it is closed.

    """

    rank: int
    nranks: int
    threads: bool
    timeout: float
    fence: Fence | None
    notify: Callable[[int], None] | None
    nodes: tuple[int, ...] = ()
    messages: Messages | None = None

    @abstractmethod
    def share(self, nbytes: int, *, what: str) -> list[memoryview]:
        """Contribute zeroed memory and see everybody's; collective.

        Args:
            nbytes: this rank's part; ranks may differ. Parts start at a page and are rounded
                up to whole pages.
            what: what the memory is for, the same text on every rank.

        Returns:
            One writable view (format ``B``) per rank, this rank's own included; an empty one for
            a rank of another node. The memory lives as long as a view of it, here or at a peer.

        Raises:
            OutOfMemory: the parts together exceed what is available; on every rank.
            DeadlineError: a rank did not come.

        """

    @abstractmethod
    def expose(self, memory: memoryview, *, what: str) -> list[memoryview] | None:
        """Let the peers see memory that exists already; collective.

        Args:
            memory: this rank's.
            what: what the memory is for, the same text on every rank.

        Returns:
            One view per rank; None where peers cannot reach another process's own memory.

        """

    @abstractmethod
    def allgather(self, payload: bytes, *, what: str, timeout: float | None = None) -> list[bytes]:
        """Every rank's payload, in rank order; collective, lengths may differ.

        Args:
            payload: this rank's bytes.
            what: the call that asks, the same text on every rank.
            timeout: seconds; None takes the fabric's.

        Raises:
            DeadlineError: naming the ranks that did not come; the fabric is aborted by it.
            MismatchError: the ranks came for different calls; all are shown.

        """

    @abstractmethod
    def wait(
        self,
        ready: Callable[[], bool],
        *,
        deadline: float,
        describe: Callable[[], str],
        peers: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """Return as soon as ``ready()`` is true, without burning the processor.

        Args:
            ready: reads flags; must be cheap and have no effect.
            deadline: value of ``time.monotonic()``; ``math.inf`` for none.
            describe: the message of a :class:`DeadlineError`, asked for when it is needed.
            peers: the ranks without which ``ready`` cannot become true; one of them that has
                closed in order is lost. None: only when all others have closed.

        Raises:
            DeadlineError: the deadline has passed.
            RankLostError: a rank has died, or one that is waited for has left.
            AbortedError: a rank has aborted; the message gives its reason.

        """

    def progress(self) -> None:
        """Let messages between nodes move on, where there are several."""
        return

    @abstractmethod
    def check(self) -> None:
        """Raise if a peer has died or aborted, or if this fabric was closed; very cheap."""

    @abstractmethod
    def look(self, peers: Callable[[], Sequence[int]] | None) -> None:
        """The same, and raise if a rank has left without which a wait cannot end; not so cheap.

        Args:
            peers: as for :meth:`wait`.

        """

    @abstractmethod
    def lost(self) -> tuple[int, ...]:
        """The other ranks that have died or closed, as far as is known now."""

    @abstractmethod
    def abort(self, reason: str, *, error: type[BaseException] = AbortedError) -> None:
        """Tell every rank that this one gives up, and wake all; idempotent.

        Args:
            reason: shown by the peers' errors.
            error: by which it gives up: after a DeadlineError, MismatchError or RankLostError the
                peers raise the same, else an AbortedError.

        """

    def died(self, reason: str) -> None:
        """Abort, and where ranks are threads count as lost: this rank's thread ends by an error."""
        self.abort(reason)

    @abstractmethod
    def leave(self) -> None:
        """Declare the orderly end: a later exit is not a death; idempotent, not collective."""

    @abstractmethod
    def close(self) -> None:
        """Leave, and let go of the fabric's own memory; idempotent, not collective."""

    @abstractmethod
    def subset(self, members: Sequence[int], *, what: str) -> Fabric:
        """A fabric of some of the ranks; collective among these alone.

        Works when ranks outside have died, and when this fabric has been aborted.

        Args:
            members: ranks of this fabric in the order of their new ranks, the same on each.
            what: the call that asks, the same text on every member.

        Raises:
            RankLostError: a member has died or has closed this fabric.
            DeadlineError: a member did not come.

        """

    def deadline(self, timeout: float | None = None) -> float:
        """The value of ``time.monotonic()`` at which a wait that starts now must end."""
        seconds = self.timeout if timeout is None else timeout
        return math.inf if seconds == math.inf else time.monotonic() + seconds


def chosen(fabric: Fabric, members: Sequence[int], what: str) -> tuple[int, ...]:
    """The members of a subset, checked.

    Raises:
        ArgumentError: not a rank, one twice, or this rank is not among them.

    """
    ranks = tuple(members)
    legal = all(0 <= rank < fabric.nranks for rank in ranks)
    if not legal or len(set(ranks)) != len(ranks) or fabric.rank not in ranks:
        raise ArgumentError(
            f"{what}: {list(ranks)} must be different ranks below {fabric.nranks} that "
            f"include this rank, {fabric.rank}"
        )
    return ranks
