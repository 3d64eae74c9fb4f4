"""The entries of CPU ranks into a call: who has made it, whether all made the same, who is late."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping

from ringcoll.bootstrap.contract import named
from ringcoll.errors import MismatchError, UsageError
from ringcoll.executors.cpu.cpu_call import ActiveCall
from ringcoll.executors.mismatch import different_calls, late_call
from ringcoll.executors.node_signals import NodeSignals
from ringcoll.executors.shared_state import SharedState, Words
from ringcoll.fabric import Fabric
from ringcoll.fabric.poll import polls


class CallEntries:
    """What one rank knows of the others' entries, by their hellos in the shared state."""

    def __init__(
        self,
        fabric: Fabric,
        shared_state: SharedState,
        node_signals: NodeSignals | None,
        *,
        in_order: bool,
    ) -> None:
        self.fabric, self.shared_state, self.node_signals = fabric, shared_state, node_signals
        self.rank, self.nranks, self.in_order = fabric.rank, fabric.nranks, in_order
        self.peers = [rank for rank in range(self.nranks) if rank != self.rank]
        self.entered: list[Words] = [shared_state.words[rank] for rank in self.peers]
        self.known = 0  # the newest call that all ranks are known to have entered
        self.running: ActiveCall | None = None
        self.uncompared: ActiveCall | None = None

    def await_entered(self, epoch: int) -> None:
        """Wait until all ranks have entered ``epoch``."""
        base = epoch << 32
        at = self.shared_state.entered
        for words in self.entered:
            if words[at] < base:
                for _ in polls(self.fabric.spins):
                    if words[at] >= base:
                        break
                else:
                    self.idle(lambda words=words: words[at] >= base)  # type: ignore[misc]
        self.known = epoch

    def _all_entered(self, epoch: int) -> bool:
        at, base = self.shared_state.entered, epoch << 32
        return all(words[at] >= base for words in self.entered)

    def compare(self, active: ActiveCall) -> None:
        """Raise MismatchError if a rank made another call, or waits in one of the control plane."""
        self._compare_hellos(active)
        ahead = self.fabric.ahead() if self.in_order else {}
        others = {rank: call for rank, (call, before) in ahead.items() if before < active.epoch}
        if others:
            self.fabric.check_failures()  # what a rank calls after a failure is no mismatch
            raise self._disagreement(active, others)

    def _compare_hellos(self, active: ActiveCall) -> None:
        """Compare this rank's hello with those that have arrived."""
        mine, base = active.signature, active.epoch << 32
        at, entered = self.shared_state.signatures[active.epoch & 3], self.shared_state.entered
        for words in self.entered:
            # In this order: the slot holds an older signature until the rank has entered.
            if words[entered] >= base and words[at] != mine:
                raise self._disagreement(active)

    def compare_last(self) -> None:
        """The same for the last call, which may have ended here before all ranks entered it."""
        if self.uncompared is not None:
            self.fabric.progress()
            self.compare(self.uncompared)

    def _disagreement(
        self, active: ActiveCall, others: Mapping[int, str] | None = None
    ) -> MismatchError:
        """Every rank's call; ``others``: those of the control plane in which ranks wait."""
        epoch, state = active.epoch, self.shared_state
        calls = []
        for rank in range(self.nranks):
            if state.words[rank][state.entered] >= epoch << 32:
                calls.append((rank, state.shown(rank, epoch)))
            else:
                calls.append((rank, (others or {}).get(rank, "has not entered it yet")))
        return different_calls(f"call {epoch} on rank {self.rank}", calls)

    def explain_mismatch(self, rank: int) -> None:
        """After a message of the wrong length: compare the hello that ``rank`` sent before it."""
        if self.node_signals is not None and self.running is not None:
            self.node_signals.await_hello(rank, self.running.epoch)
            self._compare_hellos(self.running)

    # -- waiting -----------------------------------------------------------------------------

    def idle(self, ready: Callable[[], bool]) -> None:
        """Wait with naps and a deadline; raise on lost ranks and ranks that made another call."""
        active = self.running
        if active is None:
            self.fabric.wait(ready, deadline=self.fabric.deadline(), describe=lambda: "no call")
            return
        if self.fabric.threads and threading.active_count() == 1 and not ready():
            self._refuse_alone(active)
        began = time.monotonic()

        looks, every = itertools.count(1), 10 if self.fabric.notify is None else 1

        def watched() -> bool:
            if ready():
                return True
            # Comparing costs more than polling. Ranks that wake each other poll only after a wake.
            if next(looks) % every == 0:
                self.compare(active)
            return False

        timeout = active.timeout
        self.fabric.wait(
            watched,
            deadline=began + timeout,
            describe=lambda: self.late(active, timeout),
            peers=lambda: self.absent(active),
        )

    def _refuse_alone(self, active: ActiveCall) -> None:
        """Refuse to wait for ranks that are threads where there is no other thread."""
        absent = self.absent(active)
        self.fabric.check_peers(lambda: absent)  # who has left is not waited for
        if absent:
            raise UsageError(
                f"{active.prepared.call.collective} (call {active.epoch}) on rank {self.rank}: "
                f"this thread is the only one, and would wait for {named(absent)} for ever; make "
                f"this call with one thread a rank, or inside group()"
            )

    def absent(self, active: ActiveCall) -> list[int]:
        """The ranks that have not entered a call: it cannot end if one of them has left."""
        base, at = active.epoch << 32, self.shared_state.entered
        return [rank for rank in self.peers if self.shared_state.words[rank][at] < base]

    def late(self, active: ActiveCall, timeout: float) -> str:
        """The message of a deadline: which ranks have not entered the call."""
        epoch, call = active.epoch, active.prepared.call
        absent = self.absent(active)
        where = f"{call.collective} (call {epoch}) on rank {self.rank}"
        mine = call.tagged(call.signature())
        if not absent:
            stopped = "all ranks entered it, one of them has stopped inside"
            return f"{where}: waited {timeout:g} s; {stopped}; {mine}"
        made = f"which made no such call{self._last_of(absent[0])}"
        return late_call(where, timeout, named(absent), made, mine)

    def _last_of(self, rank: int) -> str:
        """The newest call that ``rank`` has entered, in brackets; "" if there is none."""
        state = self.shared_state
        epoch = state.words[rank][state.entered] >> 32
        if not epoch:
            return ""
        return f" (the last call of rank {rank} was call {epoch}, {state.shown(rank, epoch)})"
