"""What slices of calls in two layers are made of: calls inside a node, folds, messages, copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy.typing as npt

from ringcoll.arguments.calls import Call
from ringcoll.cuda.device import runtime
from ringcoll.cuda.memory import DeviceMemory, allocate
from ringcoll.dtypes import DType, ReduceOp
from ringcoll.errors import PlanError
from ringcoll.executors.cuda.executor import CudaExecutor
from ringcoll.executors.cuda.limits import KernelOptions
from ringcoll.executors.cuda.loader import Launchable
from ringcoll.executors.cuda.params import Addresses, Body, Header, pack, padded, start_of
from ringcoll.executors.cuda.source import kernel_text, names_of
from ringcoll.executors.cuda_nodes.carry import Exchange
from ringcoll.executors.cuda_nodes.exchange import Exchanges
from ringcoll.executors.cuda_nodes.executor import CudaNodesExecutor, settle
from ringcoll.views import device_view

Array = npt.NDArray[Any]

Enqueue = Callable[[int], None]
"""Takes a stream."""


@dataclass(frozen=True, slots=True)
class LayeredCall:
    """A call, the type of its partial sums, seconds of a wait, and CUDA blocks inside the node."""

    call: Call
    wire: DType
    timeout: float
    blocks: int | None


class Steps:
    """One rank's place among the nodes; rails join nodes that have as many ``members``."""

    def __init__(
        self,
        executor: CudaNodesExecutor,
        exchanges: Exchanges,
        inside: CudaExecutor,
        members: Sequence[Sequence[int]],
    ) -> None:
        self._executor, self.exchanges, self._inside = executor, exchanges, inside
        self.members, rank = members, executor.fabric.rank
        self.node = next(n for n, ranks in enumerate(members) if rank in ranks)
        self.local = members[self.node].index(rank)
        self.nodes, self.width = len(members), len(members[self.node])
        self.nranks, widths = executor.fabric.nranks, {len(ranks) for ranks in members}
        self.alike, self.abroad = len(widths) == 1, self.nranks - min(widths)
        self.rail = [ranks[self.local] for ranks in members] if self.alike else []
        self._memory: DeviceMemory | None = None
        self._copy = runtime().memcpyAsync
        self._kind: int = runtime().memcpyDeviceToDevice

    def folded(
        self, layered: LayeredCall, number: int, send: Array, target: Array
    ) -> tuple[tuple[Enqueue, ...], Exchange, tuple[Enqueue, ...]]:
        """What ``send`` of all ranks comes to in ``target``: before, along the rail, and after.

        ``send`` has an equal part for each rank of the node, and in that for each node.
        """
        call, wire = layered.call, layered.wire
        share = send.size // self.width
        piece = share // self.nodes
        part = self.scratch(2, share, wire, number)
        inside: tuple[Enqueue, ...]
        raw = wire.name == call.dtype.name
        if self.width == 1:
            at = ((start_of(part), start_of(send)),)
            inside = (partial(self.copies, at, send.nbytes),)
        else:
            come = self.scratch(0, send.size, call.dtype)
            swap = Call(
                "all_to_all",
                self.local,
                send,
                come,
                share,
                call.dtype,
                nbytes=send.nbytes,
            )
            ready = self._inside.prepare(
                swap, KernelOptions(blocks=layered.blocks), layered.timeout
            )
            source = self.width, start_of(come), share * call.dtype.itemsize
            sums = self._fold(call, source, part, share, raw_in=True, raw_out=raw, whole=False)
            inside = (partial(self._inside.run, ready), sums)
        partials = self.exchanges.exchange(
            0,
            number,
            call,
            [(self.rail[n], part[n * piece : (n + 1) * piece]) for n in self.others()],
            [(self.rail[n], part[n * piece : (n + 1) * piece]) for n in self.others()],
        )
        source = self.nodes, start_of(part), piece * wire.itemsize
        last = self._fold(call, source, target, piece, raw_in=raw, raw_out=True, whole=True)
        return inside, partials, (last,)

    def _fold(
        self,
        call: Call,
        source: tuple[int, int, int],
        target: Array,
        count: int,
        *,
        raw_in: bool,
        raw_out: bool,
        whole: bool,
    ) -> Enqueue:
        if call.op is None:
            raise PlanError(f"{call.collective}: nothing is folded without an operator")
        launch = fold(
            self._executor.load,
            call.dtype,
            call.op,
            source,
            start_of(target),
            count,
            raw_in=raw_in,
            raw_out=raw_out,
            nranks=self.nranks if whole else 0,
        )
        return launch.launch

    def gathered(
        self, whole: Array, mine: Array, layered: LayeredCall, *, in_place: bool
    ) -> Enqueue:
        """All ranks of the node get what each of them has."""
        gather = Call(
            "all_gather",
            self.local,
            mine,
            whole,
            mine.size,
            layered.call.dtype,
            in_place=in_place,
            nbytes=whole.nbytes,
        )
        ready = self._inside.prepare(gather, KernelOptions(blocks=layered.blocks), layered.timeout)
        return partial(self._inside.run, ready)

    def collected(self, whole: Array | None, mine: Array, layered: LayeredCall) -> Enqueue:
        """The root gets what each rank of its node has; it alone has something to receive in."""
        gather = Call(
            "gather",
            self.local,
            mine,
            whole,
            mine.size,
            layered.call.dtype,
            root=self.members[self.node].index(layered.call.root),
            nbytes=self.width * mine.nbytes,
        )
        ready = self._inside.prepare(gather, KernelOptions(blocks=layered.blocks), layered.timeout)
        return partial(self._inside.run, ready)

    def spread(self, send: Array | None, whole: Array, layered: LayeredCall) -> tuple[Enqueue, ...]:
        """All ranks of the root's node get what the root has; it alone has something to send."""
        call = layered.call
        if self.width == 1:
            moves = () if send is None else ((start_of(whole), start_of(send)),)
            return (partial(self.copies, moves, whole.nbytes),)
        spread = Call(
            "broadcast",
            self.local,
            send,
            whole,
            whole.size,
            call.dtype,
            root=self.members[self.node].index(call.root),
            in_place=call.in_place,
            nbytes=whole.nbytes,
        )
        ready = self._inside.prepare(spread, KernelOptions(blocks=layered.blocks), layered.timeout)
        return (partial(self._inside.run, ready),)

    def swapped(self, layered: LayeredCall) -> Enqueue:
        """Ranks of the node get each other's segments, which stay where the whole call has them."""
        call, ranks = layered.call, self.members[self.node]
        nbytes = call.count * call.dtype.itemsize
        if self.width == 1:
            at = self._executor.fabric.rank * nbytes
            move = start_of(call.recv) + at, start_of(call.send) + at
            return partial(self.copies, (move,), nbytes)
        swap = Call(
            "all_to_all",
            self.local,
            call.send,
            call.recv,
            call.count,
            call.dtype,
            in_place=call.in_place,
            nbytes=self.width * nbytes,
            counts=(call.count,) * self.width,
            displs=tuple(rank * call.count for rank in ranks),
        )
        ready = self._inside.prepare(swap, KernelOptions(blocks=layered.blocks), layered.timeout)
        return partial(self._inside.run, ready)

    def copies(self, moves: Sequence[tuple[int, int]], nbytes: int, stream: int) -> None:
        """Enqueue copies of so many bytes each, to the first address from the second."""
        for to, by in moves:
            if to != by and nbytes:
                self._copy(to, by, nbytes, self._kind, stream)

    def near(self, rank: int, other: int) -> bool:
        """Whether two ranks are of one node."""
        return any(rank in ranks and other in ranks for ranks in self.members)

    def peers(self) -> list[int]:
        """The other ranks of the rail."""
        return [self.rail[n] for n in self.others()]

    def others(self) -> list[int]:
        """The other nodes."""
        return [n for n in range(self.nodes) if n != self.node]

    def foreign(self, way: int) -> list[int]:
        """Other nodes' ranks to send to (1) or receive from (-1), each from one rank at a time."""
        most = max(map(len, self.members))
        slots = [
            (self.members[(self.node + way * ahead) % self.nodes], (self.local + way * turn) % most)
            for ahead in range(1, self.nodes)
            for turn in range(most)
        ]
        return [ranks[slot] for ranks, slot in slots if slot < len(ranks)]

    def scratch(self, region: int, count: int, dtype: DType, number: int = 0) -> Array:
        """Memory of the device for a slice, by its number where it is kept from step to step.

        Regions 0 and 1 have a share for each rank of the node, regions 1 and 2 one for each slot.
        """
        share, slots = self.exchanges.figures.share, self.exchanges.figures.slots
        starts = 0, self.width, self.width + max(self.width, slots)
        if self._memory is None:
            settle()  # allocating may wait for the device
            device = self._executor.device.ordinal
            nbytes = (starts[2] + slots) * share
            self._memory = allocate(device, nbytes, what="calls in two layers")
        pointer = self._memory.pointer + (starts[region] + number % slots) * share
        return device_view(pointer, count * dtype.itemsize, dtype.numpy)

    def close(self) -> None:
        """Let go of device memory; nothing may be enqueued any more."""
        if self._memory is not None:
            self._memory.free()
            self._memory = None


