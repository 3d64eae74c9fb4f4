"""Prepare the calls of a GPU rank: choose, compile and load, all but the launch."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import cache, partial
from typing import cast

from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.cuda.device import Device
from ringcoll.cuda.memory import host_mapped
from ringcoll.errors import Error
from ringcoll.executors.contract import LaunchRequest
from ringcoll.executors.cuda.async_errors import AsyncErrors
from ringcoll.executors.cuda.auto_register import AutoRegister, SteadyMemory
from ringcoll.executors.cuda.copy_launch import StreamPool, copy_launch
from ringcoll.executors.cuda.cuda_call import AnyCudaCall, CudaCall
from ringcoll.executors.cuda.device_group import group_by_device
from ringcoll.executors.cuda.hellos import Hellos
from ringcoll.executors.cuda.kernel_body import KernelFits, body_of
from ringcoll.executors.cuda.large_scratch import LargeScratch
from ringcoll.executors.cuda.loader import Launchable, Loader
from ringcoll.executors.cuda.loading import GenericLaunch, KernelLoading, Launching
from ringcoll.executors.cuda.mappings import Mappings
from ringcoll.executors.cuda.params import (
    Addresses,
    Body,
    Header,
    address_words,
    factor_bytes,
    given_address,
    number_word,
    pack,
)
from ringcoll.executors.cuda.recounted import RecountedCall, Recounter, parameter_like, sign
from ringcoll.executors.cuda.recounts import recounts_of
from ringcoll.executors.cuda.signature import (
    OFFSET_BITS,
    CountedText,
    copied_buffers,
    peer_addresses,
    signature_text,
)
from ringcoll.executors.cuda.stream_order import StreamOrder
from ringcoll.executors.cuda.timed import keep_timed, with_timeout
from ringcoll.executors.cuda.trace import Recorder
from ringcoll.executors.cuda.workspace import LARGE_SCRATCH_BYTES, Workspace
from ringcoll.executors.shared_state import RECORDS, SharedState
from ringcoll.fabric import Fabric
from ringcoll.plan import Buffer
from ringcoll.symmetric.device import CudaSymmetricMemory
from ringcoll.transports.peers import PeerMemory
from ringcoll.transports.scratch import Transport
from ringcoll.tuner import Choice, Limits, choose
from ringcoll.tuner.choice import Grid
from ringcoll.tuner.kept_gpu import Alike, calls_alike, laid_out, layout_for
from ringcoll.tuner.simple import large_engine, sizes_like
from ringcoll.views import Extent, extent_of

LACKING = 1
"""In place of the address of a buffer that a rank lacks: it is reached, and nobody looks there."""

Others = Callable[[frozenset[Buffer]], Iterable[tuple[Call, Limits]]]
"""Calls of other sizes than one whose buffers in the set are mapped, and their options."""


class CudaPreparer:
    """What calls of one GPU rank are prepared and launched with; the executor closes it all.

    ``launch`` launches a call for all ranks of the device. Constructing it is collective.
    """

    def __init__(
        self,
        fabric: Fabric,
        device: Device,
        symmetric: CudaSymmetricMemory,
        loader: Loader,
        memory: PeerMemory,
        transport: Transport,
        launch: Callable[[Sequence[LaunchRequest], int], None],
    ) -> None:
        self.fabric, self.device, self.symmetric, self.loader = fabric, device, symmetric, loader
        self.memory, self.transport = memory, transport
        self.rank, self.nranks = fabric.rank, fabric.nranks
        self.workspace = Workspace(self.nranks)
        self.fits = KernelFits(self.workspace)
        self.large_fits = KernelFits(self.workspace, LARGE_SCRATCH_BYTES)
        self.large_scratch: LargeScratch | None = None
        self.recorder: Recorder | None = None
        self.auto_register: AutoRegister | None = None
        self.stream_order = StreamOrder(device.ordinal, f"rank {fabric.rank}: {device}")
        ordinal, pointers = device.ordinal, memory.pointers
        with ExitStack() as made:  # after an error here the caller still owns ``memory``
            self.shared_state = made.enter_context(closing(SharedState(fabric, 0)))
            self.report = host_mapped(self.workspace.report_bytes, ordinal=ordinal)
            made.callback(self.report.free)
            hellos = Hellos(self.workspace, self.rank, ordinal, pointers[self.rank])
            made.enter_context(closing(hellos))
            self.async_errors = AsyncErrors(fabric, self.report, hellos, self.shared_state)
            self.mappings = made.enter_context(closing(Mappings(self.nranks, ordinal, symmetric)))
            symmetric.read_by(self.mappings)
            self.streams = made.enter_context(closing(StreamPool(ordinal)))
            copies = [pointer + self.workspace.copies for pointer in pointers]
            self.streams.warm(copies[self.rank], [pointer + 256 for pointer in copies])
            group = group_by_device(fabric, device, transport, self.workspace, launch)
            self.shared_launch, self.machine = group.shared_launch, group.machine
            self.alone = group.alone
            # It needs a process for each GPU.
            if group.alone and group.machine.nvlink:
                self.large_scratch = made.enter_context(closing(LargeScratch(fabric, ordinal)))
                self.machine = replace(self.machine, large_scratch=True)
            self.stream_order.communicator = self.shared_launch
            alone = len(self.shared_launch.ranks) == 1
            self.kernels = KernelLoading(loader, device, fabric, self.stream_order, alone=alone)
            made.pop_all()

    def prepare(
        self,
        call: Call,
        limits: Limits,
        timeout: float,
        others: Others | None = None,
        patience: float | None = None,
    ) -> CudaCall:
        """Choose, compile and load: all work of a call but its launch. No array is read.

        ``others``: calls of other sizes whose kernels are compiled in the background if that of
        this one must be compiled. ``patience``: seconds to wait before a kernel is loaded, by
        default the timeout.
        """
        input_, output = extent_of(call.send), extent_of(call.recv)
        hello = self.hello(input_, output, registered=limits.hellos_decide)
        mapped = frozenset[Buffer]() if limits.hellos_decide else mapped_buffers(call, hello)
        limits = replace(limits, mapped=mapped)
        choice = choose(call, self.machine, limits, self.fits_of(limits))
        known = copied_buffers(choice, hello)
        scratch = self._scratch(limits)
        text = signature_text(choice, call, known, large_scratch=bool(scratch))
        signature, number = self._record(text, call, choice)
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
            scratch=scratch,
        )
        prepared = CudaCall(
            call.on(None, None),
            choice,
            text,
            signature,
            number,
            number % RECORDS,
            timeout,
            at,
            (input_[0], output[0], *hello),
            limits,
        )
        self.async_errors.prepared(prepared)
        if len(self.shared_launch.ranks) == 1:
            texts = None if others is None else partial(self._texts, others, prepared)
            prepared.launchable = self.launchable_of([prepared], texts, patience)
        return prepared

    def _texts(self, others: Others, like: CudaCall) -> Iterator[str]:
        """The kernels' texts of other calls, where they can be told before the call."""
        for call, limits in others(like.limits.mapped):
            with suppress(Error):
                choice = choose(call, self.machine, limits, self.fits)
                yield body_of(choice, call, self.workspace, (like.at,)).text

    def prepare_like(self, before: CudaCall, call: Call) -> CudaCall | None:
        """Prepare a call that differs from a prepared one in its counts and buffers alone.

        Only the words of the parameter that depend on them are made anew. None where another
        kernel, or no single one, runs the call.
        """
        # What runs a large call depends on how many were made before.
        how = self.machine, before.limits
        if large_engine(call, *how) != large_engine(before.call, *how):
            return None
        if before.body is None or self.recorder is not None:
            return None
        if not self._alike(before).holds(call):
            return None
        call = before.call.with_counts(call)
        recounts = recounts_of(before, self.workspace, self.machine)
        placed = recounts.placed(call.count, call if call.counts else None)
        if placed is None:
            return None
        grid = placed.grid
        prepared = self._like(before, call, self._choice_like(before, call, grid))
        prepared.large = before.large
        packed, words = parameter_like(recounts, placed)
        sign(packed, number_word(before.at), prepared.signature, prepared.number)
        prepared.launchable = Launchable(
            before.function, grid.blocks, 1, grid.threads, packed, words
        )
        return prepared

    def recount(
        self, before: CudaCall, count: int, counted: Call | None = None
    ) -> RecountedCall | None:
        """A call that differs from a prepared one in its count alone, which has not come often.

        It has no launch of its own: see :mod:`.recounted`. None where it is to be prepared.
        ``counted``: the call, if it has a count for each rank.
        """
        recounter = before.recounter
        if recounter is None:
            if before.body is None or not self._alike(before).longest:
                return None
            recounter = before.recounter = self._recounter(before)
        if self.recorder is not None or not recounter.holds(count, counted):
            return None
        placed = recounter.recounts.placed(count, counted)
        if placed is None:
            return None
        return recounter.begin(count, placed, placed.grid, counted)

    def timed(self, before: AnyCudaCall, seconds: float) -> AnyCudaCall:
        """A prepared call with another timeout; it is kept where that comes again."""
        if isinstance(before, RecountedCall):  # made for one launch
            before.timeout = seconds
            return before
        _, number = self._record(before.signature_text, before.call, before.choice)
        made = with_timeout(before, seconds, number)
        self.async_errors.prepared(made)
        if made.launchable is None and before.launchable is not None:
            made.launchable = self.launchable_of([made])
        keep_timed(before, made)
        return made

    def _recounter(self, before: CudaCall) -> Recounter:
        """What launches calls like one of counts that come once."""
        alike, grid = self._alike(before), before.choice.grid
        recounts = recounts_of(before, self.workspace, self.machine)
        launchable = Launchable(
            before.function, grid.blocks, 1, grid.threads, recounts.words[:], ()
        )
        choice_of = partial(self._choice_like, before)
        # What runs a large call depends on how many were made before.
        how = before.call, self.machine, before.limits.engine
        sizes = sizes_like(*how, large=before.large)
        noting = self._record, self.async_errors.prepared
        return Recounter(before, alike, recounts, launchable, choice_of, sizes, *noting)

    def _choice_like(self, before: CudaCall, call: Call, grid: Grid) -> Choice:
        """The choice of a call that differs in its counts alone."""
        choice = before.choice
        if choice.launch.in_band:
            return choice.on(grid, layout_for(choice.layout, call))
        return laid_out(choice, call, self.machine, before.limits)

    def _alike(self, before: CudaCall) -> Alike:
        """The calls for which the choice of a prepared call holds."""
        if before.alike is None:
            fits = self.fits_of(before.limits)
            how = before.call, self.machine, before.limits, fits
            before.alike = calls_alike(before.choice, *how)
        return before.alike

    def fits_of(self, limits: Limits) -> KernelFits:
        """What memory and launches hold of a call with these options."""
        return self.large_fits if limits.large_scratch else self.fits

    def _like(self, before: CudaCall, call: Call, choice: Choice) -> CudaCall:
        """A call of another count than a prepared one, without its launch."""
        counted = CountedText(before.signature_text, before.call, before.choice.grid.blocks)
        text = counted.of_call(call, choice.grid.blocks)
        signature, number = self._record(text, call, choice)
        prepared = CudaCall(
            call,
            choice,
            text,
            signature,
            number,
            number % RECORDS,
            before.timeout,
            before.at,
            (0, 0, 0, 0),
            before.limits,
        )
        self.async_errors.prepared(prepared)
        return prepared

    def _record(self, text: str, call: Call, choice: Choice) -> tuple[int, int]:
        """Keep the text on which ranks must agree; its digest, and the number of its record.

        Before a launch that reads it, the table of symmetric memory is brought up to date.
        """
        number = next(self.shared_state.numbers)
        self.shared_state.record(number, call.tagged(text))
        if choice.reads_hellos:
            self.mappings.update()
        return zlib.crc32(text.encode()), number

    def _scratch(self, limits: Limits) -> tuple[int, ...]:
        """The SCRATCH of large calls of each rank; () where a call's is in the workspaces."""
        if not limits.large_scratch or self.large_scratch is None:
            return ()
        return self.large_scratch.addresses

    def hello(self, input_: Extent, output: Extent, *, registered: bool) -> tuple[int, int]:
        """Both buffers as peers reach them; ``registered``: also those registered automatically."""
        first = self._mapped_address(input_, registered)
        return first, first if output == input_ else self._mapped_address(output, registered)

    def _mapped_address(self, memory: Extent, registered: bool) -> int:
        """Memory as peers reach it: mapping << 48 | offset, 0 if they cannot."""
        start, nbytes = memory
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
        """Open automatic registration, by which peers map repeated buffers; collective."""
        self.auto_register = AutoRegister(
            self.fabric, self.device.ordinal, self.mappings, self.stream_order.capturing
        )
        return self.auto_register

    def counted_hello(
        self, input_: Extent, output: Extent, symmetric: tuple[int, int], *, rooted: bool = False
    ) -> tuple[int, int]:
        """Both buffers of a large call as peers reach them; others are counted, and registered.

        ``symmetric`` are both in symmetric memory. ``rooted``: one may be the root's alone, which
        is mapped already on the ranks that lack it.
        """
        self.mappings.update()
        registry, (first, second) = self.auto_register, symmetric
        if registry is None:
            return symmetric
        if rooted:
            first, second = first or LACKING * (not input_[0]), second or LACKING * (not output[0])
        registry.poll()
        if input_[0] and not first:
            first = registry.mapped_address(*input_)
        if output == input_:
            second = first
        elif output[0] and not second:
            second = registry.mapped_address(*output)
        if not (first and second):
            registry.count_use(0 if first else input_[0], 0 if second else output[0])
        return first, second

    def changes(self) -> tuple[int, int]:
        """How often registrations and symmetric memory have changed."""
        registry = self.auto_register
        return 0 if registry is None else registry.changes, self.symmetric.changes

    def unchanged(self, memory: SteadyMemory) -> bool:
        """Whether mapped memory is still the same, and what peers map of it."""
        registry = self.auto_register
        return registry is not None and memory.changes == self.changes() and registry.steady(memory)

    def launchable_of(
        self,
        calls: Sequence[CudaCall],
        texts: Callable[[], Iterable[str]] | None = None,
        patience: float | None = None,
    ) -> Launching:
        """The launch of one rank, or of all that share the device; see :meth:`prepare`."""
        prepared = calls[0]
        timeout = prepared.timeout if patience is None else patience
        choice, where = prepared.choice, f"{prepared.call.collective} on rank {self.rank}"
        local = tuple(each.at for each in calls)
        header = _header(prepared)
        if choice.engine == "copy":
            load = partial(self.kernels.function, timeout=timeout, where=where)
            waits = timeout, where, prepared.signature_text

            def launching(body: Body, made: Callable[[Body, int], Launchable]) -> Launching:
                return self.kernels.launch(body, made, *waits)

            return copy_launch(
                choice, prepared.call, header, self.workspace, local, load, launching, self.streams
            )

        body = body_of(choice, prepared.call, self.workspace, local)
        made = partial(_launchable, header, choice, self.workspace.progress, local)
        found = self.kernels.launch(body, made, timeout, where, prepared.signature_text, texts)
        if len(calls) == 1 and not isinstance(found, GenericLaunch):
            launched = cast("Launchable", found)
            prepared.body, prepared.function = body, launched.function
            prepared.address_words = launched.parameter.address_words
        return found


