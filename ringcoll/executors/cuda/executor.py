"""The CUDA executor: one rank's calls as kernels on a stream of its GPU.

A call is enqueued and never waited for. Its epoch is counted in device memory, so that a captured
call can be replayed among eager ones. A kernel that fails leaves a report in host memory, which the
next call reads without synchronizing with the device.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.cuda.device import Device, joined_by_nvlink, on, runtime
from ringcoll.cuda.memory import host_mapped
from ringcoll.cuda.streams import EventPool, ReusedEvent
from ringcoll.errors import AbortedError, Error, MismatchError, RankLostError
from ringcoll.executors.contract import Given, LaunchRequest
from ringcoll.executors.cuda.async_errors import AsyncErrors
from ringcoll.executors.cuda.auto_register import AutoRegister
from ringcoll.executors.cuda.copy_launch import CopyLaunch, StreamPool, copy_launch
from ringcoll.executors.cuda.cuda_call import CudaCall
from ringcoll.executors.cuda.hellos import Hellos
from ringcoll.executors.cuda.kernel_body import KernelFits, body_of, gpu_ranks
from ringcoll.executors.cuda.loader import Launchable, Loader
from ringcoll.executors.cuda.loading import KernelLoading, Launching
from ringcoll.executors.cuda.mappings import Mappings
from ringcoll.executors.cuda.params import (
    Addresses,
    Body,
    Header,
    factor_bytes,
    given_address,
    pack,
    places_of,
)
from ringcoll.executors.cuda.reports import ABORT
from ringcoll.executors.cuda.shared_launch import PendingLaunch, SharedLaunch
from ringcoll.executors.cuda.signature import (
    OFFSET_BITS,
    copied_buffers,
    peer_addresses,
    signature_text,
)
from ringcoll.executors.cuda.stream_order import StreamOrder
from ringcoll.executors.cuda.trace import Recorder
from ringcoll.executors.cuda.workspace import MOST_BLOCKS, Workspace
from ringcoll.executors.drive import Pause, Task
from ringcoll.executors.mismatch import different_calls
from ringcoll.executors.shared_state import RECORDS, SharedState
from ringcoll.fabric import Fabric
from ringcoll.plan import Buffer
from ringcoll.symmetric.device import CudaSymmetricMemory
from ringcoll.transports.peers import PeerMemory
from ringcoll.transports.scratch import Transport
from ringcoll.tuner import GpuRanks, Limits, choose
from ringcoll.views import Extent, extent_of

_IDENTITY = struct.Struct("<QQiiii16s")
"""Process, number of its shared launch, device, multiprocessors, capability, bus address."""

_shared_launches: dict[int, SharedLaunch[LaunchRequest]] = {}
_numbers = itertools.count(1)


class CudaExecutor:
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
        self.fabric, self.device, self.symmetric, self.loader = fabric, device, symmetric, loader
        self.memory, self.transport = memory, transport
        self.rank, self.nranks = fabric.rank, fabric.nranks
        self.workspace = Workspace(self.nranks)
        self.fits = KernelFits(self.workspace)
        self.recorder: Recorder | None = None
        self.auto_register: AutoRegister | None = None
        self.running: CudaCall | None = None
        self.in_order = True  # whether control calls and collectives have one order
        self._events = EventPool(device.ordinal)
        self.stream_order = StreamOrder(device.ordinal, f"rank {fabric.rank}: {device}")
        self._device: Callable[[], int] = runtime().getDevice
        self._threads = threading.local()  # whether a thread has been bound to a context
        self._merged: dict[tuple[int, ...], tuple[Sequence[CudaCall], Launching]] = {}
        ordinal, pointers = device.ordinal, memory.pointers
        with ExitStack() as made:  # after an error here the caller still owns ``memory``
            self.shared_state = made.enter_context(closing(SharedState(fabric, 0)))
            self._records = self.shared_state.record_numbers
            self.report = host_mapped(self.workspace.report_bytes, ordinal=ordinal)
            made.callback(self.report.free)
            hellos = Hellos(self.workspace, self.rank, ordinal, pointers[self.rank])
            made.enter_context(closing(hellos))
            self.async_errors = AsyncErrors(fabric, self.report, hellos, self.shared_state)
            self.mappings = made.enter_context(closing(Mappings(self.nranks, ordinal, symmetric)))
            self.streams = made.enter_context(closing(StreamPool(ordinal)))
            copies = [pointer + self.workspace.copies for pointer in pointers]
            self.streams.warm(copies[self.rank], [pointer + 256 for pointer in copies])
            self.shared_launch, self.machine = self._group_by_device()
            self.stream_order.communicator = self.shared_launch
            self.kernels = KernelLoading(
                loader,
                device,
                fabric,
                self.stream_order,
                alone=len(self.shared_launch.ranks) == 1,
            )
            made.pop_all()

    def _group_by_device(self) -> tuple[SharedLaunch[LaunchRequest], GpuRanks]:
        """The launch shared by the ranks of this device, and what all ranks have; collective."""
        device, mine = self.device, next(_numbers)
        capability = device.major, device.minor
        pci = device.pci.encode()
        sent = _IDENTITY.pack(os.getpid(), mine, device.ordinal, device.sms, *capability, pci)
        received = [
            _IDENTITY.unpack(part)
            for part in self.fabric.allgather(sent, what="the ranks' devices")
        ]
        ranks = [
            rank
            for rank, (pid, _, ordinal, *_) in enumerate(received)
            if (pid, ordinal) == (os.getpid(), device.ordinal)
        ]
        addresses = [each[6] for each in received]
        together = max(map(addresses.count, addresses))
        most = min(int(each[3]) for each in received) // together
        drivers = {(pid, ordinal) for pid, _, ordinal, *_ in received}
        self.alone = len(drivers) == len({pid for pid, _ in drivers})
        first = int(received[ranks[0]][1])
        if self.rank == ranks[0]:
            _shared_launches[first] = SharedLaunch(
                ranks, device.ordinal, self._launch_all, self.fabric.notify
            )
        # NVLink keeps lines of 128 bytes whole between GPUs of one kind, and from Hopper on.
        kinds = {(int(each[4]), int(each[5])) for each in received}
        alike = len(kinds) == 1 or min(kinds) >= (9, 0)
        peers = [bytes(address).rstrip(b"\0").decode() for address in addresses]
        nvlink = alike and self.transport == "p2p" and joined_by_nvlink(device.pci, peers)
        agreed = self.fabric.allgather(bytes([nvlink]), what="the ranks' devices")
        shared_launch = _shared_launches[first]
        self.fabric.allgather(b"", what="the ranks' devices")
        _shared_launches.pop(first, None)
        blocks = max(1, min(most, MOST_BLOCKS))
        joined = all(map(any, agreed))
        return shared_launch, gpu_ranks(self.workspace, blocks, nvlink=joined, together=together)

    # -- a call --------------------------------------------------------------------------------

    def prepare(self, call: Call, limits: Limits, timeout: float) -> CudaCall:
        """Choose, compile and load: all work of a call but its launch. No array is read."""
        input_, output = extent_of(call.send), extent_of(call.recv)
        hello = self.hello(input_, output, registered=limits.hellos_decide)
        mapped = frozenset[Buffer]() if limits.hellos_decide else mapped_buffers(call, hello)
        choice = choose(call, self.machine, replace(limits, mapped=mapped), self.fits)
        known = copied_buffers(choice, hello)
        text = signature_text(choice, call, known)
        digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
        number = next(self.shared_state.numbers)
        self.shared_state.record(number, call.tagged(text))
        if choice.reads_hellos:
            self.mappings.update()
        at = Addresses(
            self.rank,
            self.memory.pointers,
            self.report.device,
            self.mappings.pointer,
            _given(hello, 2) if choice.reads_hellos else (0, 0),
            _given((input_[0], output[0]), 0),
            factor_bytes(call.op, call.dtype),
            peer_addresses(known, self.symmetric, self.nranks),
            trace=0 if self.recorder is None else self.recorder.address,
            launch=number,
        )
        signature = int.from_bytes(digest, "little")
        ready = CudaCall(
            replace(call, send=None, recv=None),
            choice,
            text,
            signature,
            number,
            number % RECORDS,
            timeout,
            at,
            (input_[0], output[0], *hello),
            None,
        )
        self.async_errors.prepared(ready)
        if len(self.shared_launch.ranks) == 1:
            ready.launchable = self._launchable([ready])
        return ready

    def hello(self, input_: Extent, output: Extent, *, registered: bool) -> tuple[int, int]:
        """Both buffers as peers reach them; ``registered``: also those registered automatically."""
        first = self._mapped_address(*input_, registered)
        return first, first if output == input_ else self._mapped_address(*output, registered)

    def _mapped_address(self, start: int, nbytes: int, registered: bool) -> int:
        """Memory as peers reach it: mapping << 48 | offset, 0 if they cannot."""
        if not start:
            return 0
        found = self.symmetric.lookup(start, nbytes)
        if found is None:
            return (
                self.auto_register.mapped_address(start, nbytes)
                if registered and self.auto_register is not None
                else 0
            )
        return found[0] << OFFSET_BITS | found[1]

    def open_auto_register(self) -> AutoRegister:
        """Open automatic registration, by which peers map repeated tensors; collective."""
        self.auto_register = AutoRegister(self.fabric, self.device.ordinal, self.mappings)
        return self.auto_register

    def _launchable(self, calls: Sequence[CudaCall]) -> Launching:
        """The launch of one rank, or of all that share the device."""
        ready = calls[0]
        choice, where = ready.choice, f"{ready.call.collective} on rank {self.rank}"
        local = tuple(each.at for each in calls)
        header = Header(
            ready.timeout,
            ready.signature,
            choice.total,
            choice.reads_hellos,
            choice.grid.replicas,
        )
        if choice.engine == "copy":
            load = partial(self.kernels.function, timeout=ready.timeout, where=where)
            return copy_launch(
                choice, ready.call, header, self.workspace, local, load, self.streams
            )

        progress = self.workspace.progress

        def made(body: Body, function: int) -> Launchable:  # without self, which keeps it
            parameter = pack(body, header, progress, local)
            places, grid = places_of(body, local), choice.grid
            return Launchable(function, grid.blocks, len(local), grid.threads, parameter, places)

        body = body_of(choice, ready.call, self.workspace, local)
        return self.kernels.launch(body, made, ready.timeout, where, ready.signature_text)

    def run(
        self,
        prepared: CudaCall | LaunchRequest,
        stream: int | None = None,
        addresses: Given | None = None,
    ) -> None:
        """Enqueue the whole call of this rank, on the arrays at these addresses."""
        if isinstance(prepared, LaunchRequest):
            self.run(prepared.prepared, prepared.stream, prepared.addresses)
            self.stream_order.release(prepared)
            return
        ready, stream = prepared, stream or 0
        if addresses is None:
            addresses = ready.addresses
        launchable = ready.launchable
        if launchable is None:
            self.await_launch(self.submit(LaunchRequest(ready, stream, addresses=addresses)))
            return
        if self.report.host[0]:
            self.async_errors.check()
        if not self.stream_order.is_on(stream):
            self.stream_order.switch_to(stream)
        self._publish(ready)
        if self.stream_order.marking:
            self.stream_order.unmark()
        if self._device() == self.device.ordinal and getattr(self._threads, "bound", False):
            launchable.launch(stream, addresses)
        else:
            with on(self.device.ordinal):
                launchable.launch(stream, addresses)
            self._threads.bound = True
        # Read after the launch: another thread may have begun to mark ends meanwhile, ahead of it.
        if self.stream_order.marking:
            self.stream_order.mark(stream)
        self.async_errors.last = ready
        self.fabric.entered += 1

    def task(self, calls: Sequence[LaunchRequest]) -> Task:
        """Several calls of this rank, in turns with those of other ranks in a group."""
        for prepared in calls:
            launchable = prepared.prepared.launchable
            if isinstance(launchable, CopyLaunch):
                self.async_errors.check()
                self.stream_order.switch_to(prepared.stream)
                self._publish(prepared.prepared)
                for part in launchable.parts(prepared.stream):
                    with on(self.device.ordinal):
                        part()
                    yield Pause(lambda: True)  # a turn for the other devices of this thread
                self.async_errors.last = prepared.prepared
                self.fabric.entered += 1
                self.stream_order.release(prepared)
                continue
            if launchable is not None:
                self.run(prepared)
                continue
            pending = self.submit(prepared)
            while not pending.launched.is_set():
                yield Pause(pending.launched.is_set)
            self.done(pending)
            self.stream_order.release(prepared)

    def _publish(self, ready: CudaCall) -> None:
        """Publish the signature text of this call again if later calls have overwritten it."""
        if self._records[ready.slot] != ready.number:
            self.shared_state.record(ready.number, ready.call.tagged(ready.signature_text))

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
        ready, timeout = pending.request.prepared, pending.request.timeout
        self.fabric.wait(
            pending.launched.is_set,
            deadline=self.fabric.deadline(timeout),
            describe=lambda: self.late(ready, timeout),
            peers=lambda: self.absent(ready),
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
            while len(self._merged) >= 64:
                self._merged.pop(next(iter(self._merged)))
            found = self._merged[key] = (calls, self._launchable(calls))
        given = (call.addresses or call.prepared.addresses for call in submitted)
        with on(self.device.ordinal):
            found[1].launch(stream, tuple(itertools.chain.from_iterable(given)))

    # -- errors --------------------------------------------------------------------------------

    def failure(self) -> Error | None:
        """The error that a kernel of this rank has reported, or None."""
        return self.async_errors.failure()

    def compare(self, active: CudaCall) -> None:
        """Does nothing: kernels compare the hellos."""

    def compare_last(self) -> None:
        """Raise a reported error, or a mismatch that no kernel has compared."""
        self.async_errors.compare_last()

    def late(self, active: CudaCall, timeout: float) -> str:
        """The message of a deadline before the launch: ranks of the same device made no call."""
        return (
            f"{active.call.collective} on rank {self.rank}: waited {timeout:g} s for the other "
            f"ranks of {self.device}, with which it shares a launch; "
            f"{active.call.tagged(active.signature_text)}"
        )

    def absent(self, active: CudaCall) -> list[int]:
        """The ranks without which a call cannot be launched."""
        return [rank for rank in self.shared_launch.ranks if rank != self.rank]

    def record(self, stream: int) -> ReusedEvent:
        """An event at the present end of a stream."""
        return self._events.record(stream)

    def watch(self) -> Error | None:
        """Let kernels know which ranks have left; an error that is known by now."""
        self.async_errors.watch_departures(self.stream_order.ended)
        error = self.async_errors.control_mismatch(self.running) if self.in_order else None
        return error or self.failure()

    def give_up(self, error: BaseException | None = None) -> None:
        """Abort the kernels of this rank and, by an error of the cause, the launches it shares."""
        if self.report.nbytes and self.report.host:
            struct.pack_into("<I", self.report.host, ABORT, 1)
        known = next((kind for kind in (MismatchError, RankLostError) if type(error) is kind), None)
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

    def close(self) -> None:
        """Free the memory once the kernels have ended; not collective."""
        self.synchronize()
        self.kernels.close()
        self._merged.clear()
        self._events.close()
        self.streams.close()
        self.running = None
        self.async_errors.close()
        self.stream_order.forget()
        if self.auto_register is not None:
            self.auto_register.close()
        self.mappings.close()
        self.memory.close()
        self.report.free()
        self.shared_state.close()


def mapped_buffers(call: Call, hello: tuple[int, int]) -> frozenset[Buffer]:
    """The buffers in symmetric memory; ranks whose sets differ make different calls: an error.

    Not among them: a buffer that not all ranks have, since kernels read the root's hello and no
    built-in prefix writes OUTPUT of another rank; and the smaller buffer of a call with a count
    for each rank, which may be 0.
    """
    kind = COLLECTIVES[call.collective]
    if call.counts and not call.nbytes:
        return frozenset()
    sides = (Buffer.INPUT, hello[0], kind.input), (Buffer.OUTPUT, hello[1], kind.output)
    return frozenset(
        buffer
        for buffer, word, segments in sides
        if word and kind.uneven != buffer.name.lower() and not (call.counts and segments != "all")
    )


def _given(addresses: tuple[int, int], first: int) -> tuple[int, int]:
    """Two addresses that every launch is given anew, but for buffers that the rank lacks."""
    return given_address(addresses[0], first), given_address(addresses[1], first + 1)
