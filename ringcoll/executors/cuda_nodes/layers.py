"""Collectives in two layers: inside each node over its own links, between nodes along rails.

Rail l joins the ranks with local rank l of nodes of equal size. Only data between nodes go through
the host, and the host reduces nothing: kernels fold what has arrived.

- ``all_reduce``: reduce_scatter inside each node, reduce_scatter along the rails, then all_gather
  along the rails and all_gather inside each node.
- ``reduce_scatter``: its first half. ``all_gather``: its second half.
- ``reduce``: as all_reduce, but the results are gathered on the root's node and there on the root.
- ``broadcast``: inside the root's node, then each rank sends its share along its rail; on the other
  nodes an all_gather.
- ``all_to_all``: ranks of different nodes exchange their segments directly, whatever the sizes of
  the nodes; kernels exchange those inside a node.

So a sum is a fold over nodes of folds over each node's ranks in order. Partial sums stay in the
accumulator's type unless ``accumulate="dtype"``. A call runs in slices: while one is on the
network, the one before is folded and the one after exchanged inside the nodes.
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

LEAST_BYTES = 1 << 20
"""Bytes of the larger buffer from which calls run in layers; below, latency dominates."""

_FEW = 4
"""Slices of a call, unless they were shorter than :data:`_SHORT`."""

_SHORT = 256 << 10
_PIECES = ("all_reduce", "reduce")
"""Collectives whose shares have a piece for each node, folded by that node's rank of the rail."""

_SHARED = (*_PIECES, "broadcast")
"""Collectives whose buffers are divided among the ranks of a node; others have segments."""

_DIRECT = ("all_to_all",)
"""Collectives without rails, which also run on nodes of unequal sizes."""


class Layers:
    """One rank's calls in two layers."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def takes(self, call: Call) -> bool:
        """Whether a call can run in layers; equal on all ranks."""
        scaled = call.op is not None and call.op.scales
        joined = self._steps.alike or call.collective in _DIRECT
        return call.collective in SLICE_MAKERS and joined and not (call.counts or scaled)

    def words(self, call: Call) -> list[str]:
        """The way of a call, as lines for ``explain``."""
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
        """Cut a call into slices and prepare them.

        Args:
            call: checked; its arrays are views of device memory and must not be read.
            hello: runs first: a small call by which the ranks compare their signatures.
            rest: prepares a remainder too short to be divided, as a call without layers.
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
        """The elements of a segment in a slice, and the multiples that can be divided."""
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
        """Free device memory; nothing may be enqueued any more."""
        self._steps.close()


@dataclass(frozen=True, slots=True)
class _Share:
    """Elements: ``step`` in a slice, a multiple of ``unit``."""

    unit: int
    step: int


def _part(call: Call, first: int) -> Call:
    """The remainder of a call whose buffers are divided, from an element on."""
    count, item = call.count - first, call.dtype.itemsize
    return replace(
        call,
        send=None if call.send is None else call.send[first:],
        recv=None if call.recv is None else call.recv[first:],
        count=count,
        nbytes=count * item,
        custom_signature=call.signature(),
    )