_THREADS, _BLOCKS = 512, 64


def fold(
    load: Callable[[str], int],
    dtype: DType,
    op: ReduceOp,
    source: tuple[int, int, int],
    target: int,
    count: int,
    *,
    raw_in: bool,  # the arrays are of the dtype itself, not of its accumulator
    raw_out: bool,
    nranks: int,  # contributions in a result that is the whole; 0: it is a part of one
) -> Launchable:
    """The launch that folds ``source``'s (arrays, address, bytes between them) into one."""
    text = fold_text(dtype, op, raw_in=raw_in, raw_out=raw_out, final=nranks > 0)
    words = padded([(*source, target, count, nranks)])
    parameter = pack(
        Body(text, words, (0,), 0, 0), Header(0, 0, False, False, 1), 0, [Addresses(0, (0,), 0)]
    )
    blocks = max(1, min(_BLOCKS, -(-count // _THREADS)))
    return Launchable(load(text), blocks, 1, _THREADS, parameter)


def fold_text(dtype: DType, op: ReduceOp, *, raw_in: bool, raw_out: bool, final: bool) -> str:
    """The source text of ``kernels/fold.cuh``: sums what a rank has received from others."""
    kind, operator = names_of(dtype, op)
    flags = ", ".join("true" if flag else "false" for flag in (raw_in, raw_out, final))
    constants = {"RANKS": 1, "LOCAL": 1, "WORDS": len(padded([()])[0])}
    run = f"fold::run<{kind}, {operator}<{kind}>, {flags}>(args);"
    return kernel_text("fold", constants, f"{_THREADS}", run)
