"""What one rank of a communicator on GPUs holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

from ringcoll.arguments.calls import Call
from ringcoll.communicator.explaining import explain_gpu
from ringcoll.communicator.rank import RankState, with_options
from ringcoll.communicator.selection import Choice, prove, wished_plan
from ringcoll.communicator.topology import Topology
from ringcoll.config import Config
from ringcoll.cuda.arrays import device_array
from ringcoll.cuda.device import Device
from ringcoll.cuda.streams import outside_capture
from ringcoll.dtypes import dtype_of
from ringcoll.errors import ArgumentError, Error, LaunchRefused, MachineError
from ringcoll.executors.contract import GroupCall
from ringcoll.executors.cuda.async_errors import Watchdog
from ringcoll.executors.cuda.cuda_call import CudaCall
from ringcoll.executors.cuda.executor import CudaExecutor
from ringcoll.executors.cuda.kernel_choice import KernelChoice
from ringcoll.executors.cuda.limits import KernelOptions
from ringcoll.executors.cuda.loader import Loader
from ringcoll.executors.cuda.sending import CudaPairs, PairCalls
from ringcoll.executors.cuda.trace import Recorder
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.executors.rows import TraceEntry
from ringcoll.fabric import Fabric
from ringcoll.symmetric.device import CudaSymmetricMemory
from ringcoll.transports.scratch import Transport, allocate_scratch

T = TypeVar("T")


class CudaState(RankState):
    """What one rank of a communicator on GPUs holds; those of a process share a ``loader``."""

    on_gpu = True

    def __init__(
        self,
        fabric: Fabric,
        config: Config,
        device: Device,
        loader: Loader,
        *,
        transport: Transport | None = None,
        parent: RankState | None = None,
        ranks: Sequence[int] = (),
        topology: Topology | None = None,
    ) -> None:
        self.device, self.loader, self.transport = device, loader, transport
        super().__init__(fabric, config, parent=parent, ranks=ranks, topology=topology)

    def _equip(self, parent: RankState | None, ranks: Sequence[int]) -> None:
        above = None if parent is None else parent.symmetric
        fabric, device = self.fabric, self.device
        memory, self.transport = allocate_scratch(
            fabric,
            device.ordinal,
            Workspace(fabric.nranks).nbytes,
            what="SCRATCH of a communicator",
            wanted=self.transport,
            probed=parent is not None,  # by the ranks of the parent
        )
        try:
            self.symmetric = CudaSymmetricMemory(
                fabric, device.ordinal, above, ranks, reached=self.transport == "p2p"
            )
            self.cuda = CudaExecutor(
                fabric, device, self.symmetric, self.loader, memory, self.transport
            )
        except BaseException:
            memory.close()
            raise
        try:
            self.sending = CudaPairs(self.cuda)
        except BaseException:
            self.cuda.close()  # the memory, too
            raise
        self.executor, self.pairs = self.cuda, self.sending
        if self.transport == "host" and self.topology.system is not None:
            why = "the ranks meet in pinned host memory"
            self.topology = replace(
                self.topology, stored=None, links=None, machine=None, reason=why
            )
        self.cuda.resources = replace(self.cuda.resources, machine=self.topology.machine)
        self._watch = Watchdog(self.fabric, self.cuda)

    def _child(self, fabric: Fabric, ranks: Sequence[int]) -> RankState:
        return CudaState(
            fabric,
            self.config,
            self.device,
            self.loader,
            transport=self.transport,
            parent=self,
            ranks=ranks,
        )

    def prepare(self, call: Call, config: Config, *, asked: bool = False) -> CudaCall:
        """Prepare a checked call for this rank's executor.

        With ``asked`` each hello says whether peers reach the buffers: ranks need not agree.
        """
        self.usable()
        where = f"{call.collective} on rank {self.fabric.rank}"
        if config.engine not in (None, "sm", "copy"):
            raise ArgumentError(
                f"{where}: engine={config.engine!r} is not one of GPU ranks, which have 'sm' and "
                f"'copy'"
            )
        if config.engine == "copy":
            _check_alone(self.cuda, where)
        call = with_options(call, config)
        choice = self._choice(call, config)
        options = self._options(call, config, choice)
        if asked and config.engine != "copy":  # the host tells copy engines where everything lies
            options = replace(options, hellos_decide=True)
        ready = self.cuda.prepare(call, options, self.timeout_of(config))
        _prove(ready.choice, choice)
        if self.debug:
            self.log_choice(call.tagged(ready.signature_text))
        return ready

    def _options(self, call: Call, config: Config, choice: Choice) -> KernelOptions:
        """The options that decide what runs; a user's algorithm is proven."""
        return KernelOptions(
            algorithm=choice.algorithm if isinstance(choice.algorithm, str) else None,
            protocol=config.protocol,
            slices=config.slices,
            blocks=config.max_sms,
            plan=wished_plan(call, self.fabric.nranks, choice),
            engine=config.engine,
            channels=self._channels(call, config),
            ordered=bool(config.deterministic),
        )

    def paired(
        self, calls: tuple[Call, ...], stream: int, timeout: float, *, owned: bool, most: int | None
    ) -> GroupCall:
        """Sends and receives that are launched together; ``most``: CUDA blocks."""
        most = None if most is None else min(most, self.cuda.resources.blocks)
        return PairCalls(self.sending, calls, stream, timeout, owned, most)

    def run(self, prepared: Any, stream: int | None = None) -> None:
        """Enqueue one call of this rank alone."""
        if self.closed or self.inherited or self.broken is not None:  # a call less on the hot path
            self.usable()
        try:
            self.fabric.check()
            self.cuda.run(prepared, stream)
        except BaseException as error:
            self.fail(error)
            raise

    def _memory_of(self, array: object, where: str) -> Any:
        ordinal = self.device.ordinal
        return device_array(array, argument="array", where=where, ordinal=ordinal)

    def together(self, call: Callable[[], T]) -> T:
        """Make a collective call of the control plane; kernels know its memory when it returns.

        A hello may name that memory to a captured call, and a replay prepares nothing.
        """
        made = super().together(call)
        if self.cuda.auto_register is not None:
            self.cuda.mappings.update()
        return made

    def explain(self, collective: str, nbytes: int) -> str:
        """What a call of so many bytes runs, how far that holds, and what runs beyond."""
        config = self.config
        call = Call(collective, self.fabric.rank, None, None, 0, dtype_of("float32"))
        choice = Choice(self._algorithm(call, config), deterministic=bool(config.deterministic))

        def check(chosen: KernelChoice) -> None:
            if chosen.engine == "copy":
                _check_alone(self.cuda, f"{collective} on rank {self.fabric.rank}")
            _prove(chosen, choice)

        return explain_gpu(
            collective,
            nbytes,
            self.cuda.resources,
            topology=self.topology,
            options=self._options(call, config, choice),
            check=check,
        )

    def synchronize(self) -> None:
        """Wait for what was enqueued; what has failed is for ``check`` to raise."""
        if self.inherited or self.closed:
            self.usable()
        try:
            self.cuda.synchronize()
        except MachineError as error:
            try:
                self.fabric.check()  # a peer that died takes its memory along
            except Error as news:
                self.fail(news)
                raise news from error
            self.fail(error)
            raise

    def start_trace(self) -> None:
        """Let kernels note the rows that they execute; before the first call."""
        self.cuda.recorder = Recorder(self.device.ordinal)

    def traced(self) -> list[TraceEntry]:
        """The rows of the last call, which must be the only one since this was last asked."""
        self.synchronize()
        recorder, last = self.cuda.recorder, self.cuda.async_errors.last
        if recorder is None or last is None:
            return []
        return recorder.rows(self.fabric.rank, last.choice, last.call.dtype)

    def fail(self, error: BaseException, *, begun: bool = False) -> None:
        """Record that a call failed, and stop the kernels of this rank that wait."""
        super().fail(error, begun=begun)
        if self.broken is not None:
            self.cuda.give_up()

    def missed_call(self, rank: int) -> str | None:
        """Nothing: kernels wait, and their report names the call."""
        return None

    def abort(self, reason: str) -> None:
        """Abort the communicator, and stop the kernels of this rank that wait."""
        super().abort(reason)
        self.cuda.give_up()

    def leave(self) -> None:
        """Declare that this rank makes no more calls; none of its kernels may still run."""
        self._watch.stop()
        super().leave()

    def close(self) -> None:
        """Let go of everything; not collective.

        LaunchRefused if the last call's stream is being captured: then all stays open. Failed calls
        that nobody had waited for raise their error.
        """
        if self.closed or self.inherited:
            self._let_go()
            return
        self.cuda.stream_order.refuse_capture("close")
        with ExitStack() as mode:
            try:
                # To free memory would end whatever any thread captures meanwhile.
                mode.enter_context(outside_capture())
                # Until its kernels have ended a rank must hear of peers that died.
                self.synchronize()
                # A capture that begins on that stream now has none of its calls.
                self.cuda.stream_order.forget()
                if self.broken is None and self.cuda.failure() is not None:
                    self.check()
            finally:
                self._let_go()

    def _let_go(self) -> None:
        """The end of what nothing waits for any more."""
        self._watch.stop()
        super().close()
        if self.cuda.recorder is not None:
            self.cuda.recorder.close()


def _prove(chosen: KernelChoice, choice: Choice) -> None:
    """Prove all that may run, in as many slices as show how they repeat."""
    for found in chosen.variants:
        prove(found.plan, replace(found.launch, slices=min(found.launch.slices, 6)), choice)


def _check_alone(executor: CudaExecutor, where: str) -> None:
    """Refuse copy engines where a process has several GPUs."""
    if not executor.alone:
        raise LaunchRefused(
            f"{where}: engine='copy' needs a process for each GPU: with several in one their "
            f"copies have been seen to wait for each other; use mpiexec, or leave engine out"
        )
