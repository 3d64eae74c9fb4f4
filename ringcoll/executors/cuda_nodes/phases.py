"""The phases of a call in two layers: collectives in a node, reductions, messages, copies."""

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
from ringcoll.executors.cuda.loader import Launchable
from ringcoll.executors.cuda.params import Addresses, Body, Header, pack, padded
from ringcoll.executors.cuda.source import kernel_text, names_of
from ringcoll.executors.cuda_nodes.carry import Exchange
from ringcoll.executors.cuda_nodes.exchange import PARTIALS, Enqueue, Exchanges
from ringcoll.executors.cuda_nodes.executor import CudaNodesExecutor, settle
from ringcoll.tuner import Limits
from ringcoll.views import device_view, start_of

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class LayeredCall:
    """A call that runs in two layers."""

    call: Call
    partial_dtype: DType  # of the partial sums that go between nodes
    timeout: float  # seconds that a wait may take
    blocks: int | None  # CUDA blocks of a kernel inside the node, at most


class Phases:
    """Makes the phases of one rank's slices.

    ``members`` are the ranks of each node. A rail exists where all nodes have equally many: it
    joins the ranks with the same local rank.
    """

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
        self.local_rank = members[self.node].index(rank)
        self.nnodes, self.local_nranks = len(members), len(members[self.node])
        self.nranks, sizes = executor.fabric.nranks, {len(ranks) for ranks in members}
        self.has_rails, self.most_remote = len(sizes) == 1, self.nranks - min(sizes)
        self.rail = [ranks[self.local_rank] for ranks in members] if self.has_rails else []
        self._memory: DeviceMemory | None = None
        self._copy = runtime().memcpyAsync
        self._device_to_device: int = runtime().memcpyDeviceToDevice

    def reduce_scatter(
        self, layered: LayeredCall, number: int, send: Array, target: Array
    ) -> tuple[tuple[Enqueue, ...], Exchange, tuple[Enqueue, ...]]:
        """A reduce_scatter of all ranks: in the node, along the rail, and the last sums.

        ``send`` has an equal part for each rank of the node, each of these one for each node; the
        reduction of this rank's piece goes to ``target``.
        """
        call, partial_dtype = layered.call, layered.partial_dtype
        share = send.size // self.local_nranks
        piece = share // self.nnodes
        sums = self.scratch(2, share, partial_dtype, number)
        inside: tuple[Enqueue, ...]
        raw = partial_dtype.name == call.dtype.name
        if self.local_nranks == 1:
            addresses = ((start_of(sums), start_of(send)),)
            inside = (partial(self.copies, addresses, send.nbytes),)
        else:
            received = self.scratch(0, send.size, call.dtype)
            swap = Call(
                "all_to_all",
                self.local_rank,
                send,
                received,
                share,
                call.dtype,
                nbytes=send.nbytes,
            )
            source = self.local_nranks, start_of(received), share * call.dtype.itemsize
            inside = (
                self._in_node(swap, layered),
                self._fold(call, source, sums, share, raw_in=True, raw_out=raw, whole=False),
            )
        pieces = [(self.rail[n], sums[n * piece : (n + 1) * piece]) for n in self.other_nodes()]
        partials = self.exchanges.exchange(PARTIALS, number, call, pieces, pieces)
        source = self.nnodes, start_of(sums), piece * partial_dtype.itemsize
        last = self._fold(call, source, target, piece, raw_in=raw, raw_out=True, whole=True)
        return inside, partials, (last,)

    def _in_node(self, call: Call, layered: LayeredCall) -> Enqueue:
        """A collective of the ranks of this node."""
        prepared = self._inside.prepare(call, Limits(blocks=layered.blocks), layered.timeout)
        return partial(self._inside.run, prepared)

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
        """A kernel that reduces what this rank has received; ``whole``: from all ranks."""
        if call.op is None:
            raise PlanError(f"{call.collective}: a reduction needs an operator")
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

    def all_gather(
        self, whole: Array, mine: Array, layered: LayeredCall, *, in_place: bool
    ) -> Enqueue:
        """An all_gather in the node, from ``mine`` to ``whole``."""
        gather = Call(
            "all_gather",
            self.local_rank,
            mine,
            whole,
            mine.size,
            layered.call.dtype,
            in_place=in_place,
            nbytes=whole.nbytes,
        )
        return self._in_node(gather, layered)

    def gather(self, whole: Array | None, mine: Array, layered: LayeredCall) -> Enqueue:
        """A gather in the root's node; ``whole`` is None on the other ranks."""
        gather = Call(
            "gather",
            self.local_rank,
            mine,
            whole,
            mine.size,
            layered.call.dtype,
            root=self.members[self.node].index(layered.call.root),
            nbytes=self.local_nranks * mine.nbytes,
        )
        return self._in_node(gather, layered)

    def broadcast(
        self, send: Array | None, whole: Array, layered: LayeredCall
    ) -> tuple[Enqueue, ...]:
        """A broadcast in the root's node; ``send`` is None on the other ranks."""
        call = layered.call
        if self.local_nranks == 1:
            addresses = () if send is None else ((start_of(whole), start_of(send)),)
            return (partial(self.copies, addresses, whole.nbytes),)
        broadcast = Call(
            "broadcast",
            self.local_rank,
            send,
            whole,
            whole.size,
            call.dtype,
            root=self.members[self.node].index(call.root),
            in_place=call.in_place,
            nbytes=whole.nbytes,
        )
        return (self._in_node(broadcast, layered),)

    def all_to_all(self, layered: LayeredCall) -> Enqueue:
        """An all_to_all in the node of the segments that its ranks have in the whole call."""
        call, ranks = layered.call, self.members[self.node]
        nbytes = call.count * call.dtype.itemsize
        if self.local_nranks == 1:
            offset = self._executor.fabric.rank * nbytes
            addresses = start_of(call.recv) + offset, start_of(call.send) + offset
            return partial(self.copies, (addresses,), nbytes)
        swap = Call(
            "all_to_all",
            self.local_rank,
            call.send,
            call.recv,
            call.count,
            call.dtype,
            in_place=call.in_place,
            nbytes=self.local_nranks * nbytes,
            counts=(call.count,) * self.local_nranks,
            displs=tuple(rank * call.count for rank in ranks),
        )
        return self._in_node(swap, layered)

    def copies(self, addresses: Sequence[tuple[int, int]], nbytes: int, stream: int) -> None:
        """Enqueue copies on the device, ``nbytes`` each, by (target, source) addresses."""
        for target, source in addresses:
            if target != source and nbytes:
                self._copy(target, source, nbytes, self._device_to_device, stream)

    def same_node(self, rank: int, other: int) -> bool:
        """Whether two ranks are on one node."""
        return any(rank in ranks and other in ranks for ranks in self.members)

    def rail_peers(self) -> list[int]:
        """The other ranks of the rail."""
        return [self.rail[n] for n in self.other_nodes()]

    def other_nodes(self) -> list[int]:
        """The numbers of the other nodes."""
        return [n for n in range(self.nnodes) if n != self.node]

    def remote_ranks(self, direction: int) -> list[int]:
        """The ranks of other nodes, in the order to send to them (1) or to receive from them (-1).

        In step k no two ranks send to the same one.
        """
        most = max(map(len, self.members))
        steps = [
            (
                self.members[(self.node + direction * node) % self.nnodes],
                (self.local_rank + direction * turn) % most,
            )
            for node in range(1, self.nnodes)
            for turn in range(most)
        ]
        return [ranks[local] for ranks, local in steps if local < len(ranks)]

    def scratch(self, region: int, count: int, dtype: DType, number: int = 0) -> Array:
        """Device memory for a slice; ``number`` is the slice's where several slices use the region.

        Regions 0 and 1 have a share for each rank of the node, regions 1 and 2 one for each slot.
        """
        share, slots = self.exchanges.limits.share, self.exchanges.limits.slots
        starts = 0, self.local_nranks, self.local_nranks + max(self.local_nranks, slots)
        if self._memory is None:
            settle()  # cudaMalloc may wait for the device
            device = self._executor.device.ordinal
            nbytes = (starts[2] + slots) * share
            self._memory = allocate(device, nbytes, what="calls in two layers")
        pointer = self._memory.pointer + (starts[region] + number % slots) * share
        return device_view(pointer, count * dtype.itemsize, dtype.numpy)

    @property
    def nbytes(self) -> int:
        """Bytes of the device memory of slices."""
        return 0 if self._memory is None else self._memory.nbytes

    def close(self) -> None:
        """Free the device memory until a call needs it again; nothing may be enqueued any more."""
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
    raw_in: bool,  # the arrays have the dtype, not its accumulator's
    raw_out: bool,
    nranks: int,  # contributions to a final result; 0: the result is partial
) -> Launchable:
    """The launch that reduces the arrays of ``source`` (how many, address, stride in bytes)."""
    text = fold_text(dtype, op, raw_in=raw_in, raw_out=raw_out, final=nranks > 0)
    words = padded([(*source, target, count, nranks)])
    parameter = pack(
        Body(text, words, (0,), 0, 0), Header(0, 0, False, False, 1), 0, [Addresses(0, (0,), 0)]
    )
    blocks = max(1, min(_BLOCKS, -(-count // _THREADS)))
    return Launchable(load(text), blocks, 1, _THREADS, parameter)


def fold_text(dtype: DType, op: ReduceOp, *, raw_in: bool, raw_out: bool, final: bool) -> str:
    """The source text of ``kernels/fold.cuh``, which reduces what a rank has received."""
    kind, operator = names_of(dtype, op)
    flags = ", ".join("true" if flag else "false" for flag in (raw_in, raw_out, final))
    constants = {"RANKS": 1, "LOCAL": 1, "WORDS": len(padded([()])[0])}
    run = f"fold::run<{kind}, {operator}<{kind}>, {flags}>(args);"
    return kernel_text("fold", constants, f"RC_KERNEL({_THREADS})", run)
