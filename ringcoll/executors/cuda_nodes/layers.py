"""Collectives in two layers: inside each node over its own links, between nodes along rails.

Rail l joins the ranks with local rank l of nodes of equal size. Only data between nodes go through
the host, which reduces nothing: kernels reduce what has arrived.

- ``all_reduce``: reduce_scatter inside each node, reduce_scatter along the rails, then all_gather
  along the rails and all_gather inside each node.
- ``reduce_scatter``: its first half. ``all_gather``: its second half.
- ``reduce``: as all_reduce, but the results are gathered on the root's node and there on the root.
- ``broadcast``: inside the root's node, then each rank sends its share along its rail; on the other
  nodes an all_gather.
- ``all_to_all``: ranks of different nodes exchange their segments directly, whatever the sizes of
  the nodes; kernels exchange those inside a node.

A sum is a left fold over nodes of left folds over each node's ranks. Partial sums stay in the
accumulator's type unless ``accumulate="dtype"``. A call runs in slices: while one is on the
network, kernels reduce the one before and exchange the one after inside the nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ringcoll.arguments.calls import Call
from ringcoll.dtypes import DType, dtype_of
from ringcoll.executors.cuda_nodes.exchange import Enqueue
from ringcoll.executors.cuda_nodes.executor import CudaNodesCall
from ringcoll.executors.cuda_nodes.phases import LayeredCall, Phases
from ringcoll.executors.cuda_nodes.pieces import ALIGN
from ringcoll.executors.cuda_nodes.slices import SLICE_MAKERS

_FEW = 4
"""The fewest slices of a call, unless they would be shorter than :data:`_SHORT`."""

_SHORT = 256 << 10  # bytes
_PIECES = ("all_reduce", "reduce")
"""Collectives whose shares have a piece for each node; its rank on the rail reduces it."""

_SHARED = (*_PIECES, "broadcast")
"""Collectives whose buffers are divided among the ranks of a node; others have segments."""

_DIRECT = ("all_to_all",)
"""Collectives without rails, which also run on nodes of unequal sizes."""


class Layers:
    """One rank's calls in two layers."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases

    def supports(self, call: Call) -> bool:
        """Whether a call can run in layers; equal on all ranks."""
        loaded_once = call.op is not None and not call.op.load_is_idempotent
        joined = self._phases.has_rails or call.collective in _DIRECT
        return call.collective in SLICE_MAKERS and joined and not (call.counts or loaded_once)

    def explain(self, call: Call) -> list[str]:
        """Where the data of a call go, in lines of text."""
        width = 1 if call.collective in _SHARED else self._phases.nranks
        count = call.nbytes // call.dtype.itemsize // width
        share = self._share(replace(call, count=count), call.dtype)
        slices = max(1, -(-(count // share.unit * share.unit) // share.step))
        nranks, local_nranks = self._phases.nranks, self._phases.local_nranks
        if call.collective in _DIRECT:
            return [
                f"  inside a node by kernels, between nodes from each rank to each through pinned "
                f"host memory, messages to {nranks - local_nranks} ranks at once "
                f"by MPI",
                f"  {slices} slices: while some are on the network, their neighbours are copied",
            ]
        lines = [
            f"  inside a node by kernels, between nodes along {local_nranks} rails through "
            f"pinned host memory, messages by MPI; kernels reduce what has arrived",
            f"  {slices} slices: while some are on the network, kernels exchange and reduce their "
            f"neighbours inside the nodes",
        ]
        if call.op is not None:
            lines.append("  a sum is a fold over nodes of folds over each node's ranks")
        return lines

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
            hello: a small call that runs first, in which the ranks compare their signatures.
            rest: prepares a remainder that is too short to divide, as a call without layers.
            timeout: seconds that a wait may take.
            blocks: CUDA blocks of the calls inside the node, at most.

        """
        partials = call.op is not None and self._phases.local_nranks > 1
        partial_dtype = dtype_of(call.dtype.partial) if partials else call.dtype
        layered = LayeredCall(call, partial_dtype, timeout, blocks)
        share = self._share(call, partial_dtype)
        whole = call.count // share.unit * share.unit
        make = SLICE_MAKERS[call.collective]
        slices = [
            make(self._phases, layered, number, first, min(whole, first + share.step))
            for number, first in enumerate(range(0, whole, share.step))
        ]
        after = []
        if whole < call.count:
            after.append(rest(_remainder(call, whole)))
        self._phases.exchanges.load(timeout)
        body = partial(self._phases.exchanges.enqueue, slices, timeout)
        parts: list[Enqueue] = [hello.enqueue, body, *(staged.enqueue for staged in after)]

        def enqueue(stream: int) -> None:
            for part in parts:
                part(stream)

        return CudaNodesCall(call, enqueue, timeout)

    def _share(self, call: Call, partial_dtype: DType) -> _Share:
        """The elements of a segment in a slice."""
        align = max(1, ALIGN // call.dtype.itemsize)
        shared = call.collective in _SHARED
        width = self._phases.local_nranks if shared else 1
        pieces = self._phases.nnodes if call.collective in _PIECES else 1
        unit = width * pieces * align if shared else 1
        segments = self._phases.most_remote if call.collective in _DIRECT else self._phases.nnodes
        # Elements that a rank sends between nodes.
        each = call.count // width if shared else call.count * segments
        item = max(partial_dtype.itemsize, call.dtype.itemsize)
        share = min(self._phases.exchanges.limits.share, max(_SHORT, each * item // _FEW)) // item
        step = width * share if shared else share // segments
        return _Share(unit, max(unit, step // unit * unit))

    @property
    def nbytes(self) -> int:
        """Bytes of device memory for slices."""
        return self._phases.nbytes

    def close(self) -> None:
        """Free the device memory; nothing may be enqueued any more."""
        self._phases.close()


@dataclass(frozen=True, slots=True)
class _Share:
    """Elements: ``step`` in a slice, a multiple of ``unit``, the fewest that can be divided."""

    unit: int
    step: int


def _remainder(call: Call, first: int) -> Call:
    """A call with the elements from ``first`` on."""
    count, item = call.count - first, call.dtype.itemsize
    return replace(
        call,
        send=None if call.send is None else call.send[first:],
        recv=None if call.recv is None else call.recv[first:],
        count=count,
        nbytes=count * item,
        custom_signature=call.signature(),
    )
