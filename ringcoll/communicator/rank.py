"""The state of one rank of a communicator: memory, executors, errors and children."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ringcoll.arguments.buffers import flat
from ringcoll.arguments.calls import Call
from ringcoll.communicator.children import pack_color, ranks_of_color, remaining
from ringcoll.communicator.explaining import explain_cpu, format_choice
from ringcoll.communicator.failures import more_frames, reason_of, settle
from ringcoll.communicator.machine import agree_among, unknown
from ringcoll.communicator.progress import Progress
from ringcoll.communicator.rank_errors import RankErrors
from ringcoll.communicator.topology import Topology
from ringcoll.communicator.work import Work, Worker, patience_for
from ringcoll.config import Config, resolve
from ringcoll.errors import ArgumentError, MismatchError, RankLostError
from ringcoll.executors.contract import Given
from ringcoll.executors.cpu import CpuExecutor
from ringcoll.executors.cpu_call import CpuCall
from ringcoll.executors.pace import Pace, pacer
from ringcoll.executors.point_to_point import Pairs
from ringcoll.executors.rows import TraceEntry
from ringcoll.executors.shared_state import MESSAGES, VECTOR
from ringcoll.fabric import Fabric
from ringcoll.host.limits import start
from ringcoll.plan import Buffer
from ringcoll.symmetric.host import SymmetricMemory
from ringcoll.tuner.choice import Choice, CpuRanks, limits_of
from ringcoll.views import Extent

SCRATCH_BYTES = 15 << 20
"""SCRATCH a rank; with the rest of the shared state it stays below the promised 16 MiB."""

_log = logging.getLogger("ringcoll")


T = TypeVar("T")


class RankState(RankErrors):
    """The state of one rank; ``ranks`` are the numbers that its ranks have in ``parent``."""

    def __init__(
        self,
        fabric: Fabric,
        config: Config,
        *,
        pace: Pace | None = None,
        parent: RankState | None = None,
        ranks: Sequence[int] = (),
        topology: Topology | None = None,
    ) -> None:
        super().__init__(fabric, config)
        self.pace = pace
        self.topology = topology or unknown(self.on_gpu, "it has not been detected")
        self.lock = threading.RLock()
        self.symmetric: Any
        try:
            if parent is not None:
                above = parent.topology
                self.topology = agree_among(fabric, above, ranks, on_gpu=self.on_gpu)
            self._equip(parent, ranks)
        except BaseException as error:
            fabric.abort(reason_of(error), error=type(error))
            fabric.close()
            raise
        self._worker: Worker | None = None
        own = weakref.ref(self)
        fabric.busy = lambda: (state := own()) is not None and state.is_busy()
        self.debug: bool = parent is not None and parent.debug  # whether choices are logged

    on_gpu = False
    """Whether calls are enqueued on a stream instead of waited for."""

    def _equip(self, parent: RankState | None, ranks: Sequence[int]) -> None:
        """Memory and executors; collective."""
        pace, above = self.pace, None if parent is None else parent.symmetric
        self.symmetric = SymmetricMemory(self.fabric, above, ranks)
        make = None if pace is None else (lambda shared: pacer(pace, shared))
        host = CpuExecutor(
            self.fabric,
            self.symmetric,
            scratch=SCRATCH_BYTES,
            pacer=make,
            machine=self.topology.machine,
        )
        self._host, self.executor = host, host
        shared = self.fabric, host.shared_state, host.pacer, host.node_signals
        self.pairs = Pairs(*shared, context=VECTOR)
        self.progress = Progress(self, Pairs(*shared, context=MESSAGES))

    def _child(self, fabric: Fabric, ranks: Sequence[int], config: Config) -> RankState:
        """The state of this rank in a communicator of some of these ranks."""
        return RankState(fabric, config, pace=self.pace, parent=self, ranks=ranks)

    # -- calls -------------------------------------------------------------------------------

    def prepare(self, call: Call, config: Config) -> Any:
        """Prepare a checked call for this rank's executor."""
        self.usable()
        self._refuse_gpu_options(call, config)
        return self.prepare_on_host(call, config)

    def prepare_on_host(self, call: Call, config: Config) -> CpuCall:
        """Prepare a checked call that runs in host memory."""
        limits = limits_of(call, config, self.config)
        logged: list[Choice] = []

        def log(call: Call, choice: Choice) -> None:
            if choice not in logged:
                logged.append(choice)
                self.log_choice(format_choice(call, choice, limits))

        timeout, chosen = self.timeout_of(config), log if self.debug else None
        return self._host.prepare(
            with_options(call, config), limits, timeout=timeout, chosen=chosen
        )

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
    ) -> tuple[Hashable, Given]:
        """None: rows are bound anew to other arrays; between nodes messages are not."""
        find = self._host.binder.mapped_address
        given = input_[0], output[0], find(*input_), find(*output)
        return ((given, self.symmetric.changes) if self.fabric.nodes else None), given

    def log_choice(self, text: str) -> None:
        """Log on rank 0 what a new call runs; all ranks choose the same."""
        if self.fabric.rank == 0:
            _log.debug("%s: %s", self, text)

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

    def _refuse_gpu_options(self, call: Call, config: Config) -> None:
        """Refuse options of kernels: CPU ranks have one protocol and one engine."""
        only = {"protocol": "Simple", "engine": "host", "max_sms": None}
        for option, value in only.items():
            given = getattr(config, option)
            if given not in (None, value):
                raise ArgumentError(
                    f"{call.collective} on rank {self.fabric.rank}: {option}={given!r} is for GPU "
                    f"ranks; CPU ranks take {value!r}"
                )

    def run(
        self, prepared: Any, _stream: int | None = None, addresses: Given | None = None
    ) -> None:
        """Run one call of this rank alone."""
        if self.closed or self.inherited or self.broken is not None:  # saves a call
            self.usable()
        try:
            self.fabric.check()
            self._host.run(prepared, addresses)
        except BaseException as error:
            limit = more_frames(error)
            try:
                known = settle([self], error)
            finally:
                sys.setrecursionlimit(limit)
            try:
                if known is error:
                    raise
                raise known from error
            finally:
                del known  # a frame that refers to its own error lives until cycles are collected

    def submit(
        self, call: Callable[[], None], alive: object, name: str = "", nbytes: int | None = None
    ) -> Work:
        """Run a call later; with ``nbytes`` it may run on a thread that waits for it."""
        self.usable()
        self.fabric.adopt()
        if self._worker is None:
            what = f"{self}: an asynchronous call"
            self._worker = start(lambda: Worker(f"ringcoll rank {self.fabric.rank}"), what)
            # The thread ends with the communicator, even if that is collected without close().
            weakref.finalize(self, self._worker.close, 0).atexit = False
        patience = patience_for(nbytes, threads=self.fabric.threads)
        return self._worker.submit(call, alive, name, patience)

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

    def explain(self, collective: str, nbytes: int) -> str:
        """Which algorithm a call of ``nbytes`` runs, and why."""
        return explain_cpu(collective, nbytes, self)

    # -- children ----------------------------------------------------------------------------

    def color(self, color: int | None, key: int, config: Config | None) -> tuple[bytes, Config]:
        """What this rank says in a split, and the options of its part."""
        where = self.fabric.rank
        options = resolve(self.config, config, {}, f"split on rank {where}")
        return pack_color(color, key, where, options), options

    def split(self, color: int | None, key: int, config: Config | None) -> RankState | None:
        """This rank's part of a split; collective."""
        self.usable()
        rank = self.fabric.rank
        own, options = self.color(color, key, config)
        colors = self.together(lambda: self.fabric.allgather(own, what="split"))
        if color is None:
            return None
        members = ranks_of_color(colors, rank)
        fabric = self.fabric.subset(members, what=f"split, color {int(color)}")
        if config is not None and config.timeout is not None:
            fabric.timeout = config.timeout
        return self._child(fabric, members, options)

    def remaining(self, exclude: Sequence[int]) -> list[int]:
        """The ranks that are neither lost nor excluded."""
        fabric = self.fabric
        return remaining(exclude, set(fabric.lost()), fabric.rank, fabric.nranks)

    def shrink(self, exclude: Sequence[int]) -> RankState:
        """A communicator of the remaining ranks; collective among these."""
        rank, lost = self.fabric.rank, set(self.fabric.lost())
        members = remaining(exclude, lost, rank, self.fabric.nranks)
        self.fabric.drop(lost)
        try:
            fabric = self.fabric.subset(members, what="shrink")
        except RankLostError:
            if lost.issuperset(self.fabric.lost()):
                raise
            return self.shrink(exclude)  # without the rank that was lost meanwhile
        self.settled = self.settled or self.broken is not None or bool(lost)
        return self._child(fabric, members, self.config)

    # -- the end -----------------------------------------------------------------------------

    def stop(self) -> None:
        """Wait for the asynchronous calls; the caller holds no lock that they take."""
        if self.progress is not None and not self.inherited:
            self.progress.close()
        if self._worker is not None:
            self._worker.close()

    def forked(self) -> None:
        """Mark the state as inherited by a forked process, which has no threads of this one."""
        self.inherited, self._worker, self.progress = True, None, None

    def leave(self) -> None:
        """Declare that this rank makes no more calls; its memory stays until :meth:`close`."""
        self.fabric.leave()

    def close(self) -> None:
        """Free all resources; not collective."""
        if self.closed:
            return
        try:
            if self.broken is None and not self.inherited:
                self.executor.compare_last()
        except MismatchError as error:
            self.fail(error)
            raise
        finally:
            self.closed = True
            self.broken = None  # its frames refer to the call's arrays
            # The last one first; each is closed whatever the others raise.
            with contextlib.ExitStack() as rest:
                rest.callback(self.fabric.close)
                rest.callback(self.symmetric.close)
                rest.callback(self.executor.close)
                self.fabric.leave()


def with_options(call: Call, config: Config) -> Call:
    """A call with the options that are part of it: the type of its partial sums, and its tag."""
    if config.accumulate == "dtype" and call.collective != "send":
        call = replace(call, dtype=replace(call.dtype, wide=False))
    return replace(call, tag=config.tag) if config.tag else call
