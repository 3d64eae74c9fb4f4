"""The CUDA executor: one rank's calls as kernels on a stream of its GPU.

A call is enqueued and never waited for. Its epoch is counted in device memory, so that a captured
call can be replayed among eager ones. What a kernel finds wrong it leaves in host memory, where the
next call reads it without asking the device.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy.typing as npt

from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.cuda.device import Device, joined_by_nvlink, on, runtime
from ringcoll.cuda.memory import host_mapped
from ringcoll.cuda.streams import Event
from ringcoll.errors import AbortedError, Error, MismatchError
from ringcoll.executors.board import RECORDS, Board
from ringcoll.executors.cuda.arena import MOST_BLOCKS, REPORT_BYTES, Arena
from ringcoll.executors.cuda.async_errors import Verdicts
from ringcoll.executors.cuda.auto_register import Posts
from ringcoll.executors.cuda.body import body_of
from ringcoll.executors.cuda.choose import choose
from ringcoll.executors.cuda.hellos import Hellos
from ringcoll.executors.cuda.lanes import CopyLaunch, Streams, copy_launch
from ringcoll.executors.cuda.limits import Resources, Wishes
from ringcoll.executors.cuda.loader import Launchable, Loader
from ringcoll.executors.cuda.mappings import Mappings
from ringcoll.executors.cuda.params import Addresses, Header, factor_bytes, pack, start_of
from ringcoll.executors.cuda.ready import Enqueued, Ready
from ringcoll.executors.cuda.recorder import Recorder
from ringcoll.executors.cuda.reports import (
    ABORT,
)
from ringcoll.executors.cuda.shared_launch import Gate, Offer
from ringcoll.executors.cuda.signature import OFFSET_BITS, places, terms_of, touched
from ringcoll.executors.cuda.stream_order import Followed
from ringcoll.executors.drive import Pause, Task
from ringcoll.fabric import Fabric
from ringcoll.plan import Buffer
from ringcoll.symmetric.device import CudaSymmetricMemory
from ringcoll.transports.peers import PeerMemory
from ringcoll.transports.scratch import Transport

__all__ = ["CudaExecutor"]

_SEAT = struct.Struct("<QQiiii16s")
"""Process, number of its gate, device, multiprocessors, capability, bus address."""

_gates: dict[int, Gate[Ready]] = {}
_numbers = itertools.count(1)


class CudaExecutor:
    """One rank's side of the collectives of one communicator on GPUs.

    Making one is collective.

    Args:
        fabric: the ranks on this host.
        device: this rank's.
        symmetric: the memory that peers can reach.
        loader: of kernels.
        memory: of an :class:`Arena` on every rank; closed with the executor.
        transport: where that memory is.

    """

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
        self.arena = Arena(self.nranks)
        self.recorder: Recorder | None = None
        self.posts: Posts | None = None
        self.running: Ready | None = None
        self.followed = Followed(device.ordinal, f"rank {fabric.rank}: {device}")
        self._device: Callable[[], int] = runtime().getDevice
        self._threads = threading.local()  # whether a thread has been bound to a context
        self._merged: dict[tuple[int, ...], tuple[Sequence[Ready], Launchable | CopyLaunch]] = {}
        ordinal, pointers = device.ordinal, memory.pointers
        with ExitStack() as made:  # but the memory, which is its maker's until this is whole
            self.board = made.enter_context(closing(Board(fabric, 0)))
            self._records = self.board.kept
            self.report = host_mapped(REPORT_BYTES, ordinal=ordinal)
            made.callback(self.report.free)
            hellos = Hellos(self.arena, self.rank, ordinal, pointers[self.rank])
            made.enter_context(closing(hellos))
            self.verdicts = Verdicts(fabric, self.report, hellos, self.board)
            self.mappings = made.enter_context(closing(Mappings(self.nranks, ordinal, symmetric)))
            self.streams = made.enter_context(closing(Streams(ordinal)))
            copies = [pointer + self.arena.copies for pointer in pointers]
            self.streams.warm(copies[self.rank], [pointer + 256 for pointer in copies])
            self.gate, self.resources = self._seated()
            made.pop_all()

    def _seated(self) -> tuple[Gate[Ready], Resources]:
        """The gate of the ranks that share this rank's device, and what a rank has for a call."""
        device, mine = self.device, next(_numbers)
        capability = device.major, device.minor
        pci = device.pci.encode()
        sent = _SEAT.pack(os.getpid(), mine, device.ordinal, device.sms, *capability, pci)
        said = [_SEAT.unpack(part) for part in self.fabric.allgather(sent, what="seats")]
        ranks = [
            rank
            for rank, (pid, _, ordinal, *_) in enumerate(said)
            if (pid, ordinal) == (os.getpid(), device.ordinal)
        ]
        addresses = [seat[6] for seat in said]
        crowd = max(map(addresses.count, addresses))
        most = min(int(seat[3]) for seat in said) // crowd
        drivers = {(pid, ordinal) for pid, _, ordinal, *_ in said}
        self.alone = len(drivers) == len({pid for pid, _ in drivers})
        first = int(said[ranks[0]][1])
        if self.rank == ranks[0]:
            _gates[first] = Gate(ranks, device.ordinal, self._launch_all, self.fabric.notify)
        # Lines of 128 bytes stay whole between GPUs of one kind, or of those from Hopper on.
        kinds = {(int(seat[4]), int(seat[5])) for seat in said}
        alike = len(kinds) == 1 or min(kinds) >= (9, 0)
        peers = [bytes(address).rstrip(b"\0").decode() for address in addresses]
        nvlink = alike and self.transport == "p2p" and joined_by_nvlink(device.pci, peers)
        agreed = self.fabric.allgather(bytes([nvlink]), what="seats")
        gate = _gates[first]
        self.fabric.allgather(b"", what="seats")
        _gates.pop(first, None)
        blocks = max(1, min(most, MOST_BLOCKS))
        return gate, Resources(self.arena, blocks, all(map(any, agreed)), crowd)

    # -- a call --------------------------------------------------------------------------------

    def prepare(self, call: Call, wishes: Wishes, timeout: float) -> Ready:
        """Choose, compile and load; nothing of it is left for the launch.

        Args:
            call: checked; its arrays are views of device memory that nobody reads here.
            wishes: the options of the call.
            timeout: seconds that a wait of its kernels may take.

        """
        hello = self._reach(call.send, wishes.asked), self._reach(call.recv, wishes.asked)
        mapped = frozenset[Buffer]() if wishes.asked else self._mapped(call, hello)
        chosen = choose(call, self.resources, mapped=mapped, wishes=wishes)
        known = touched(chosen, hello)
        terms = terms_of(chosen, call, known)
        digest = hashlib.blake2b(terms.encode(), digest_size=4).digest()
        number = next(self.board.numbers)
        self.board.record(number, terms)
        if chosen.meets:
            self.mappings.update()
        at = Addresses(
            self.rank,
            self.memory.pointers,
            self.report.device,
            self.mappings.pointer,
            hello if chosen.meets else (0, 0),
            (start_of(call.send), start_of(call.recv)),
            factor_bytes(call.op, call.dtype),
            places(known, self.symmetric, self.nranks),
            trace=0 if self.recorder is None else self.recorder.address,
            launch=number,
        )
        signature = int.from_bytes(digest, "little")
        ready = Ready(
            call,
            chosen,
            terms,
            signature,
            number,
            number % RECORDS,
            timeout,
            at,
            self.symmetric.changes,
            None,
        )
        self.verdicts.prepared(ready)
        if len(self.gate.ranks) == 1:
            ready.launchable = self._launchable([ready])
        return ready

    def _reach(self, array: npt.NDArray[Any] | None, asked: bool) -> int:
        """An array as peers reach it: mapping << 48 | offset, 0 if they cannot."""
        if array is None or not array.size:
            return 0
        start, nbytes = start_of(array), array.nbytes
        found = self.symmetric.lookup(start, nbytes)
        if found is None:
            return self.posts.word(start, nbytes) if asked and self.posts is not None else 0
        return found[0] << OFFSET_BITS | found[1]

    def open_posts(self) -> Posts:
        """Let ranks post memory for calls that ask hellos; collective."""
        self.posts = Posts(self.fabric, self.device.ordinal, self.mappings)
        return self.posts

    def _mapped(self, call: Call, hello: tuple[int, int]) -> frozenset[Buffer]:
        """The buffers that peers may reach: this rank's stand for all, or the call fails.

        A buffer that only the root has is not among them: kernels choose by its hello. Nor is
        the smaller buffer where each rank has a count of its own, which may be 0.
        """
        kind = COLLECTIVES[call.collective]
        if call.counts and not call.nbytes:
            return frozenset()
        sides = (
            (Buffer.INPUT, call.send, hello[0], kind.input),
            (Buffer.OUTPUT, call.recv, hello[1], kind.output),
        )
        return frozenset(
            buffer
            for buffer, array, word, segments in sides
            if array is not None
            and word
            and kind.rooted != buffer.name.lower()
            and not (call.counts and segments != "all")
        )

    def _launchable(self, calls: Sequence[Ready]) -> Launchable | CopyLaunch:
        """The launch of one rank, or of all that share the device."""
        ready = calls[0]
        chosen = ready.chosen
        local = tuple(each.at for each in calls)
        header = Header(
            ready.timeout,
            ready.signature,
            chosen.total,
            chosen.meets,
            chosen.replicas,
        )
        if chosen.engine == "copy":
            return copy_launch(
                chosen, ready.call, header, self.arena, local, self._load, self.streams
            )
        body = body_of(chosen, ready.call, self.arena, local)
        parameter = pack(body, header, self.arena.progress, local)
        function = self._load(body.text)
        return Launchable(function, chosen.blocks, len(local), chosen.threads, parameter)

    def _load(self, text: str) -> int:
        """The function of a source text on this rank's device."""
        device = self.device
        return self.loader.function(text, device.ordinal, (device.major, device.minor))

    def run(self, prepared: Ready | Enqueued, stream: int | None = None) -> None:
        """Enqueue the whole call of this rank.

        Args:
            prepared: the call, or the call with its stream.
            stream: of a call without.

        """
        if isinstance(prepared, Enqueued):
            self.run(prepared.ready, prepared.stream)
            self.followed.leave(prepared)
            return
        ready, stream = prepared, stream or 0
        launchable = ready.launchable
        if launchable is None:
            self.meet(self.offer(ready, stream))
            return
        if self.report.host[0]:
            self.verdicts.check()
        if not self.followed.is_by(stream):
            self.followed.by(stream)
        self._tell(ready)
        marking = self.followed.marking
        if marking:
            self.followed.unmark()
        if self._device() == self.device.ordinal and getattr(self._threads, "bound", False):
            launchable.launch(stream)
        else:
            with on(self.device.ordinal):
                launchable.launch(stream)
            self._threads.bound = True
        if marking:
            self.followed.mark(stream)
        self.verdicts.last = ready

    def task(self, calls: Sequence[Enqueued]) -> Task:
        """Several calls of this rank, beside those of others in a group."""
        for prepared in calls:
            launchable = prepared.ready.launchable
            if isinstance(launchable, CopyLaunch):
                self.verdicts.check()
                self.followed.by(prepared.stream)
                self._tell(prepared.ready)
                for part in launchable.parts(prepared.stream):
                    with on(self.device.ordinal):
                        part()
                    yield Pause(lambda: True)  # now the other devices of this thread
                self.verdicts.last = prepared.ready
                self.followed.leave(prepared)
                continue
            if launchable is not None:
                self.run(prepared)
                continue
            offer = self.offer(prepared.ready, prepared.stream)
            while not offer.launched.is_set():
                yield Pause(offer.launched.is_set)
            self.done(offer)
            self.followed.leave(prepared)

    def _tell(self, ready: Ready) -> None:
        """Let peers read what this call is, if later ones have overwritten it."""
        if self._records[ready.slot] != ready.number:
            self.board.record(ready.number, ready.call.tagged(ready.terms))

    def offer(self, ready: Ready, stream: int) -> Offer[Ready]:
        """Bring a call to the gate; the last rank of the device launches for all."""
        self.verdicts.check()
        self.followed.by(stream)  # first: where it refuses the stream, nothing has happened
        self._tell(ready)
        self.running = self.verdicts.last = ready
        return self.gate.offer(self.rank, ready, stream)

    def meet(self, offer: Offer[Ready]) -> None:
        """Wait until an offered call is launched."""
        timeout = offer.ready.timeout
        self.fabric.wait(
            offer.launched.is_set,
            deadline=self.fabric.deadline(timeout),
            describe=lambda: self.late(offer.ready, timeout),
            peers=lambda: self.absent(offer.ready),
        )
        self.done(offer)

    def done(self, offer: Offer[Ready]) -> None:
        """What an offered call does last."""
        self.running = None
        if offer.error is not None:
            raise offer.error

    def _launch_all(self, calls: Sequence[Ready], stream: int) -> None:
        """Launch for all ranks of the device."""
        for other in calls[1:]:
            if other.signature != calls[0].signature:
                raise MismatchError(
                    f"the ranks made different calls\n  rank {calls[0].at.rank}: "
                    f"{calls[0].terms}\n  rank {other.at.rank}: {other.terms}\n  make the same "
                    f"call with the same count, dtype, op, root and options on every rank"
                )
        key = tuple(map(id, calls))
        found = self._merged.get(key)
        if found is None:
            while len(self._merged) >= 64:
                self._merged.pop(next(iter(self._merged)))
            found = self._merged[key] = (calls, self._launchable(calls))
        with on(self.device.ordinal):
            found[1].launch(stream)

    # -- what has gone wrong -------------------------------------------------------------------

    def failure(self) -> Error | None:
        """What a kernel of this rank has found wrong; None if nothing."""
        return self.verdicts.failure()

    def compare(self, ticket: Ready) -> None:
        """Nothing: kernels compare the hellos."""

    def compare_last(self) -> None:
        """Raise what a kernel has found wrong, or what none has compared."""
        self.verdicts.compare_last()

    def late(self, ticket: Ready, timeout: float) -> str:
        """A call that was never launched, because ranks of the same device made none."""
        return (
            f"{ticket.call.collective} on rank {self.rank}: waited {timeout:g} s for the other "
            f"ranks of {self.device}, with which it shares a launch; "
            f"{ticket.call.tagged(ticket.terms)}"
        )

    def absent(self, ticket: Ready) -> list[int]:
        """The ranks whose going would leave a call unlaunched."""
        return [rank for rank in self.gate.ranks if rank != self.rank]

    def record(self, stream: int) -> Event:
        """The end of a stream as it is now."""
        return Event(self.device.ordinal, stream)

    def give_up(self) -> None:
        """Ask the kernels of this rank to stop waiting."""
        if self.report.nbytes and self.report.host:
            struct.pack_into("<I", self.report.host, ABORT, 1)
        self.gate.withdraw(
            AbortedError(
                f"rank {self.rank} gave up, and with it the launch that the ranks of {self.device} "
                f"share; look at that rank"
            )
        )

    def synchronize(self) -> None:
        """Wait for the last call; its kernels end by their own deadline.

        Raises:
            MachineError: the device has failed.

        """
        self.followed.synchronize()

    def close(self) -> None:
        """Let go of memory once the kernels have ended; not collective."""
        self.synchronize()
        self._merged.clear()
        self.streams.close()
        self.running = None
        self.verdicts.close()
        self.followed.forget()
        if self.posts is not None:
            self.posts.close()
        self.mappings.close()
        self.memory.close()
        self.report.free()
        self.board.close()