def _header(prepared: CudaCall) -> Header:
    """The parameters of a call that do not depend on its program's words."""
    choice = prepared.choice
    return Header(
        prepared.timeout,
        prepared.signature,
        choice.total,
        choice.reads_hellos,
        choice.grid.replicas,
    )


def _launchable(
    header: Header,
    choice: Choice,
    progress: int,
    local: Sequence[Addresses],
    body: Body,
    function: int,
) -> Launchable:
    """The launch of a loaded kernel, packed."""
    parameter, words = pack(body, header, progress, local), address_words(body, local)
    grid = choice.grid
    return Launchable(function, grid.blocks, len(local), grid.threads, parameter, words)


def mapped_buffers(call: Call, hello: tuple[int, int]) -> frozenset[Buffer]:
    """The buffers in symmetric memory; ranks whose sets differ make different calls: an error.

    Not among them: a buffer that not all ranks have, since kernels read the root's hello and no
    built-in prefix writes OUTPUT of another rank; and the smaller buffer of a call with a count
    for each rank, which may be 0.
    """
    counted, (input_, output) = bool(call.counts), hello
    if counted and not call.nbytes:
        return frozenset()
    return _mapped(call.collective, counted, bool(input_), bool(output))


@cache
def _mapped(collective: str, counted: bool, input_: bool, output: bool) -> frozenset[Buffer]:
    """The same of what the answer depends on; kept, since every call by Simple asks."""
    kind = COLLECTIVES[collective]
    sides = (Buffer.INPUT, input_, kind.input), (Buffer.OUTPUT, output, kind.output)
    return frozenset(
        buffer
        for buffer, reached, segments in sides
        if reached and kind.uneven != buffer.name.lower() and not (counted and segments != "all")
    )


def _given(addresses: tuple[int, int], first: int) -> tuple[int, int]:
    """Two addresses that every launch is given anew, but for buffers that the rank lacks."""
    return given_address(addresses[0], first), given_address(addresses[1], first + 1)
