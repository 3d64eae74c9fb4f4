"""Collectives in two layers: inside each node over its own links, between nodes along rails.

Rail l joins the ranks that are number l of their nodes, where all have as many. Only what must
cross goes through the host, and the host adds nothing up: kernels fold what has come.

- ``all_reduce``: ranks of a node exchange shares; each folds its own (ranks of the node in order),
  exchanges shares of that along its rail, folds them (nodes in order), and what is done then goes
  back the same way: along the rail, then inside the node.
- ``reduce_scatter``: the same without the way back. ``all_gather``: the way back alone.
- ``reduce``: the way back leads to the root's node alone, whose ranks hand it to the root.
- ``broadcast``: ranks of the root's node get all of it, and each sends its share along its rail;
  ranks of another node exchange what they have got.
- ``all_to_all``: no rail has anything to gather. Ranks of different nodes exchange their segments
  directly, however many ranks a node has, and kernels those of a node.

So a sum is a fold over nodes of folds over each node's ranks. What is folded in part stays in the
accumulator's type, as everywhere, unless ``accumulate="dtype"``. A call runs in slices: while one
is on the network, the one before is folded and the one after exchanged inside the nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ringcoll.arguments.calls import Call
from ringcoll.dtypes import DType, dtype_of
from ringcoll.executors.cuda_nodes.executor import CudaNodesCall
from ringcoll.executors.cuda_nodes.pieces import ALIGN
from ringcoll.executors.cuda_nodes.slices import SLICE_MAKERS
from ringcoll.executors.cuda_nodes.steps import Enqueue, LayeredCall, Steps

__all__ = ["LEAST_BYTES", "Layers"]

LEAST_BYTES = 1 << 20
"""From so many bytes of the larger buffer on: below, one message between hosts is what counts."""

_FEW = 4
"""Slices of a call, unless they were shorter than :data:`_SHORT`."""

_SHORT = 256 << 10
_PIECES = ("all_reduce", "reduce")
"""Whose shares have a piece for each node, which that node's rank of the rail folds."""

_SHARED = (*_PIECES, "broadcast")
"""Whose buffers are shared out among the ranks of a node; the others have a segment for each."""

_DIRECT = ("all_to_all",)
"""Which have no rails, and so run on nodes that are not alike too."""


class Layers:
    """One rank's side of the calls that run in two layers."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def takes(self, call: Call) -> bool:
        """Whether a call may run in layers, by what all ranks know of it."""
        scaled = call.op is not None and call.op.scales
        joined = self._steps.alike or call.collective in _DIRECT
        return call.collective in SLICE_MAKERS and joined and not (call.counts or scaled)

    def words(self, call: Call) -> list[str]:
        """How a call of ``nbytes`` runs, in lines for people."""
        width = 1 if call.collective in _SHARED else self._steps.nranks
        count = call.nbytes // call.dtype.itemsize // width
        share = self._share(replace(call, count=count), call.dtype)
        slices = max(1, -(-(count // share.unit * share.unit) // share.step))
        if call.collective in _DIRECT:
            return [
                f"  inside a node by kernels, between nodes from each rank to each through pinned "
                f"host memory, messages to {self._steps.nranks - self._steps.width} ranks at once "
                f"by MPI",
                f"  {slices} slices: while some are on the network, their neighbours are copied",
            ]
        words = [
            f"  inside a node by kernels, between nodes along {self._steps.width} rails through "
            f"pinned host memory, messages by MPI; kernels fold what comes",
            f"  {slices} slices: while some are on the network, their neighbours are exchanged and "
            f"folded inside the nodes",
        ]
        if call.op is not None:
            words.append("  a sum is a fold over nodes of folds over each node's ranks")
        return words

    def prepare(
        self,
        call: Call,
        hello: CudaNodesCall,
        rest: Callable[[Call], CudaNodesCall],
        timeout: float,
        blocks: int | None,
    ) -> CudaNodesCall:
        """Cut a call into slices, and prepare what each of them enqueues.

        Args:
            call: checked; its arrays are views of device memory that nobody reads here.
            rest: prepares what is too short to be shared out, as a call without layers.
            timeout: seconds that a wait may take.
            blocks: CUDA blocks of the calls inside the node, at most.

        """
        partials = call.op is not None and self._steps.width > 1
        wire = dtype_of(call.dtype.partial) if partials else call.dtype
        layered = LayeredCall(call, wire, timeout, blocks)
        share = self._share(call, wire)
        whole = call.count // share.unit * share.unit
        make = SLICE_MAKERS[call.collective]
        slices = [
            make(self._steps, layered, number, first, min(whole, first + share.step))
            for number, first in enumerate(range(0, whole, share.step))
        ]
        after = []
        if whole < call.count:
            after.append(rest(_part(call, whole)))
        self._steps.exchanges.ready(timeout)
        body = partial(self._steps.exchanges.enqueue, slices, timeout)
        parts: list[Enqueue] = [hello.enqueue, body, *(staged.enqueue for staged in after)]

        def enqueue(stream: int) -> None:
            for part in parts:
                part(stream)

        return CudaNodesCall(call, enqueue, timeout, hello.changes)

    def _share(self, call: Call, wire: DType) -> _Share:
        """How many elements of a segment a slice has, and which multiples can be shared out."""
        align = max(1, ALIGN // call.dtype.itemsize)
        shared = call.collective in _SHARED
        width = self._steps.width if shared else 1
        pieces = self._steps.nodes if call.collective in _PIECES else 1
        unit = width * pieces * align if shared else 1
        segments = self._steps.abroad if call.collective in _DIRECT else self._steps.nodes
        # Elements that cross together.
        each = call.count // width if shared else call.count * segments
        item = max(wire.itemsize, call.dtype.itemsize)
        share = min(self._steps.exchanges.figures.share, max(_SHORT, each * item // _FEW)) // item
        step = width * share if shared else share // segments
        return _Share(unit, max(unit, step // unit * unit))

    def close(self) -> None:
        """Let go of device memory; nothing may be enqueued any more."""
        self._steps.close()


@dataclass(frozen=True, slots=True)
class _Share:
    """Elements: ``step`` in a slice, a multiple of ``unit``."""

    unit: int
    step: int


def _part(call: Call, first: int) -> Call:
    """What is left of a call whose buffers are shared out, from an element on."""
    count, item = call.count - first, call.dtype.itemsize
    return replace(
        call,
        send=None if call.send is None else call.send[first:],
        recv=None if call.recv is None else call.recv[first:],
        count=count,
        nbytes=count * item,
        custom_signature=call.signature(),
    )
