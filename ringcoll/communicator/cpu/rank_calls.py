"""Calls of one rank in host memory: prepared, run, or left to a worker thread."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from inspect import GEN_CLOSED, GEN_SUSPENDED, getgeneratorstate
from typing import TYPE_CHECKING, Any, NoReturn

from ringcoll import log
from ringcoll.arguments.buffers import flat
from ringcoll.arguments.calls import Call
from ringcoll.communicator.cpu.message_thread import DEFER_BYTES
from ringcoll.communicator.cpu.worker import DeferredCall, Worker
from ringcoll.communicator.failures import more_frames, settle
from ringcoll.communicator.rank_errors import RankErrors
from ringcoll.communicator.topology import Topology
from ringcoll.communicator.work import Work
from ringcoll.config import Config
from ringcoll.errors import ArgumentError, Error, UsageError
from ringcoll.executors.binding import TraceEntry
from ringcoll.executors.contract import Given
from ringcoll.executors.cpu.cpu_call import CpuCall
from ringcoll.executors.cpu.small_calls import Started
from ringcoll.executors.drive import Task, drive
from ringcoll.fabric import Fabric
from ringcoll.host.limits import start
from ringcoll.plan import Buffer
from ringcoll.tuner.choice import Choice, CpuRanks, limits_of
from ringcoll.views import Extent

if TYPE_CHECKING:
    from ringcoll.tuner.table import Table


class RankCalls(RankErrors):
    """The calls of one rank; those of a CPU rank, which GPU ranks replace."""

    symmetric: Any
    topology: Topology
    lock: Any
    """A threading.RLock of the thread that runs a call."""
    debug = False
    """Whether choices are logged."""

    def __init__(self, fabric: Fabric, config: Config) -> None:
        super().__init__(fabric, config)
        self._worker: Worker | None = None

    def prepare(self, call: Call, config: Config) -> Any:
        """Prepare a checked call for this rank's executor."""
        self.usable()
        refuse_kernel_options(call, config, "CPU ranks", _CPU_OPTIONS)
        return self.prepare_on_host(call, config)

    def prepare_like(self, before: Any, call: Call, config: Config) -> Any:
        """Prepare a call that differs from a prepared one in its count alone; None: this cannot."""
        self.usable()
        if self.debug:
            return self.prepare_on_host(call, config)
        call, timeout = with_options(call, config), self.timeout_of(config)
        return self._host.prepare(call, before.limits, timeout=timeout, like=before)

    def prepare_on_host(self, call: Call, config: Config) -> CpuCall:
        """Prepare a checked call that runs in host memory."""
        limits = limits_of(call, config, self.config)
        logged: list[Choice] = []

        def log(call: Call, choice: Choice) -> None:
            from ringcoll.communicator.explaining import format_choice

            if choice not in logged:
                logged.append(choice)
                self.log_choice(format_choice(call, choice, limits))

        timeout, chosen = self.timeout_of(config), log if self.debug else None
        call = with_options(call, config)
        return self._host.prepare(call, limits, timeout=timeout, chosen=chosen)

    @property
    def table(self) -> Table | None:
        """What ``ringcoll tune`` has measured of these ranks."""
        return self._host.machine.table

    def use_table(self, table: Table | None) -> None:
        """Choose by a table; the same on all ranks, before the first call."""
        self._host.use(replace(self._host.machine, table=table))

    @property
    def machine(self) -> CpuRanks:
        """What choices are made for."""
        return self._host.machine

    def choice(self, call: Call, config: Config, mapped: frozenset[Buffer]) -> Choice:
        """What a call runs whose buffers in ``mapped`` peers reach."""
        return self.choice_on_host(call, config, mapped)

    def choice_on_host(self, call: Call, config: Config, mapped: frozenset[Buffer]) -> Choice:
        """The same in host memory."""
        limits = replace(limits_of(call, config, self.config), mapped=mapped)
        return self._host.choice(with_options(call, config), limits)

    def memory_class(
        self, _call: Call, _config: Config, input_: Extent, output: Extent
    ) -> tuple[Hashable, Given, object]:
        """None: rows are bound anew to other arrays; between nodes messages are not."""
        find = self._host.binder.mapped_address
        given = input_[0], output[0], find(*input_), find(*output)
        return ((given, self.symmetric.changes) if self.fabric.nodes else None), given, None

    def log_choice(self, text: str) -> None:
        """Log on rank 0 what a new call runs; all ranks choose the same."""
        if self.fabric.rank == 0:
            log.write(log.DEBUG, "%s: %s", self, text)

    def start_trace(self) -> None:
        """Record every row that is executed from now on."""
        self._host.trace = []

    def traced(self) -> list[TraceEntry]:
        """The rows executed since the last call of this method, by block in their order."""
        found = self._host.trace
        if found is None:
            return []
        self._host.trace = []
        return found

    def timeout_of(self, config: Config) -> float:
        """Seconds that a wait of a call may take."""
        return self.fabric.timeout if config.timeout is None else config.timeout

    def run(
        self,
        prepared: Any,
        _stream: int | None = None,
        addresses: Given | None = None,
        seconds: float | None = None,
    ) -> None:
        """Run one call of this rank alone; ``seconds``: its own timeout."""
        if self.closed or self.inherited or self.broken is not None:  # saves a call
            self.usable()
        try:
            self.fabric.check()
            self._host.run(prepared, addresses, seconds)
        except BaseException as error:
            limit = more_frames(error)
            try:
                self.raise_settled(error)
            finally:
                sys.setrecursionlimit(limit)

    def raise_settled(self, error: BaseException, *, begun: bool = False) -> NoReturn:
        """Note the error of a call, and raise it; ``begun`` as in :meth:`fail`."""
        known = settle([self], error, begun=begun)
        try:
            if known is error:
                raise error
            raise known from error
        finally:
            # A frame that refers to its own error lives until cycles are collected.
            del known, error

    def submit(self, call: Callable[[], None], alive: object, name: str = "") -> Work:
        """Run a call on this rank's worker thread; ``alive`` is kept until it is done."""
        return self._ready_worker().submit(call, alive, name)

    def submit_prepared(
        self,
        prepared: CpuCall,
        given: Given | None,
        seconds: float | None,
        alive: tuple[object, ...],
        after: Callable[[], None] | None = None,
    ) -> Work:
        """Run a prepared call on a thread that waits for it, or on the worker.

        ``after`` is called once it has ended well, while no other call runs.
        """
        worker = self._ready_worker()
        call = AsyncCollective(self, self._host.one_task(prepared, given, seconds), alive, after)
        name = prepared.shown_on(given)
        fabric = self.fabric
        if fabric.threads or fabric.nodes or prepared.call.nbytes >= DEFER_BYTES:
            return worker.submit(call, alive, name)
        return worker.submit_deferred(call, alive, name)

    def submit_started(self, started: Started, alive: tuple[object, ...]) -> Work:
        """The work of a call that the compiled part has entered, and perhaps ended."""
        active, given, rest = started
        name = active.prepared.shown_on(given)
        if rest is None:
            work = Work(name)
            work._end()
            return work
        call = AsyncCollective(self, rest, alive)
        return self._ready_worker().submit_deferred(call, alive, name, begun=True)

    def _ready_worker(self) -> Worker:
        self.usable()
        self.fabric.adopt()
        if self._worker is None:
            what = f"{self}: an asynchronous call"
            self._worker = start(lambda: Worker(f"ringcoll rank {self.fabric.rank}"), what)
            # The thread ends with the communicator, even if that is collected without close().
            weakref.finalize(self, self._worker.close, 0).atexit = False
        return self._worker

    def go_on(self, call: AsyncCollective) -> None:
        """Run an asynchronous call to its end, unless a signal's exception ends a wait of it.

        A signal's handler that waits or closes may end the call inside of this.
        """
        task, host = call.task, self._host
        with self.lock:  # another thread may run the task in its own call's enter()
            if task.gi_running:
                raise UsageError(
                    f"{self}: a signal's handler waits for the asynchronous call that the signal "
                    f"has interrupted; wait after the handler has returned"
                )
            progress = self.progress
            try:
                if self.closed or self.inherited or self.broken is not None:  # saves a call
                    self.usable()
                if progress is not None and progress._failed is not None:
                    progress.raise_unseen()
            except Error:
                call.ended = True
                raise
            host.left = None
            try:
                self.fabric.check()
                if host.pacer is None:
                    for pause in task:
                        host.idle(pause.ready)
                else:
                    drive([task], host.idle)
                call.ended = True
                if call.after is not None:
                    call.after()
            except BaseException as error:
                if call.ended:  # by a handler, which may have released the memory waited for
                    if self.closed and isinstance(error, (Error, ValueError)):
                        return
                    raise
                state = getgeneratorstate(task)
                if state != GEN_CLOSED and not isinstance(
                    error, (Error, MemoryError, RecursionError)
                ):
                    host.left = task if state == GEN_SUSPENDED else None
                    raise
                call.ended, limit = True, more_frames(error)
                try:
                    self.raise_settled(error)
                finally:
                    sys.setrecursionlimit(limit)
                    self.quarantine(call.alive)

    def is_busy(self) -> bool:
        """Whether asynchronous calls are left to run."""
        both = self._worker, self.progress
        return any(moves is not None and moves.is_busy() for moves in both)

    def yield_to_worker(self) -> None:
        """Wait for the asynchronous calls, so that a blocking call keeps its place in the order.

        Messages are not waited for: the peer may send only after this call.
        """
        worker = self._worker
        if worker is not None and not worker.is_current():
            worker.drain()
        if self.progress is not None:
            self.progress.raise_unseen()

    def synchronize(self) -> None:
        """Wait for the calls of the worker thread, and for the messages."""
        if self._worker is not None:
            self._worker.drain()
        if self.progress is not None:
            self.progress.drain()

    def register(self, array: object, *, undo: bool = False) -> bool:
        """Register an existing array (collective), or with ``undo`` unregister it."""
        self.usable()
        verb = "unregister" if undo else "register"
        memory = self._memory_of(array, f"{verb} on rank {self.fabric.rank}")
        if undo:
            self.symmetric.unregister(memory)
            return False
        return bool(self.together(lambda: self.symmetric.register(memory)))

    def _memory_of(self, array: object, where: str) -> Any:
        return flat(array, argument="array", where=where, writable=False)

    def memory(self) -> dict[str, int]:
        """The bytes of this rank's memory, by purpose."""
        return {"workspace": self._host.shared_state.nbytes, "symmetric": self.symmetric.nbytes}

    def trim(self) -> None:
        """Give back what large calls have added; collective, after this rank's calls."""
        self._host.trim()
        self.symmetric.trim()

    def explain(self, collective: str, nbytes: int, config: Config) -> str:
        """Which algorithm a call of ``nbytes`` with such options runs, and why."""
        from ringcoll.communicator.explaining import call_of, explain_cpu

        call = call_of(collective, nbytes, self.fabric.nranks)
        refuse_kernel_options(call, config, "CPU ranks", _CPU_OPTIONS)
        return explain_cpu(call, self, config)


