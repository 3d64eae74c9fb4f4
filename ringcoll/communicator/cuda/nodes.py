"""One rank of a communicator of GPUs on several nodes.

Between nodes its calls run as those of CPU ranks on pinned host memory;
:mod:`ringcoll.executors.cuda_nodes` orders them with the caller's stream. Inside a node the ranks
have a communicator of their own, of GPU ranks of one node, with the node's symmetric memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ringcoll import log
from ringcoll.arguments.calls import Call
from ringcoll.communicator.cpu.rank_calls import refuse_kernel_options
from ringcoll.communicator.cpu.waiting import wait_for
from ringcoll.communicator.cuda.inside import inside_failure, members_of, open_inside
from ringcoll.communicator.cuda.nodes_calls import explain_across, first_piece, prepare_across
from ringcoll.communicator.cuda.state import CudaState
from ringcoll.communicator.explaining import call_of
from ringcoll.communicator.failures import reason_of
from ringcoll.communicator.rank import SCRATCH_BYTES, RankState
from ringcoll.communicator.topology import Topology
from ringcoll.config import Config, Settings
from ringcoll.cuda.arrays import device_array
from ringcoll.cuda.device import Device
from ringcoll.cuda.streams import outside_capture
from ringcoll.errors import (
    AbortedError,
    ClosedError,
    Error,
    MachineError,
    MismatchError,
)
from ringcoll.executors.contract import Executor, Given, GroupCall, PairExecutor
from ringcoll.executors.cpu.executor import CpuExecutor
from ringcoll.executors.cuda.loader import DeferredLoader, Loader
from ringcoll.executors.cuda_nodes.carry import on_one_core
from ringcoll.executors.cuda_nodes.exchange import Exchanges, RailLimits
from ringcoll.executors.cuda_nodes.executor import (
    CommunicatorThread,
    CudaNodesCall,
    CudaNodesExecutor,
    settle,
)
from ringcoll.executors.cuda_nodes.layers import Layers
from ringcoll.executors.cuda_nodes.phases import Phases
from ringcoll.executors.cuda_nodes.point_to_point import CudaNodesPairCalls, CudaNodesPairs
from ringcoll.executors.point_to_point import Pairs
from ringcoll.fabric import Fabric
from ringcoll.launch import ALL_MAPPED
from ringcoll.plan import Buffer
from ringcoll.symmetric.host import SymmetricMemory
from ringcoll.symmetric.nodes import NodesMemory
from ringcoll.tuner.choice import Choice, limits_of
from ringcoll.tuner.gpu import in_two_layers

_log = log.logger()
_OPTIONS = {"protocol": "Simple", "engine": "host"}  # of kernels, that such ranks take
_SOON, _INTERVAL = 1.0, 1e-3  # seconds until a comparison has failed everywhere, between looks


@dataclass(frozen=True, slots=True)
class _Host:
    """What the waits of the communicator's thread check."""

    fabric: Fabric
    executor: Executor
    pairs: PairExecutor
    progress: None = None


