"""The errors of one rank: which calls are refused, what breaks the communicator, who is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ringcoll import log
from ringcoll.communicator.failures import broken_by, error_text, reason_of
from ringcoll.config import Config
from ringcoll.errors import (
    AbortedError,
    ClosedError,
    Error,
    MachineError,
    MismatchError,
    PlanError,
    RankLostError,
    UsageError,
)
from ringcoll.executors.contract import Executor, PairExecutor
from ringcoll.executors.cpu.executor import CpuExecutor
from ringcoll.executors.pair_calls import ActivePairCall
from ringcoll.executors.point_to_point import Pairs
from ringcoll.fabric import Fabric

if TYPE_CHECKING:
    from ringcoll.communicator.cpu.progress import Progress


T = TypeVar("T")


class RankErrors:
    """What is wrong with one rank's communicator, and who has seen it."""

    executor: Executor
    pairs: PairExecutor
    _host: CpuExecutor
    progress: Progress | None = None
    """The messages of a CPU rank."""
    failure_level = log.ERROR
    """The level of a failure's log line: DEBUG where the caller of spawn gets the error."""

    def __init__(self, fabric: Fabric, config: Config) -> None:
        self.fabric, self.config = fabric, config
        self.broken: BaseException | None = None
        self.raised = False  # whether the caller has seen the error that broke it
        self.settled = False  # by abort(), or by shrink() after a loss: close() raises no error
        self.closed = False
        self.inherited = False  # by a forked child of its process

    def __str__(self) -> str:
        """The rank, and the communicator's tag where it has one: for log lines and errors."""
        tag = self.config.tag
        return f"rank {self.fabric.rank}" + (f" of {tag!r}" if tag else "")

    def usable(self) -> None:
        """Refuse a call after close or a failed call, and in a fork's child."""
        if self.inherited:
            raise ClosedError(
                f"{self}: this process was forked from the one that the communicator belongs to; "
                f"make a new one, or start processes by spawn"
            )
        if self.closed:
            raise ClosedError(
                f"{self}: the communicator is closed, by close() or the end of its with block; "
                f"make a new one"
            )
        if self.broken is not None:
            if self.progress is not None:
                self.progress.raise_unseen()
            raise broken_by(self, self.broken) from self.broken

    def fail(self, error: BaseException, *, begun: bool = False) -> None:
        """Record that a call failed, abort the other ranks and refuse later calls.

        ``begun``: another call of its group has begun, even if this one has not.
        """
        begun = begun or self.has_begun()
        if isinstance(error, (UsageError, PlanError)) and not begun:
            return
        if self.broken is None:
            self._name_missed_call(error)
            self.broken = error
            log.write(self.failure_level, "%s: %s", self, error_text(error))
            self.fabric.abort(reason_of(error), error=type(error))
        if self.progress is not None:
            self.progress.abandon(error)

    def has_begun(self) -> bool:
        """Whether a call is under way that other ranks may have seen."""
        progress = self.progress
        if progress is not None and (progress.pairs.running or progress.entered):
            return True
        return self.executor.running is not None or bool(self.pairs.running)

    def _name_missed_call(self, error: BaseException) -> None:
        """Add to a RankLostError the call that the rank has not made."""
        left = error.left if isinstance(error, RankLostError) else None
        missed = None if left is None else self.missed_call(left)
        if missed is not None:
            error.args = (f"{error}, without making {missed}",)

    def missed_call(self, rank: int) -> str | None:
        """The call under way that ``rank`` has not entered; None: unknown."""
        host, active = self._host, self._host.running
        if active is not None and rank in host.absent(active):
            call = active.prepared.call
            return f"call {active.epoch}, {call.tagged(call.signature())}"
        contexts = [self.pairs] if self.progress is None else [self.pairs, self.progress.pairs]
        for pairs, half in [(each, half) for each in contexts for half in each.running]:
            if isinstance(half, ActivePairCall) and half.call.peer == rank:
                if isinstance(pairs, Pairs) and pairs.has_entered(half):
                    continue
                end = "recv from" if half.sends else "send to"
                larger = half.call.shown.partition(":")[0]
                return f"its {larger or f'{end} rank {self.fabric.rank}'}"
        return None

    def quarantine(self, alive: tuple[object, ...]) -> None:
        """After a failure, keep for ever the arrays to which MPI may still write."""
        messages = self.fabric.messages
        if self.broken is not None and messages is not None:
            messages.give_up(alive)

    def check(self) -> None:
        """Raise the error of an earlier call, of a lost rank or of calls that differ."""
        if isinstance(self.broken, Error):
            self.raised = True
            raise self.broken
        self.usable()
        try:
            self.fabric.check()
            self.executor.compare_last()
        except Error as error:
            self.fail(error)
            raise

    def together(self, call: Callable[[], T]) -> T:
        """Make a collective call of the control plane; an error of this rank alone aborts all."""
        self.usable()
        try:
            return call()
        except (UsageError, MismatchError, MachineError):
            # On all ranks alike: the communicator stays usable, unless a rank has given up.
            try:
                self.fabric.check()
            except Error as given_up:
                self.fail(given_up)
            raise
        except BaseException as error:
            self.fail(error)
            raise

    def abort(self, reason: str, *, error: type[BaseException] = AbortedError) -> None:
        """Abort the communicator: the calls of the other ranks raise ``error`` with ``reason``."""
        if self.closed:
            return
        if self.broken is None:
            self.broken = ClosedError(f"rank {self.fabric.rank} aborted: {reason}")
        self.settled = True
        self.fabric.adopt()  # this may be the only call of its thread, which now ends
        self.fabric.abort(reason, error=error)
