"""The CUDA executor: one rank's calls as kernels on a stream of its GPU.

A call is enqueued and never waited for. Its epoch is counted in device memory, so that a captured
call can be replayed among eager ones. A kernel that fails leaves a report in host memory, which the
next call reads without synchronizing with the device.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence

from ringcoll import log
from ringcoll.bounded import evict
from ringcoll.cuda.device import Current, Device, on
from ringcoll.cuda.streams import EventPool, waiting_ends_capture
from ringcoll.errors import AbortedError, Error
from ringcoll.executors.contract import Given, LaunchRequest
from ringcoll.executors.cuda.async_errors import TOLD
from ringcoll.executors.cuda.copy_launch import CopyLaunch
from ringcoll.executors.cuda.cuda_call import AnyCudaCall, CudaCall
from ringcoll.executors.cuda.loader import Loader
from ringcoll.executors.cuda.loading import Launching
from ringcoll.executors.cuda.preparing import CudaPreparer
from ringcoll.executors.cuda.reports import ABORT
from ringcoll.executors.cuda.shared_launch import PendingLaunch
from ringcoll.executors.drive import Pause, Task
from ringcoll.executors.mismatch import different_calls, late_call
from ringcoll.fabric import Fabric
from ringcoll.symmetric.device import CudaSymmetricMemory
from ringcoll.transports.peers import PeerMemory
from ringcoll.transports.scratch import Transport

_log = log.logger()


class CudaExecutor(CudaPreparer):
    """One rank's collectives on GPUs; it owns ``memory``, and constructing it is collective."""

    def __init__(
        self,
        fabric: Fabric,
        device: Device,
        symmetric: CudaSymmetricMemory,
        loader: Loader,
        memory: PeerMemory,
        transport: Transport = "p2p",
    ) -> None:
        self.running: AnyCudaCall | None = None
        self.in_order = True  # whether control calls and collectives have one order
        self.events = EventPool(device.ordinal)
        self.current = Current(device.ordinal)
        self._merged: dict[tuple[int, ...], tuple[Sequence[CudaCall], Launching]] = {}
        super().__init__(fabric, device, symmetric, loader, memory, transport, self._launch_all)
        self._records = self.shared_state.record_numbers
        self.failure: Callable[[], Error | None] = self.async_errors.failure
        """The error that a kernel of this rank has reported, or None."""

    # -- a call --------------------------------------------------------------------------------

    def run(
        self,
        prepared: AnyCudaCall | LaunchRequest,
        stream: int | None = None,
        addresses: Given | None = None,
    ) -> None:
        """Enqueue the whole call of this rank, on the arrays at these addresses."""
        if isinstance(prepared, LaunchRequest):
            self.run(prepared.prepared, prepared.stream, prepared.addresses)
            self.stream_order.release(prepared)
        else:
            self.launch(prepared, stream or 0, addresses or prepared.addresses)

    def launch(self, prepared: AnyCudaCall, stream: int, addresses: Given) -> None:
        """Enqueue a call on a stream that lives until the next one."""
        launchable = prepared.launchable
        if launchable is None:
            self.await_launch(self.submit(LaunchRequest(prepared, stream, addresses=addresses)))
            return
        if self.report.host[0]:
            self.async_errors.check()
        if self._records[prepared.slot] != prepared.number:
            self._publish(prepared)
        self.enqueue(launchable, stream, addresses)
        if prepared.large:
            self._count_large(prepared, stream)
        elif prepared.kernel is None:
            prepared.kernel = launchable.kernel
        self.async_errors.last = prepared
        self.fabric.entered += 1

    def enqueue(self, launchable: Launching, stream: int, addresses: tuple[int, ...]) -> None:
        """Enqueue a launch behind all earlier calls, on this rank's device."""
        order, current = self.stream_order, self.current
        if stream != order.settled:
            order.switch_to(stream)
        if current.get() == current.ordinal and current.thread.bound:
            launchable.launch(stream, addresses)
        else:
            with on(current.ordinal):
                launchable.launch(stream, addresses)
            current.thread.bound = True
        # Read after the launch: another thread may have begun to mark ends meanwhile, ahead of it.
        if order.marking:
            order.mark(stream)

    def task(self, calls: Sequence[LaunchRequest]) -> Task:
        """Several calls of this rank, in turns with those of other ranks in a group."""
        for request in calls:
            launchable = request.prepared.launchable
            if isinstance(launchable, CopyLaunch):
                self.async_errors.check()
                self.stream_order.switch_to(request.stream)
                self._publish(request.prepared)
                given = request.addresses or request.prepared.addresses
                for part in launchable.parts(request.stream, given):
                    with on(self.device.ordinal):
                        part()
                    yield Pause(lambda: True)  # a turn for the other devices of this thread
                if request.prepared.large:
                    self._count_large(request.prepared, request.stream)
                self.async_errors.last = request.prepared
                self.fabric.entered += 1
                self.stream_order.release(request)
                continue
            if launchable is not None:
                self.run(request)
                continue
            pending = self.submit(request)
            while not pending.launched.is_set():
                yield Pause(pending.launched.is_set)
            self.done(pending)
            self.stream_order.release(request)

    def _count_large(self, prepared: AnyCudaCall, stream: int) -> None:
        """Count a launched large call, which all ranks launch as often as this one."""
        scratch = self.large_scratch
        if scratch is None:
            return
        if not waiting_ends_capture(stream):
            scratch.launched()
        elif scratch.in_use and prepared.choice.takes_large:
            scratch.captured = True

    def _publish(self, prepared: AnyCudaCall) -> None:
        """Publish the signature text of this call again if later calls have overwritten it."""
        if self._records[prepared.slot] != prepared.number:
            self.shared_state.record(prepared.number, prepared.call.tagged(prepared.signature_text))

    def submit(self, call: LaunchRequest) -> PendingLaunch[LaunchRequest]:
        """Submit a call to the shared launch; the last rank of the device launches for all."""
        self.async_errors.check()
        self.stream_order.switch_to(call.stream)  # first: it may refuse the stream
        self._publish(call.prepared)
        self.running = self.async_errors.last = call.prepared
        self.fabric.entered += 1
        return self.shared_launch.submit(self.rank, call, call.stream)

    def await_launch(self, pending: PendingLaunch[LaunchRequest]) -> None:
        """Wait until a submitted call is launched."""
        prepared, timeout = pending.request.prepared, pending.request.timeout
        self.fabric.wait(
            pending.launched.is_set,
            deadline=self.fabric.deadline(timeout),
            describe=lambda: self.late(prepared, timeout),
            peers=lambda: self.absent(prepared),
        )
        self.done(pending)

    def done(self, pending: PendingLaunch[LaunchRequest]) -> None:
        """End a submitted call: raise the error of its launch."""
        self.running = None
        if pending.error is not None:
            raise pending.error

    def _launch_all(self, submitted: Sequence[LaunchRequest], stream: int) -> None:
        """Launch for all ranks of the device."""
        calls: list[CudaCall] = [call.prepared for call in submitted]
        for other in calls[1:]:
            if other.signature != calls[0].signature:
                raise different_calls(
                    f"launch on {self.device}",
                    [(side.at.rank, side.call.tagged(side.signature_text)) for side in calls],
                    symmetric=True,
                )
        key = tuple(map(id, calls))
        found = self._merged.get(key)
        if found is None:
            evict(self._merged, 64)
            found = self._merged[key] = (calls, self.launchable_of(calls))
        given = (call.addresses or call.prepared.addresses for call in submitted)
        with on(self.device.ordinal):
            found[1].launch(stream, tuple(itertools.chain.from_iterable(given)))

    # -- errors --------------------------------------------------------------------------------

    def compare(self, active: AnyCudaCall) -> None:
        """Does nothing: kernels compare the hellos."""

    def compare_last(self) -> None:
        """Raise a reported error, or a mismatch that no kernel has compared."""
        self.async_errors.compare_last()

    def late(self, active: AnyCudaCall, timeout: float) -> str:
        """The message of a deadline before the launch: ranks of the same device made no call."""
        return late_call(
            f"{active.call.collective} on rank {self.rank}",
            timeout,
            f"the other ranks of {self.device}",
            "with which it shares a launch",
            active.call.tagged(active.signature_text),
        )

    def absent(self, active: AnyCudaCall) -> list[int]:
        """The ranks without which a call cannot be launched."""
        return [rank for rank in self.shared_launch.ranks if rank != self.rank]

    def watch(self) -> Error | None:
        """Let kernels know which ranks have left; an error that is known by now."""
        self.async_errors.watch_departures(self.stream_order.ended)
        error = self.async_errors.control_mismatch(self.running) if self.in_order else None
        return error or self.async_errors.watch_mismatch() or self.failure()

    def give_up(self, error: BaseException | None = None) -> None:
        """Abort the kernels of this rank and, by an error of the cause, the launches it shares."""
        self.stream_order.stop()
        if self.report.nbytes and self.report.host:
            struct.pack_into("<I", self.report.host, ABORT, 1)
        known = next((kind for kind in (AbortedError, *TOLD) if type(error) is kind), None)
        self.shared_launch.withdraw(
            known(str(error))
            if known
            else AbortedError(
                f"rank {self.rank} aborted the launch that the ranks of {self.device} share; see "
                f"the error of that rank"
            )
        )

    def synchronize(self) -> None:
        """Wait for the last call; its kernels end by their own deadline."""
        self.stream_order.synchronize()

    def trim(self) -> None:
        """Give back what large calls have added but for what a graph may use; collective.

        All ranks decide alike, unmap, and free once all have unmapped. No call may be running, nor
        begin before this returns.
        """
        self._merged.clear()
        scratch, registry = self.large_scratch, self.auto_register
        if self.nranks == 1 or (scratch is None and registry is None):
            return
        gather = self.fabric.texts("trim")
        kept = "s" * (scratch is not None and scratch.captured) + "r" * self.stream_order.captured
        kept = "".join(gather(kept))
        if "s" in kept:
            scratch = None
        if "r" in kept:
            registry = None
        if kept:
            _log.info("rank %d: trim keeps memory that captured calls use", self.rank)
        if scratch is not None:
            scratch.unmap()
        if registry is not None:
            registry.withdraw()
        gather("")
        if scratch is not None:
            scratch.free()
        if registry is not None:
            registry.unmap_withdrawn()
        gather("")

    def close(self) -> None:
        """Free the memory once the kernels have ended; not collective."""
        self.synchronize()
        self.kernels.close()
        self._merged.clear()
        self.events.close()
        self.streams.close()
        self.running = None
        self.async_errors.close()
        self.stream_order.forget()
        if self.auto_register is not None:
            self.auto_register.close()
        if self.large_scratch is not None:
            self.large_scratch.close()
        self.mappings.close()
        self.memory.close()
        self.report.free()
        self.shared_state.close()