class AsyncCollective(DeferredCall):
    """A collective with ``async_op``, with the arrays that it keeps alive."""

    def __init__(
        self,
        state: RankCalls,
        task: Task,
        alive: tuple[object, ...],
        after: Callable[[], None] | None = None,
    ) -> None:
        self._state, self.alive, self.after = state, alive, after
        self.task: Any = task

    def __call__(self) -> None:
        """Run the call, or go on with it."""
        self._state.go_on(self)


_CPU_OPTIONS = {"protocol": "Simple", "engine": "host", "max_sms": None}
"""What CPU ranks take of the options of kernels."""


def refuse_kernel_options(
    call: Call, config: Config, ranks: str, taken: Mapping[str, str | None]
) -> None:
    """Refuse options of kernels but those that are ``taken``: the host of ``ranks`` moves data."""
    for option in _not_taken(config, taken):
        given, value = getattr(config, option), taken[option]
        remedy = "leave it out" if value is None else f"{ranks} take {value!r}, or leave it out"
        raise ArgumentError(
            f"{call.collective} on rank {call.rank}: {option}={given!r} is for GPU ranks of "
            f"one node; {remedy}"
        )


def without_kernel_options(config: Config) -> Config:
    """Options without those of kernels that CPU ranks refuse."""
    return replace(config, **dict.fromkeys(_not_taken(config, _CPU_OPTIONS)))


def _not_taken(config: Config, taken: Mapping[str, str | None]) -> list[str]:
    """The options of kernels that are set to another value than the one that is taken."""
    return [name for name, value in taken.items() if getattr(config, name) not in (None, value)]


def with_options(call: Call, config: Config) -> Call:
    """A call with the options that are part of it: the type of its partial sums, and its tag."""
    if config.accumulate == "dtype" and call.collective != "send":
        call = replace(call, dtype=replace(call.dtype, wide=False))
    return replace(call, tag=config.tag) if config.tag else call
