"""The state of one rank of a communicator on GPUs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from ringcoll import log
from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.communicator.cpu.rank_calls import with_options
from ringcoll.communicator.cuda.message_state import MessageState
from ringcoll.communicator.explaining import explain_gpu
from ringcoll.communicator.group import current
from ringcoll.communicator.rank import RankState
from ringcoll.communicator.topology import Topology
from ringcoll.config import Config, Settings
from ringcoll.cuda.arrays import device_array
from ringcoll.cuda.device import Device
from ringcoll.cuda.streams import outside_capture
from ringcoll.errors import AbortedError, ArgumentError, Error, LaunchRefused, MachineError
from ringcoll.executors.binding import TraceEntry
from ringcoll.executors.contract import Given, LaunchRequest
from ringcoll.executors.cuda.async_errors import Watchdog
from ringcoll.executors.cuda.auto_register import MIN_BYTES, SteadyMemory
from ringcoll.executors.cuda.cuda_call import AnyCudaCall, CudaCall
from ringcoll.executors.cuda.executor import CudaExecutor
from ringcoll.executors.cuda.fast_path import FastPath
from ringcoll.executors.cuda.loader import Loader
from ringcoll.executors.cuda.loading import KERNEL_WAIT
from ringcoll.executors.cuda.preparing import mapped_buffers
from ringcoll.executors.cuda.recounted import RecountedCall
from ringcoll.executors.cuda.sending import CudaPairs
from ringcoll.executors.cuda.trace import Recorder
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.fabric import Fabric
from ringcoll.plan import Buffer
from ringcoll.symmetric.device import CudaSymmetricMemory
from ringcoll.transports.scratch import allocate_scratch
from ringcoll.tuner import Choice, Limits, choose
from ringcoll.tuner.choice import limits_of
from ringcoll.tuner.measured import PROTOCOL_SIZES
from ringcoll.tuner.simple import large_engine, least_large, needs_scratch
from ringcoll.tuner.table import Table
from ringcoll.views import Extent, extent_of

_SIZES = (*(by.samples[-1] for by in PROTOCOL_SIZES.values()), 32 << 20, 64 << 20)  # Simple
"""Bytes of a call by each protocol. Larger calls of a kind often follow a small one, and
NVRTC compiles a kernel of Simple in 0.5 to 0.9 s, of LL and LL128 in 0.2 s."""

_log = log.logger()


class CudaState(MessageState):
    """The state of one rank on a GPU; the ranks of a process share a ``loader``."""

    on_gpu = True

    @property
    def launches_on(self) -> tuple[int, object] | None:
        """This GPU's number, and what the communicator's ranks on it share."""
        return self.cuda.device.ordinal, self.cuda.shared_launch

    def __init__(
        self,
        fabric: Fabric,
        config: Config,
        settings: Settings,
        device: Device,
        loader: Loader,
        *,
        parent: RankState | None = None,
        ranks: Sequence[int] = (),
        topology: Topology | None = None,
        whole: bool = True,
    ) -> None:
        self.device, self.loader = device, loader
        self.register_uses = settings.register is not False and whole
        super().__init__(fabric, config, settings, parent=parent, ranks=ranks, topology=topology)
        if whole:  # not a part of a communicator that is still being made
            self.cuda.kernels.open()

    def _equip(self, parent: RankState | None, ranks: Sequence[int]) -> None:
        above = None if parent is None else parent.symmetric
        fabric, device = self.fabric, self.device
        memory, transport = allocate_scratch(
            fabric,
            device.ordinal,
            Workspace(fabric.nranks).nbytes,
            what="SCRATCH of a communicator",
            wanted=self.settings.transport,
            probed=parent is not None,  # by the ranks of the parent
        )
        self.settings = replace(self.settings, transport=transport)
        try:
            self.symmetric = CudaSymmetricMemory(
                fabric, device.ordinal, above, ranks, reached=transport == "p2p"
            )
            self.cuda = CudaExecutor(fabric, device, self.symmetric, self.loader, memory, transport)
        except BaseException:
            memory.close()
            raise
        try:
            if self.register_uses and transport == "p2p" and fabric.nranks > 1:
                self._open_auto_register()
            self.sending = CudaPairs(self.cuda)
        except BaseException:
            self.cuda.close()  # closes the memory, too
            raise
        self.cuda.kernels.kernel_wait = self.settings.kernel_wait or KERNEL_WAIT
        self.executor, self.pairs = self.cuda, self.sending
        if transport == "host" and self.topology.system is not None:
            why = "the ranks exchange data through pinned host memory"
            self.topology = replace(
                self.topology, stored=None, links=None, machine=None, reason=why
            )
        self.cuda.machine = replace(self.cuda.machine, known=self.topology.machine)
        self._watch = Watchdog(self.fabric, self.cuda)

    def _open_auto_register(self) -> None:
        try:
            self.cuda.open_auto_register()
        except MachineError as error:  # on all ranks
            _log.warning("automatic registration is off, calls stage plain buffers: %s", error)

    def _child(self, fabric: Fabric, ranks: Sequence[int], config: Config) -> RankState:
        settings, device, loader = self.settings, self.device, self.loader
        return CudaState(fabric, config, settings, device, loader, parent=self, ranks=ranks)

    def prepare(
        self,
        call: Call,
        config: Config,
        *,
        hellos_decide: bool = False,
        patience: float | None = None,
    ) -> CudaCall:
        """Prepare a checked call for this rank's executor; ``patience`` as in :meth:`timed`.

        With ``hellos_decide``, and if its buffers can be registered automatically, the ranks need
        not know whether peers reach all buffers: the launch carries a staged and a direct program,
        and the ranks' hellos select one.
        """
        self.usable()
        call = with_options(call, config)
        limits = _limits(call, config, self)
        if config.engine != "copy":  # copies need all addresses beforehand
            if not hellos_decide and call.nbytes >= MIN_BYTES:
                input_, output = extent_of(call.send), extent_of(call.recv)
                hello = self.cuda.hello(input_, output, registered=False)
                hellos_decide = _registers(call, config, self, mapped_buffers(call, hello))
            limits = replace(limits, hellos_decide=hellos_decide)
        scratch, large = self.cuda.large_scratch, large_engine(call, self.cuda.machine, limits)
        if scratch is not None and scratch.in_use:
            limits = replace(limits, large_scratch=large)
        others = partial(self._of_other_sizes, call, config)
        prepared = self.cuda.prepare(call, limits, self.timeout_of(config), others, patience)
        prepared.large = large is not None
        if self.debug:
            self.log_choice(call.tagged(prepared.signature_text))
        return prepared

    def _of_other_sizes(
        self, call: Call, config: Config, mapped: frozenset[Buffer]
    ) -> Iterator[tuple[Call, Limits]]:
        """A call by each protocol like this one, with its options, on memory of its class."""
        limits = _limits(call, config, self)
        if limits.proves or config.engine == "copy" or call.counts or not call.count:
            return
        for nbytes in _SIZES:
            other = call.with_count(max(1, nbytes * call.count // call.nbytes))
            decide = _registers(other, config, self, mapped)
            known = frozenset[Buffer]() if decide else mapped
            yield other, replace(limits, mapped=known, hellos_decide=decide)

    def recount(
        self, before: CudaCall, count: int, counted: Call | None = None
    ) -> RecountedCall | None:
        """A call that differs from a prepared one in its counts alone; None: prepare it."""
        if self.closed or self.inherited or self.broken is not None:  # saves a call
            self.usable()
        return None if self.debug else self.cuda.recount(before, count, counted)

    def prepare_like(self, before: CudaCall, call: Call, _config: Config) -> CudaCall | None:
        """Prepare a call that differs from a prepared one in its count alone; None: this cannot."""
        self.usable()
        return None if self.debug else self.cuda.prepare_like(before, call)

    def timed(self, before: AnyCudaCall, seconds: float) -> AnyCudaCall:
        """A prepared call with the timeout of one call.

        What it is like may be prepared for that call: then it waits no longer for a kernel.
        """
        found = before.timed.get(seconds)
        if found is not None:
            return found
        self.usable()
        return self.cuda.timed(before, seconds)

    @property
    def table(self) -> Table | None:
        """What ``ringcoll tune`` has measured of these ranks."""
        return self.cuda.machine.table

    def use_table(self, table: Table | None) -> None:
        """Choose by a table; the same on all ranks, before the first call."""
        self.cuda.machine = replace(self.cuda.machine, table=table)

    def choice(self, call: Call, config: Config, mapped: frozenset[Buffer]) -> Choice:
        """What a call runs whose buffers in ``mapped`` peers reach, after the first large ones."""
        decide = _registers(call, config, self, mapped)
        limits = replace(_limits(call, config, self), mapped=mapped, hellos_decide=decide)
        cuda, call = self.cuda, with_options(call, config)
        large = large_engine(call, cuda.machine, limits)
        limits = replace(limits, large_scratch=large)
        return choose(call, cuda.machine, limits, cuda.large_fits if large else cuda.fits)

    def memory_class(
        self,
        call: Call,
        config: Config,
        input_: Extent,
        output: Extent,
        *,
        hellos_decide: bool = False,
    ) -> tuple[Hashable, Given, SteadyMemory | None]:
        """What a preparation depends on of the buffers' memory, and what a launch is given.

        Both hold for these addresses until :meth:`unchanged` denies it of the third, if there is
        one. Kernels need to know which buffers all ranks reach; copy engines also where they lie,
        but with a large SCRATCH neither.
        """
        hello = self.cuda.hello(input_, output, registered=False)
        given, engine = (input_[0], output[0], *hello), self._large_engine(call, config)
        if config.engine == "copy":
            large = self._number_large(None) if engine else 0
            return (given, self.symmetric.changes, large), given, None
        if engine == "copy" and (large := self._number_large(None)):
            if (registry := self.cuda.auto_register) is not None:
                registry.poll()  # else what smaller calls have mapped would stay mapped
            return ("copy", large), given, None
        mapped, counted, before = mapped_buffers(call, hello), False, self.cuda.changes()
        kind: Hashable = mapped
        if hellos_decide or (call.nbytes >= MIN_BYTES and _registers(call, config, self, mapped)):
            self.usable()  # in a fork all memory looks freed, which the log would tell the peers
            rooted = COLLECTIVES[call.collective].has_root
            counted = hello == (0, 0) and not rooted
            hello = self.cuda.counted_hello(input_, output, hello, rooted=rooted)
            kind, given = None, (*given[:2], *hello)
        elif mapped:
            self.cuda.mappings.update()
        numbered = None
        if engine == "sm":
            staged = bool((input_[0] and not hello[0]) or (output[0] and not hello[1]))
            if not staged and call.collective == "reduce":
                staged = needs_scratch(call, self.cuda.machine, _limits(call, config, self))
            numbered = self._number_large(staged)
            kind = (kind, numbered) if numbered else kind
        memory = None
        if counted and hello[0] and hello[1] and engine != "copy":
            memory = SteadyMemory.of(input_[0], output[0], before, numbered)
        return kind, given, memory

    def unchanged(self, memory: SteadyMemory) -> bool:
        """Whether the memory of a call's buffers is what it was, as peers reach it.

        A large call has its number then.
        """
        if not self.cuda.unchanged(memory):
            return False
        if memory.large is None:
            return True
        # A closed or forked rank publishes no number: the call is refused where it is prepared.
        usable = not (self.closed or self.inherited) and self.broken is None
        return usable and self._number_large(staged=False) == memory.large

    def _large_engine(self, call: Call, config: Config) -> str | None:
        """What runs a call with the SCRATCH of large calls; None: it is not large."""
        machine = self.cuda.machine
        if call.nbytes < least_large(machine, config.engine):  # most are: it saves the options
            return None
        self.usable()  # a closed or forked rank allocates nothing, and publishes no number
        return large_engine(with_options(call, config), machine, _limits(call, config, self))

    def _number_large(self, staged: bool | None) -> int:
        """Number a large call of this rank; which large SCRATCH it has, 0 for none.

        ``staged``: see :meth:`.LargeScratch.number`.
        """
        scratch, group = self.cuda.large_scratch, current()
        if scratch is None:
            return 0
        collected = () if group is None else group.items
        before = sum(
            state is self and isinstance(item, LaunchRequest) and item.prepared.large
            for state, item, _ in collected
        )
        return scratch.generation if scratch.number(before, staged=staged) else 0

    def run(
        self,
        prepared: Any,
        stream: int | None = None,
        addresses: Given | None = None,
        _seconds: float | None = None,
    ) -> None:
        """Enqueue one call of this rank alone."""
        if self.closed or self.inherited or self.broken is not None:  # saves a call
            self.usable()
        try:
            self.fabric.check()
            if addresses is None:
                self.cuda.run(prepared, stream)
            else:
                self.cuda.launch(prepared, stream or 0, addresses)
        except BaseException as error:
            self.fail(error)
            raise

    def fast_path(self) -> FastPath | None:
        """What launches kept calls; None where ranks are threads: they are looked at each time."""
        timer = self.fabric.liveness
        return None if timer is None else FastPath(self, self.cuda, timer)

    def _memory_of(self, array: object, where: str) -> Any:
        ordinal = self.device.ordinal
        return device_array(array, argument="array", where=where, ordinal=ordinal)

    def memory(self) -> dict[str, int]:
        """The bytes of device memory of this rank, and of its peers that it maps, by purpose."""
        scratch, registry = self.cuda.large_scratch, self.cuda.auto_register
        return {
            "workspace": self.cuda.memory.nbytes + self.cuda.mappings.nbytes,
            "large calls": 0 if scratch is None else scratch.nbytes,
            "symmetric": self.symmetric.nbytes,
            "mapped": 0 if registry is None else sum(registry.mapped_bytes.values()),
        }

    def trim(self) -> None:
        """Wait for the enqueued calls, and give back what large ones have added; collective."""
        self.synchronize()
        with outside_capture():
            self.cuda.trim()
            self.symmetric.trim()

    def explain(self, collective: str, nbytes: int, config: Config) -> str:
        """What a call of ``nbytes`` runs, for which sizes that is chosen, and what others run."""
        return explain_gpu(collective, nbytes, self, config)

    def synchronize(self) -> None:
        """Wait for the enqueued calls; :meth:`check` raises their errors."""
        if self.inherited or self.closed:
            self.usable()
        try:
            self.cuda.synchronize()
        except MachineError as error:
            try:
                self.fabric.check()  # the death of a peer, whose memory is gone, may be the cause
            except Error as cause:
                self.fail(cause)
                raise cause from error
            self.fail(error)
            raise

    def start_trace(self) -> None:
        """Record the rows that kernels execute from now on; before the first call."""
        self.cuda.recorder = Recorder(self.device.ordinal)

    def traced(self) -> list[TraceEntry]:
        """The rows of the last call, which must be the only one since the last :meth:`traced`."""
        self.synchronize()
        recorder, last = self.cuda.recorder, self.cuda.async_errors.last
        if recorder is None or last is None:
            return []
        return recorder.rows(self.fabric.rank, last.choice, last.call.dtype)

    def fail(self, error: BaseException, *, begun: bool = False) -> None:
        """Record that a call failed, and stop the kernels of this rank that wait."""
        super().fail(error, begun=begun)
        if self.broken is not None:
            self.cuda.give_up(error)

    def is_busy(self) -> bool:
        """Whether enqueued calls may still run."""
        return not self.closed and not self.cuda.stream_order.ended()

    def missed_call(self, rank: int) -> str | None:
        """The call that waits for a launch with ``rank``; what kernels wait for they report."""
        active = self.cuda.running
        return None if active is None else active.call.tagged(active.signature_text)

    def abort(self, reason: str, *, error: type[BaseException] = AbortedError) -> None:
        """Abort the communicator, and stop the kernels of this rank that wait."""
        self.cuda.stream_order.stop()
        super().abort(reason, error=error)
        name = self.fabric.names[self.fabric.rank]
        self.cuda.give_up(error(f"rank {name} aborted: {reason}"))

    def forked(self) -> None:
        """Mark the state as inherited by a forked process."""
        super().forked()
        self.cuda.stream_order.stop()

    def leave(self) -> None:
        """Declare that this rank makes no more calls; none of its kernels may still run."""
        self.cuda.stream_order.stop()
        self._watch.stop()
        super().leave()

    def close(self) -> None:
        """Free all resources; not collective.

        Raises the error of failed calls that no wait has raised, and LaunchRefused while the last
        call's stream is being captured: then all stays open.
        """
        if self.closed or self.inherited:
            self._free()
            return
        self.cuda.stream_order.refuse_capture("close")
        with ExitStack() as mode:
            try:
                # Freeing memory would end a capture of any thread.
                mode.enter_context(outside_capture())
                # Before the watchdog stops: kernels may wait for a peer that dies.
                self.synchronize()
                # A capture that begins on that stream from now on contains none of its calls.
                self.cuda.stream_order.forget()
                if self.broken is None and self.cuda.failure() is not None:
                    self.check()
            finally:
                self._free()

    def _free(self) -> None:
        """Free all resources; no kernel may be running."""
        self._watch.stop()
        super().close()
        if self.cuda.recorder is not None:
            self.cuda.recorder.close()


def _limits(call: Call, config: Config, state: CudaState) -> Limits:
    """The options of a call; refuses an engine that the ranks do not have."""
    where = f"{call.collective} on rank {call.rank}: engine={config.engine!r}"
    if config.engine not in (None, "sm", "copy"):
        raise ArgumentError(f"{where} is not one of GPU ranks, which have 'sm' and 'copy'")
    if config.engine == "copy" and not state.cuda.alone:
        raise LaunchRefused(
            f"{where} needs a process for each GPU: with several in one their copies have been "
            f"seen to wait for each other; use mpiexec, or leave engine out"
        )
    limits = limits_of(call, config, state.config)
    if limits.blocks is not None and limits.blocks >= state.cuda.machine.blocks:
        return replace(limits, blocks=None)  # no limit: a table may decide
    return limits


def _registers(call: Call, config: Config, state: CudaState, mapped: frozenset[Buffer]) -> bool:
    """Whether a call's buffers can be registered automatically, beside those in ``mapped``.

    All ranks say the same: it depends on the call's shape, and on ``mapped`` as choices do.
    """
    kind = COLLECTIVES[call.collective]
    return (
        call.nbytes >= MIN_BYTES
        and state.cuda.auto_register is not None
        and not kind.prefix
        and not (config.engine == "copy" or callable(config.algorithm))
        and len(mapped) < (1 if call.counts or kind.has_root else 2)  # the most that all know
    )
