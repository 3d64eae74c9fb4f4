"""Collectives in two layers: inside each node over its own links, between nodes along rails.

Rail l joins the ranks that are number l of their nodes, which all have as many. Only what must
cross goes through the host, and the host adds nothing up: kernels fold what has come.

- ``all_reduce``: ranks of a node exchange shares; each folds its own (ranks of the node in order),
  exchanges shares of that along its rail, folds them (nodes in order), and what is done then goes
  back the same way: along the rail, then inside the node.
- ``reduce_scatter``: the same without the way back. ``all_gather``: the way back alone.
- ``broadcast``: ranks of the root's node get all of it, and each sends its share along its rail;
  ranks of another node exchange what they have got.

So a sum is a fold over nodes of folds over each node's ranks. What is folded in part stays in the
accumulator's type, as everywhere, unless ``accumulate="dtype"``. A call runs in slices: while one
is on the network, the one before is folded and the one after exchanged inside the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy.typing as npt

from ringcoll.arguments.calls import Call
from ringcoll.dtypes import DType, dtype_of
from ringcoll.errors import PlanError
from ringcoll.executors.cuda.executor import CudaExecutor
from ringcoll.executors.cuda.params import start_of
from ringcoll.executors.cuda.wishes import Wishes
from ringcoll.executors.staging.carry import Exchange
from ringcoll.executors.staging.exchange import Exchanges
from ringcoll.executors.staging.executor import Staged, Staging, settle
from ringcoll.executors.staging.fold import fold
from ringcoll.executors.staging.pieces import ALIGN
from ringcoll.transports.cuda.device import runtime
from ringcoll.transports.cuda.memory import DeviceMemory, allocate
from ringcoll.transports.cuda.views import device_view

__all__ = ["LEAST_BYTES", "Layers"]

LEAST_BYTES = 1 << 20
"""From so many bytes of the larger buffer on: below, one message between hosts is what counts."""

_FEW = 4
"""Slices of a call, unless they were shorter than :data:`_SHORT`."""

_SHORT = 256 << 10
_NAMES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
_SHARED = ("all_reduce", "broadcast")
"""Whose buffers are shared out among the ranks of a node; the others have a segment for each."""

Array = npt.NDArray[Any]

Enqueue = Callable[[int], None]
"""Takes a stream."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a call, in the order in which a stream is given it.

    Args:
        inside: what comes before the first exchange: exchanged and folded inside the node.
        partials: along the rail: what is to be folded.
        fold: of what has come.
        results: along the rail: what is done.
        outside: what comes after the last exchange: what is done goes round in the node.

    """

    inside: tuple[Enqueue, ...] = ()
    partials: Exchange | None = None
    fold: tuple[Enqueue, ...] = ()
    results: Exchange | None = None
    outside: tuple[Enqueue, ...] = ()


@dataclass(frozen=True, slots=True)
class _Task:
    """A call, the type of its partial sums, seconds of a wait, and CUDA blocks inside the node."""

    call: Call
    wire: DType
    timeout: float
    blocks: int | None


class Layers:
    """One rank's side of the calls that run in two layers.

    Args:
        staging: of the communicator.
        exchanges: along the rails.
        inside: the executor of this node's ranks.
        members: the ranks of each node, as many in each.

    """

    def __init__(
        self,
        staging: Staging,
        exchanges: Exchanges,
        inside: CudaExecutor,
        members: Sequence[Sequence[int]],
    ) -> None:
        self._staging, self._exchanges, self._inside = staging, exchanges, inside
        self._members, rank = members, staging.fabric.rank
        self._node = next(n for n, ranks in enumerate(members) if rank in ranks)
        self._local = members[self._node].index(rank)
        self._nodes, self._width = len(members), len(members[0])
        self._rail = [ranks[self._local] for ranks in members]
        self._memory: DeviceMemory | None = None
        self._copy = runtime().memcpyAsync
        self._kind: int = runtime().memcpyDeviceToDevice

    @staticmethod
    def of(call: Call) -> bool:
        """Whether a call may run in layers, by what all ranks know of it."""
        scaled = call.op is not None and call.op.scales
        return call.collective in _NAMES and not (call.counts or scaled)

    def slices(self, call: Call) -> int:
        """In how many slices a call of ``nbytes`` runs; for people."""
        width = 1 if call.collective in _SHARED else self._width * self._nodes
        count = call.nbytes // call.dtype.itemsize // width
        share = self._share(replace(call, count=count), call.dtype)
        return max(1, -(-(count // share.unit * share.unit) // share.step))

    def prepare(
        self,
        call: Call,
        hello: Staged,
        rest: Callable[[Call], Staged],
        timeout: float,
        blocks: int | None,
    ) -> Staged:
        """Cut a call into slices, and prepare what each of them enqueues.

        Args:
            call: checked; its arrays are views of device memory that nobody reads here.
            hello: runs first: by it all ranks hear that they make this call.
            rest: prepares what is too short to be shared out, as a call without layers.
            timeout: seconds that a wait may take.
            blocks: CUDA blocks of the calls inside the node, at most.

        """
        partials = call.op is not None and self._width > 1
        wire = dtype_of(call.dtype.partial) if partials else call.dtype
        task = _Task(call, wire, timeout, blocks)
        share = self._share(call, wire)
        whole = call.count // share.unit * share.unit
        slices = [
            self._slice(task, number, first, min(whole, first + share.step))
            for number, first in enumerate(range(0, whole, share.step))
        ]
        after = []
        if whole < call.count:
            after.append(rest(_part(call, whole)))
        self._exchanges.ready(timeout)
        body = partial(self._exchanges.enqueue, slices, timeout)
        parts: list[Enqueue] = [hello.enqueue, body, *(staged.enqueue for staged in after)]

        def enqueue(stream: int) -> None:
            for part in parts:
                part(stream)

        return Staged(call, enqueue, timeout, hello.changes)

    def _slice(self, task: _Task, number: int, first: int, last: int) -> Slice:
        makers: dict[str, Callable[[_Task, int, int, int], Slice]] = {
            "all_reduce": self._all_reduce,
            "reduce_scatter": self._reduce_scatter,
            "all_gather": self._all_gather,
            "broadcast": self._broadcast,
        }
        return makers[task.call.collective](task, number, first, last)

    # -- a slice of each collective: elements `first` to `last` of a segment -----------------------

    def _all_reduce(self, task: _Task, number: int, first: int, last: int) -> Slice:
        call, (send, recv) = task.call, _both(task.call)
        share = (last - first) // self._width
        piece = share // self._nodes
        own, whole = self._node, recv[first:last]
        mine = whole[self._local * share : (self._local + 1) * share]
        inside, partials, folded = self._folded(
            task, number, send[first:last], mine[own * piece : (own + 1) * piece]
        )
        results = self._exchanges.exchange(
            1,
            number,
            call,
            [(peer, mine[own * piece : (own + 1) * piece]) for peer in self._peers()],
            [(self._rail[n], mine[n * piece : (n + 1) * piece]) for n in self._others_of()],
        )
        outside: tuple[Enqueue, ...] = ()
        if self._width > 1:
            outside = (self._gathered(whole, mine, task, in_place=True),)
        return Slice(inside, partials, folded, results, outside)

    def _reduce_scatter(self, task: _Task, number: int, first: int, last: int) -> Slice:
        call, (send, recv) = task.call, _both(task.call)
        length, item = last - first, call.dtype.itemsize
        packed = self._scratch(1, len(send) // call.count * length, call.dtype)
        # Of rank l of a node: what is for rank l of every node.
        moves = [
            (
                start_of(packed) + at * length * item,
                start_of(send) + (rank * call.count + first) * item,
            )
            for at, rank in enumerate(
                self._members[n][k] for k in range(self._width) for n in range(self._nodes)
            )
        ]
        pack = partial(self._copies, tuple(moves), length * item)
        inside, partials, folded = self._folded(task, number, packed, recv[first:last])
        return Slice((pack, *inside), partials, folded)

    def _all_gather(self, task: _Task, number: int, first: int, last: int) -> Slice:
        call, (send, recv) = task.call, _both(task.call)
        length, item = last - first, call.dtype.itemsize
        own = send[first:last]
        into = self._scratch(1, self._nodes * length, call.dtype)
        keep = partial(
            self._copies,
            ((start_of(into) + self._node * length * item, start_of(own)),),
            length * item,
        )
        results = self._exchanges.exchange(
            1,
            number,
            call,
            [(peer, own) for peer in self._peers()],
            [(self._rail[n], into[n * length : (n + 1) * length]) for n in self._others_of()],
        )
        spread = into
        outside: list[Enqueue] = [keep]
        if self._width > 1:
            spread = self._scratch(0, self._width * into.size, call.dtype)
            outside.append(self._gathered(spread, into, task, in_place=False))
        moves = [
            (
                start_of(recv) + (rank * call.count + first) * item,
                start_of(spread) + at * length * item,
            )
            for at, rank in enumerate(
                self._members[n][k] for k in range(self._width) for n in range(self._nodes)
            )
        ]
        outside.append(partial(self._copies, tuple(moves), length * item))
        return Slice(results=results, outside=tuple(outside))

    def _broadcast(self, task: _Task, number: int, first: int, last: int) -> Slice:
        call, (send, recv) = task.call, (task.call.send, _received(task.call))
        share = (last - first) // self._width
        whole = recv[first:last]
        mine = whole[self._local * share : (self._local + 1) * share]
        peers = self._peers()
        if call.root in self._members[self._node]:
            inside = self._spread(None if send is None else send[first:last], whole, task)
            results = self._exchanges.exchange(
                1, number, call, [(peer, mine) for peer in peers], []
            )
            return Slice(inside=inside, results=results)
        source = next(peer for peer in peers if self._near(peer, call.root))
        results = self._exchanges.exchange(1, number, call, [], [(source, mine)])
        if self._width == 1:
            return Slice(results=results)
        gathered = self._gathered(whole, mine, task, in_place=True)
        return Slice(results=results, outside=(gathered,))

    # -- what slices are made of -------------------------------------------------------------------

    def _folded(
        self, task: _Task, number: int, send: Array, target: Array
    ) -> tuple[tuple[Enqueue, ...], Exchange, tuple[Enqueue, ...]]:
        """What ``send`` of all ranks comes to in ``target``: before, along the rail, and after.

        ``send`` has an equal part for each rank of the node, and in that for each node.
        """
        call, wire = task.call, task.wire
        share = send.size // self._width
        piece = share // self._nodes
        part = self._scratch(2 + number % self._exchanges.figures.slots, share, wire)
        inside: tuple[Enqueue, ...]
        raw = wire.name == call.dtype.name
        if self._width == 1:
            at = ((start_of(part), start_of(send)),)
            inside = (partial(self._copies, at, send.nbytes),)
        else:
            come = self._scratch(0, send.size, call.dtype)
            swap = Call(
                "all_to_all",
                self._local,
                send,
                come,
                share,
                call.dtype,
                nbytes=send.nbytes,
            )
            ready = self._inside.prepare(swap, Wishes(blocks=task.blocks), task.timeout)
            source = self._width, start_of(come), share * call.dtype.itemsize
            sums = self._fold(call, source, part, share, raw_in=True, raw_out=raw, whole=False)
            inside = (partial(self._inside.run, ready), sums)
        partials = self._exchanges.exchange(
            0,
            number,
            call,
            [(self._rail[n], part[n * piece : (n + 1) * piece]) for n in self._others_of()],
            [(self._rail[n], part[n * piece : (n + 1) * piece]) for n in self._others_of()],
        )
        source = self._nodes, start_of(part), piece * wire.itemsize
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
            self._staging.load,
            call.dtype,
            call.op,
            source,
            start_of(target),
            count,
            raw_in=raw_in,
            raw_out=raw_out,
            nranks=self._staging.fabric.nranks if whole else 0,
        )
        return launch.launch

    def _gathered(self, whole: Array, mine: Array, task: _Task, *, in_place: bool) -> Enqueue:
        """All ranks of the node get what each of them has."""
        gather = Call(
            "all_gather",
            self._local,
            mine,
            whole,
            mine.size,
            task.call.dtype,
            in_place=in_place,
            nbytes=whole.nbytes,
        )
        ready = self._inside.prepare(gather, Wishes(blocks=task.blocks), task.timeout)
        return partial(self._inside.run, ready)

    def _spread(self, send: Array | None, whole: Array, task: _Task) -> tuple[Enqueue, ...]:
        """All ranks of the root's node get what the root has; it alone has something to send."""
        call = task.call
        if self._width == 1:
            moves = () if send is None else ((start_of(whole), start_of(send)),)
            return (partial(self._copies, moves, whole.nbytes),)
        spread = Call(
            "broadcast",
            self._local,
            send,
            whole,
            whole.size,
            call.dtype,
            root=self._members[self._node].index(call.root),
            in_place=call.in_place,
            nbytes=whole.nbytes,
        )
        ready = self._inside.prepare(spread, Wishes(blocks=task.blocks), task.timeout)
        return (partial(self._inside.run, ready),)

    def _copies(self, moves: Sequence[tuple[int, int]], nbytes: int, stream: int) -> None:
        for to, by in moves:
            if to != by and nbytes:
                self._copy(to, by, nbytes, self._kind, stream)

    def _near(self, rank: int, other: int) -> bool:
        """Whether two ranks are of one node."""
        return any(rank in ranks and other in ranks for ranks in self._members)

    def _peers(self) -> list[int]:
        """The other ranks of the rail."""
        return [self._rail[n] for n in self._others_of()]

    def _others_of(self) -> list[int]:
        """The other nodes."""
        return [n for n in range(self._nodes) if n != self._node]

    def _share(self, call: Call, wire: DType) -> _Share:
        """How many elements of a segment a slice has, and which multiples can be shared out."""
        align = max(1, ALIGN // call.dtype.itemsize)
        shared = call.collective in _SHARED
        width = self._width if shared else 1
        pieces = self._nodes if call.collective == "all_reduce" else 1
        unit = width * pieces * align if shared else 1
        # Elements that go along a rail together.
        each = call.count // width if shared else call.count * self._nodes
        item = max(wire.itemsize, call.dtype.itemsize)
        share = min(self._exchanges.figures.share, max(_SHORT, each * item // _FEW)) // item
        step = width * share if shared else share // self._nodes
        return _Share(unit, max(unit, step // unit * unit))

    def _scratch(self, region: int, count: int, dtype: DType) -> Array:
        """Memory of the device for a slice: regions 0 and 1 for one step, one more for each slot.

        Region 0 has a part for each rank of the node.
        """
        share, slots = self._exchanges.figures.share, self._exchanges.figures.slots
        if self._memory is None:
            settle()  # allocating may wait for the device
            device = self._staging.device.ordinal
            nbytes = (2 * self._width + slots) * share
            self._memory = allocate(device, nbytes, what="calls in two layers")
        start = region * self._width if region < 2 else 2 * self._width + region - 2
        pointer = self._memory.pointer + start * share
        return device_view(pointer, count * dtype.itemsize, dtype.numpy)

    def close(self) -> None:
        """Let go of device memory; nothing may be enqueued any more."""
        if self._memory is not None:
            self._memory.free()
            self._memory = None


@dataclass(frozen=True, slots=True)
class _Share:
    """Elements: ``step`` in a slice, a multiple of ``unit``."""

    unit: int
    step: int


def _received(call: Call) -> Array:
    if call.recv is None:
        raise PlanError(f"{call.collective} on rank {call.rank}: a buffer is missing")
    return call.recv


def _both(call: Call) -> tuple[Array, Array]:
    if call.send is None:
        raise PlanError(f"{call.collective} on rank {call.rank}: a buffer is missing")
    return call.send, _received(call)


def _part(call: Call, first: int) -> Call:
    """What is left of a call whose buffers are shared out, from an element on."""
    recv = _received(call)
    count, item = call.count - first, call.dtype.itemsize
    return replace(
        call,
        send=None if call.send is None else call.send[first:],
        recv=recv[first:],
        count=count,
        nbytes=count * item,
        terms=call.describe(),
    )