class NodesState(RankState):
    """The state of one rank of a communicator of GPUs on several nodes."""

    on_gpu = True
    inside: CudaState
    """The communicator of this node's ranks."""

    def __init__(
        self,
        fabric: Fabric,
        config: Config,
        settings: Settings,
        device: Device,
        loader: Loader,
        *,
        parent: NodesState | None = None,
        ranks: Sequence[int] = (),
        topology: Topology | None = None,
    ) -> None:
        self.device = device
        self.loader = (
            loader if isinstance(loader, DeferredLoader) else DeferredLoader(loader, settle)
        )
        super().__init__(fabric, config, settings, parent=parent, ranks=ranks, topology=topology)
        self.inside.cuda.kernels.open()

    def _equip(self, parent: RankState | None, ranks: Sequence[int]) -> None:
        fabric, device = self.fabric, self.device
        if parent is None and on_one_core():
            _log.warning(
                "init: rank %d is bound to one core, which its transfer thread shares with the "
                "program; calls across nodes will be slow: use mpiexec --bind-to none",
                fabric.rank,
            )
        own = fabric.nodes[fabric.rank]
        self.node_ranks = [rank for rank, node in enumerate(fabric.nodes) if node == own]
        above = parent if isinstance(parent, NodesState) else None
        self.inside = open_inside(
            fabric.subset(self.node_ranks, what="init: the ranks of a node"),
            config=self.config,
            settings=self.settings,
            device=device,
            loader=self.loader,
            parent=None if above is None else above.inside,
            ranks=[above.node_ranks.index(ranks[r]) for r in self.node_ranks] if above else (),
        )
        self.settings = self.inside.settings  # with the transport of this node
        self.inside.cuda.in_order = False  # its calls are launched by the communicator's thread
        made = contextlib.ExitStack()
        made.callback(self.inside.close)
        try:
            host_memory = SymmetricMemory(fabric)
            made.callback(host_memory.close)
            self._host = CpuExecutor(
                fabric,
                host_memory,
                scratch=SCRATCH_BYTES,
                in_order=False,
                machine=self.topology.machine,
            )
            made.callback(self._host.close)
            pairs = Pairs(fabric, self._host.shared_state, None, self._host.node_signals)
            side = _Host(fabric, self._host, pairs)
            thread = CommunicatorThread(
                lambda job: self.submit(job, ()),
                lambda error: self.fail(error, begun=True),
                lambda: self.broken,
            )
            self.cuda = CudaNodesExecutor(
                fabric, device, self._load, self._host, thread, self._failure
            )
            made.callback(self.cuda.close)
            # Calls inside a node are parts of this communicator's calls, on the same streams.
            self.inside.cuda.stream_order = self.cuda.stream_order
            self.inside.cuda.kernels.order = self.cuda.stream_order

            def wait(ready: Callable[[], bool], timeout: float) -> None:
                wait_for([side], ready, timeout)

            self.sending = CudaNodesPairs(self.cuda, pairs, wait)
            self.set_rail_limits(RailLimits())
        except BaseException:
            self.inside.abort("the rest of the communicator could not be made")
            made.close()
            raise
        self.executor, self.pairs = self.cuda, self.sending
        self.symmetric = NodesMemory(fabric, self.inside.symmetric, host_memory)

    def set_rail_limits(self, limits: RailLimits) -> None:
        """Cut calls in two layers by these limits; the same on all ranks, before the first call."""
        members = members_of(self.fabric.nodes)
        exchanges = Exchanges(self.cuda, self._failure, limits)
        self.layers = Layers(Phases(self.cuda, exchanges, self.inside.cuda, members))

    def _failure(self) -> Error | None:
        return inside_failure(self.inside, self.node_ranks, self.fabric.rank)

    def _load(self, text: str) -> int:
        where = f"a call across nodes on rank {self.fabric.rank}"
        return self.inside.cuda.kernels.function(text, self.fabric.timeout, where)

    def _child(self, fabric: Fabric, ranks: Sequence[int], config: Config) -> RankState:
        settings, device, loader = self.settings, self.device, self.loader
        if fabric.nodes:
            return NodesState(fabric, config, settings, device, loader, parent=self, ranks=ranks)
        above, ranks = self.inside, [self.node_ranks.index(rank) for rank in ranks]
        return CudaState(fabric, config, settings, device, loader, parent=above, ranks=ranks)

    # -- calls -------------------------------------------------------------------------------

    def prepare(self, call: Call, config: Config) -> CudaNodesCall:
        """Cut a checked call into pieces or slices, and prepare them."""
        self.usable()
        refuse_kernel_options(call, config, "those of several", _OPTIONS)
        try:
            return prepare_across(self, call, config)
        except BaseException as error:
            # Allocating or loading may fail on one rank alone, for which the others would wait.
            self.fail(error)
            raise

    def in_layers(self, call: Call, config: Config) -> bool:
        """Whether a call runs in two layers; the same on all ranks."""
        limits = limits_of(call, config, Config())
        return self.layers.supports(call) and in_two_layers(call, limits)

    def choice(self, call: Call, config: Config, mapped: frozenset[Buffer]) -> Choice:
        """What the first piece of a call runs, which lies in pinned host memory."""
        piece = first_piece(call, self.fabric.nranks)
        return self.choice_on_host(piece, config, mapped - ALL_MAPPED)

    def paired(
        self,
        calls: tuple[Call, ...],
        stream: int,
        timeout: float,
        *,
        owned: bool,
        most: int | None,
        engine: str | None = None,
    ) -> GroupCall:
        """Sends and receives that are enqueued together; other options have no meaning here."""
        return CudaNodesPairCalls(self.sending, calls, stream, timeout, owned)

    def run(
        self,
        prepared: Any,
        stream: int | None = None,
        _addresses: Given | None = None,
        _seconds: float | None = None,
    ) -> None:
        """Enqueue one call of this rank alone."""
        self.usable()
        try:
            self.fabric.check()
            self.cuda.run(prepared, stream)
        except BaseException as error:
            # The call may have failed on the worker while this thread enqueued it.
            if self._failed_before(error) and self.broken is not None:
                self.raised = True
                raise self.broken from None
            self.fail(error)
            raise

    def _failed_before(self, error: BaseException) -> bool:
        """Whether an error follows from one of the worker's, which names the user's call.

        Kernels inside a node run once a peer's comparison has failed and released its stream, and
        find the difference too, of calls that no user has made: maybe before this rank's worker.
        """
        late = time.monotonic() + _SOON
        while isinstance(error, MismatchError) and self.broken is None and time.monotonic() < late:
            time.sleep(_INTERVAL)
        return isinstance(error, (ClosedError, MismatchError))

    def yield_to_worker(self) -> None:
        """Does nothing: streams wait for the worker's calls."""

    def _memory_of(self, array: object, where: str) -> Any:
        ordinal = self.device.ordinal
        return device_array(array, argument="array", where=where, ordinal=ordinal)

    def memory(self) -> dict[str, int]:
        """The bytes of memory of this rank, by purpose; "host" is of the host."""
        host = self._host.shared_state.nbytes + self.cuda.nbytes
        return {**self.inside.memory(), "slices": self.layers.nbytes, "host": host}

    def trim(self) -> None:
        """Wait for the enqueued calls, and give back what large ones have added; collective."""
        self.synchronize()
        with outside_capture():
            self.inside.cuda.trim()
            self.layers.close()  # kept calls hold its addresses: the caller has dropped them
            self.symmetric.trim()
            self._host.trim()

    def explain(self, collective: str, nbytes: int, config: Config) -> str:
        """Which algorithm runs between the ranks' host memory, and how data get there."""
        call = call_of(collective, nbytes, self.fabric.nranks)
        refuse_kernel_options(call, config, "those of several", _OPTIONS)
        return explain_across(self, call, config)

    # -- errors ------------------------------------------------------------------------------

    def fail(self, error: BaseException, *, begun: bool = False) -> None:
        """Record that a call failed, and release the streams of this rank that wait."""
        partial = self.cuda.running is not None or bool(self.sending.running)
        super().fail(error, begun=begun)
        if self.broken is None:
            return
        self.cuda.give_up()
        self.inside.abort(reason_of(error), error=type(error))
        on_worker = self._worker is not None and self._worker.is_current()
        self.raised = self.raised or not on_worker
        if partial and not on_worker:
            # The caller gets the error now and may free arrays to which the stream still copies.
            with contextlib.suppress(Error):
                self.cuda.synchronize()

    def abort(self, reason: str, *, error: type[BaseException] = AbortedError) -> None:
        """Abort the communicator, and release the streams of this rank that wait."""
        super().abort(reason, error=error)
        self.cuda.give_up()
        self.inside.abort(reason, error=error)

    def synchronize(self) -> None:
        """Wait for the enqueued calls; :meth:`check` raises their errors."""
        if self.inherited or self.closed:
            self.usable()
        try:
            self.cuda.synchronize()
        except MachineError as error:
            self.fail(error)
            raise
        super().synchronize()
        self._compare_last()

    def _compare_last(self) -> None:
        """Compare the hellos of a last, rooted call; no call may be under way."""
        if self.broken is None:
            try:
                self._host.compare_last()
            except MismatchError as error:
                self.fail(error, begun=True)
                self.raised = False  # which is for ``check`` or ``close``

    def forked(self) -> None:
        """Mark the state as inherited by a forked process, which has no thread for the calls."""
        super().forked()
        self.inside.forked()

    # -- the end -----------------------------------------------------------------------------

    def stop(self) -> None:
        """Wait for the enqueued calls, then end the thread; refused while a stream is captured."""
        if not (self.closed or self.inherited):
            # First: after a refusal the communicator must stay usable, with its thread.
            self.cuda.stream_order.refuse_capture("close")
            with contextlib.suppress(Error):  # close() raises it
                self.synchronize()
        super().stop()

    def close(self) -> None:
        """Free all resources; not collective.

        Raises the error of failed calls unless the caller has seen it, and LaunchRefused while the
        last call's stream is being captured: then all stays open.
        """
        if self.closed:
            return
        if not self.inherited:
            self.cuda.stream_order.refuse_capture("close")
        if self.broken is not None and self.fabric.messages is not None:
            # Memory to which MPI may still write stays pinned.
            self.cuda.quarantined = not self.fabric.messages.give_up(())
        seen = self.settled or self.raised
        unseen = self.broken if isinstance(self.broken, Error) and not seen else None
        with contextlib.ExitStack() as mode:
            try:
                if not self.inherited:  # a child has no CUDA
                    # Freeing memory would end a capture of any thread.
                    mode.enter_context(outside_capture())
                self.sending.close()
                super().close()
            finally:
                self.layers.close()
                self.inside.close()
        if unseen is not None:
            raise unseen
