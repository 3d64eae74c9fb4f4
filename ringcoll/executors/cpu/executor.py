"""The CPU executor: enter a call, agree on its launch, run this rank's rows, compare the hellos.

A small call is staged whatever its buffers are, so that data move without an agreement; the ranks
compare their hellos at the end. A large call first waits for all hellos: then every rank knows
which buffers the others can reach, and all choose the same launch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.errors import PlanError, UsageError
from ringcoll.executors.binding import Pacer, TraceEntry
from ringcoll.executors.contract import Given, LaunchRequest
from ringcoll.executors.cpu.binder import Binder, HostFits, agreed
from ringcoll.executors.cpu.call_entries import CallEntries
from ringcoll.executors.cpu.cpu_call import ActiveCall, BoundRows, Chosen, CpuCall, signature_of
from ringcoll.executors.drive import Lane, Pause, Task, drive, row_steps, run_paced_rows, steps
from ringcoll.executors.message_lane import MessageLane
from ringcoll.executors.node_signals import open_node_signals
from ringcoll.executors.shared_state import ANY_COUNT, RECORDS, Hello, SharedState, digest
from ringcoll.fabric import Fabric
from ringcoll.plan import Buffer
from ringcoll.symmetric.host import SymmetricMemory
from ringcoll.tuner import Choice, CpuRanks, Limits
from ringcoll.tuner.cpu import waits_for_hellos
from ringcoll.tuner.kept import KeptChoices
from ringcoll.tuner.measured import AGREED_BYTES
from ringcoll.views import extent_of, start_of

if TYPE_CHECKING:  # most CPU ranks know no machine
    from ringcoll.model.machine import Machine


class CpuExecutor(CallEntries):
    """One rank's side of the collectives of one communicator, with ``scratch`` bytes of SCRATCH.

    ``in_order``: calls of the control plane wait for the collectives before them.
    """

    def __init__(
        self,
        fabric: Fabric,
        symmetric: SymmetricMemory,
        *,
        scratch: int,
        pacer: Callable[[SharedState], Pacer] | None = None,
        in_order: bool = True,
        machine: Machine | None = None,
    ) -> None:
        shared_state = SharedState(fabric, scratch)
        node_signals = open_node_signals(fabric, shared_state)
        super().__init__(fabric, shared_state, node_signals, in_order=in_order)
        if node_signals is not None:
            node_signals.messages.on_mismatch(self.explain_mismatch)
        self.symmetric = symmetric
        self.pacer = pacer(shared_state) if pacer is not None else None
        self.binder = Binder(fabric, symmetric, shared_state, node_signals, self.pacer)
        self.epoch = 0
        self.trace: list[TraceEntry] | None = None
        self.left: Task | None = None  # a call that an interrupt has left, and nobody goes on with
        self.use(CpuRanks(fabric.nranks, fabric.nodes, machine))

    def use(self, machine: CpuRanks) -> None:
        """Choose for this machine; before the first call."""
        self.machine = machine
        self.choices = KeptChoices(machine, HostFits(self.shared_state.half_bytes))

    # -- a call, in three parts; a group runs the parts of several ranks together -----------

    def prepare(
        self,
        call: Call,
        limits: Limits,
        *,
        timeout: float,
        chosen: Chosen | None = None,
        like: CpuCall | None = None,
    ) -> CpuCall:
        """Prepare a checked call; ``timeout`` is in seconds, for each wait.

        ``like``: a prepared call with these limits that differs in its count alone.
        """
        if like is None:
            options, staged = limits.signature(call, self.nranks), _staged(call, limits)
        else:
            options, staged = like.options, like.staged
        agrees = waits_for_hellos(call, limits)
        shown, count = call.signature(), 0
        if call.count and not (call.counts or call.custom_signature):
            # The hello has it: another count changes no text.
            shown, count = shown.replace(f"count={call.count}", ANY_COUNT, 1), call.count
        if call.collective == "all_to_all":  # what it sends is overwritten on all ranks, or on none
            shown += f" in_place={call.in_place}"
        text = f"{shown} {options}".rstrip()
        code = digest(text)
        number, any_class = next(self.shared_state.numbers), not (agrees or self.fabric.nodes)
        reached = (0, 0)
        if not any_class:
            find = self.binder.mapped_address
            reached = find(*extent_of(call.send)), find(*extent_of(call.recv))
        signature = signature_of(code, count)
        hello = Hello(signature, number, *reached, call.in_place, _factor(call), count)
        if options:
            # Refuse wrong options before the other ranks see the call.
            words = {Buffer.INPUT: hello.send, Buffer.OUTPUT: hello.recv}
            mapped = frozenset(buffer for buffer, word in words.items() if word)
            choice = self.choice(call, replace(limits, mapped=mapped))
            if chosen is not None:
                chosen(call, choice)
        return CpuCall(
            call,
            limits,
            staged,
            options,
            code,
            text,
            agrees,
            hello,
            chosen=chosen,
            timeout=timeout,
            changes=0 if any_class else self.symmetric.changes,
            given=(start_of(call.send), start_of(call.recv), *reached),
            any_class=any_class,
            shown=call.tagged(shown),
            each=_bytes_of_one(call) if count else (0, 0, 0),
        )

    def choice(self, call: Call, limits: Limits) -> Choice:
        """What a call runs; a small one is staged whatever its buffers are."""
        if not waits_for_hellos(call, limits):
            limits = _staged(call, limits)
        return self.choices.choose(call, limits)

    def run(
        self, prepared: CpuCall, given: Given | None = None, seconds: float | None = None
    ) -> None:
        """The whole call of this rank, on the arrays at these addresses.

        ``seconds``: a timeout other than that of the prepared call.
        """
        active = self.enter(prepared, given, seconds)
        bound = self.bind(active)
        if len(bound.lanes) == 1 and not bound.messages:
            lane, base, fabric = bound.lanes[0], active.epoch << 32, self.fabric
            if self.pacer is not None:
                run_paced_rows(lane, base, self.idle, fabric.notify, fabric.fence)
            else:
                for pause in row_steps(lane, base, fabric.notify, fabric.fence, fabric.spins):
                    self.idle(pause.ready)
        elif bound.lanes:
            drive([steps(self.lanes(active))], self.idle)
        self.finish(active)

    def resume(self, active: ActiveCall, given: Given, row: int) -> None:
        """Go on with a call that the compiled part has entered, from a row of its only lane."""
        for pause in self._rest(active, given, row):
            self.idle(pause.ready)

    def rest(self, active: ActiveCall, given: Given, row: int) -> Task:
        """The same for whoever waits for it; until it has ended the next call begins with it."""
        self.left = task = self._rest(active, given, row)
        return task

    def _rest(self, active: ActiveCall, given: Given, row: int) -> Task:
        prepared, fabric = active.prepared, self.fabric
        if given != prepared.given:
            prepared.move_to(given)
        (lane,), base = self.bind(active).lanes, active.epoch << 32
        rest = itertools.islice(lane, row, None)
        yield from row_steps(rest, base, fabric.notify, fabric.fence, fabric.spins)
        self.finish(active)

    def task(self, calls: Sequence[LaunchRequest]) -> Task:
        """Several calls of this rank, one after the other, beside those of others in a group."""
        for request in calls:
            yield from self.one_task(request.prepared, request.addresses, request.seconds)

    def one_task(self, prepared: CpuCall, given: Given | None, seconds: float | None) -> Task:
        """One of them, as in :meth:`run`."""
        active = self.enter(prepared, given, seconds)
        for epoch in (active.epoch - 1, active.epoch if prepared.agrees else 0):
            while self.known < epoch and not self._all_entered(epoch):
                yield Pause(lambda epoch=epoch: self._all_entered(epoch))  # type: ignore[misc]
        bound, fabric = self.bind(active), self.fabric
        if self.pacer is None and len(bound.lanes) == 1 and not bound.messages:
            base, lane = active.epoch << 32, bound.lanes[0]
            yield from row_steps(lane, base, fabric.notify, fabric.fence, fabric.spins)
        else:
            yield from steps(self.lanes(active))
        self.finish(active)

    def enter(
        self, prepared: CpuCall, given: Given | None = None, seconds: float | None = None
    ) -> ActiveCall:
        """Publish this rank's hello, on arrays at these addresses, without waiting."""
        if self.left is not None:
            left, self.left = self.left, None
            drive([left], self.idle)  # first: it may be of the same prepared call
        if given is not None and given != prepared.given:
            prepared.move_to(given)
        if prepared.agrees and prepared.changes != self.symmetric.changes:
            self._refresh_mappings(prepared)
        epoch, number = self.epoch + 1, prepared.hello.record
        timeout = prepared.timeout if seconds is None else seconds
        active = ActiveCall(prepared, epoch, prepared.hello.signature, timeout)
        recorded = self.shared_state.record_numbers[number % RECORDS] == number
        if not recorded:
            self.shared_state.record(number, prepared.call.tagged(prepared.signature_text))
        self.running = active
        try:
            self.shared_state.enter(epoch, prepared.hello)
        finally:  # an exception may come before the word that peers see, or after it
            if self.shared_state.words[self.rank][self.shared_state.entered] < epoch << 32:
                self.running = None
            else:
                self.epoch = self.fabric.entered = epoch
        if self.node_signals is not None:
            self.node_signals.announce(self.epoch, None if recorded else number)
        notify = self.fabric.notify
        if notify is not None:
            for rank in self.peers:
                notify(rank)
        return active

    def _refresh_mappings(self, prepared: CpuCall) -> None:
        """Bind anew: symmetric memory has been allocated or freed since the last call."""
        call = prepared.call
        prepared.changes = self.symmetric.changes
        prepared.bound.clear()
        prepared.hello = replace(
            prepared.hello,
            send=self.binder.mapped_address(*extent_of(call.send)),
            recv=self.binder.mapped_address(*extent_of(call.recv)),
        )

    def bind(self, active: ActiveCall) -> BoundRows:
        """Wait for what must be known before the first byte moves; return the rows to run."""
        prepared, epoch = active.prepared, active.epoch
        if self.known < epoch - 1:
            self.await_entered(epoch - 1)
            if self.uncompared is not None:
                self._compare_hellos(self.uncompared)
                self.uncompared = None
        key: tuple[object, ...]
        if prepared.agrees:
            self.await_entered(epoch)
            self._compare_hellos(active)
            key = (
                epoch & 1,
                *self.shared_state.hello_bytes(epoch, scaled=prepared.hello.scalar is not None),
            )
        else:
            key = epoch & 1, prepared.call.count
        bound = prepared.bound.get(key)
        if bound is not None:
            bound.again = True
        elif prepared.counts:
            bound = prepared.take(epoch & 1)
        if bound is None or self.trace is not None:
            bound = self._bind_anew(active, key)
        elif bound.given != prepared.given:
            bound.move_to(prepared.call, prepared.given)
        active.bound = bound
        return bound

    def _bind_anew(self, active: ActiveCall, key: tuple[object, ...]) -> BoundRows:
        """Choose what a call runs, and bind all its rows."""
        prepared, epoch = active.prepared, active.epoch
        call, limits = prepared.call, prepared.staged
        ranks = range(self.nranks) if prepared.agrees else ()
        hellos = [self.shared_state.hello(rank, epoch) for rank in ranks]
        try:
            if prepared.agrees:
                mapped, in_place = agreed(
                    call,
                    hellos,
                    rank=self.rank,
                    nranks=self.nranks,
                    alike=callable(limits.algorithm),
                )
                limits = replace(prepared.limits, mapped=mapped, in_place=in_place)
            choice, layout = self.choices.find(call, limits)
            if prepared.chosen is not None:
                prepared.chosen(call, choice.on(layout=layout))
            elif prepared.any_class and prepared.hello.count and self.pacer is None:
                most = AGREED_BYTES.value // prepared.each[2]
                counts = self.choices.alike(call, limits)
                prepared.counts = range(counts.start, min(counts.stop, most + 1))
            bound = self.binder.bind(active, choice, layout, hellos, self.trace)
        except (UsageError, PlanError):
            # All ranks raise the same error, and no data have moved.
            self.finish(active)
            raise
        bound.given, bound.count = prepared.given, call.count
        if self.trace is None and not prepared.once:
            prepared.keep(key, bound)
        return bound

    def lanes(self, active: ActiveCall) -> list[Lane]:
        """The lanes of a bound call, for :func:`ringcoll.executors.drive.drive`."""
        bound = active.bound
        if bound is None:
            return []
        base, notify, fence = active.epoch << 32, self.fabric.notify, self.fabric.fence
        return [
            (MessageLane if at in bound.messages else Lane)(iter(rows), base, notify, fence)
            for at, rows in enumerate(bound.lanes)
        ]

    def finish(self, active: ActiveCall) -> None:
        """End a call: compare the hellos of all whose bytes are here, of all ranks if it is total.

        A rank has entered before its bytes go anywhere. Those of another node may have come by way
        of a third rank, and before their hello.
        """
        bound = active.bound
        if self.node_signals is not None and bound is not None:
            node_signals, met = self.node_signals, self._came_from(active, bound)
            self.idle(lambda: node_signals.settled(active.epoch, met))
        if bound is not None:
            mine, at = active.signature, self.shared_state.signatures[active.epoch & 3]
            for words in self.entered:
                if words[at] != mine:  # of another call, or of one before
                    self._compare_hellos(active)
                    break
        if bound is not None and bound.spare is not None:
            self.binder.leave(bound)  # now: a signal's handler may make a call before the end
        if bound is not None and bound.total:
            self.known = active.epoch
        elif self.known < active.epoch:
            self.uncompared = active
        self.running = None

    def _came_from(self, active: ActiveCall, bound: BoundRows) -> Collection[int]:
        """The ranks whose bytes may be here."""
        call = active.prepared.call
        kind = COLLECTIVES[call.collective]
        if kind.prefix:
            return bound.sources.union(range(self.rank))
        if bound.total or (kind.rooted == "output" and call.root == self.rank):
            return self.peers
        return bound.sources | ({call.root} if kind.rooted == "input" else set())

    def trim(self) -> None:
        """Give back the pages of SCRATCH where ranks are threads, and kept rows; collective."""
        self.binder.forget()
        if self.fabric.threads:
            self.fabric.allgather(b"", what="trim")  # no peer reads this rank's SCRATCH any more
            self.shared_state.discard()
            self.fabric.allgather(b"", what="trim")  # nor writes it before the pages are gone

    def close(self) -> None:
        """Release the shared state; not collective."""
        self.entered = []
        self.uncompared = self.running = None
        self.shared_state.close()


def _staged(call: Call, limits: Limits) -> Limits:
    """The memory that all ranks assume of a call that does not wait for hellos."""
    in_place = COLLECTIVES[call.collective].reduces
    if call.collective == "all_to_all":  # which all ranks say of it
        in_place = call.in_place
    return replace(limits, mapped=frozenset(), in_place=in_place)


def _factor(call: Call) -> complex | None:
    """premul_sum's factor as the peers read it: an int for integer elements, else a complex."""
    scalar = call.op.scalar if call.op is not None else None
    if scalar is None:
        return None
    return int(scalar.real) if call.dtype.category == "int" else complex(scalar)


def _bytes_of_one(call: Call) -> tuple[int, int, int]:
    """Bytes of both arrays and of a call for each element of its count."""
    sent, received = (0 if array is None else array.nbytes for array in (call.send, call.recv))
    return sent // call.count, received // call.count, call.nbytes // call.count
