"""The numpy definition of a plan: what every executor is tested against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.arithmetic import Reduction
from ringcoll.dtypes import Accumulate, ReduceOp, dtype_of, op_of
from ringcoll.errors import ArgumentError, IllegalStep
from ringcoll.labels import Label, labels
from ringcoll.launch import Layout
from ringcoll.lower.slices import split
from ringcoll.plan import Buffer, Chunk, Plan, walk

__all__ = ["compile_reduce", "run"]

Array = npt.NDArray[Any]


def run(
    plan: Plan,
    inputs: Sequence[Array | None],
    *,
    op: str | ReduceOp | Sequence[ReduceOp] = "sum",
    layout: Layout | None = None,
    accumulate: Accumulate = "wide",
) -> list[Array | None]:
    """Run a plan, lowered or not, on one array a rank.

    Args:
        plan: any plan; in place if its collective says so.
        inputs: the INPUT of every rank, flat; None where the collective gives a rank none.
        op: the operator of a reducing collective; a sequence gives each rank its own scalar.
        layout: where chunks lie; needed for unequal segments and for sliced plans.
        accumulate: "wide" rounds once, "dtype" rounds every partial that is stored.

    Returns:
        The OUTPUT of every rank, new arrays; None where a rank has none. Chunks that the plan
        does not write are zero out of place.

    Raises:
        ArgumentError: an input is missing or has the wrong size.
        IllegalStep: a step reads what nothing has written.
        Deadlock: from :func:`ringcoll.plan.walk`.

    """
    plan = split(plan)
    collective = plan.collective
    first = next((a for a in inputs if a is not None), np.empty(0, np.float32))
    dtype = replace(dtype_of(first.dtype), wide=accumulate == "wide")
    ops = [op_of(op)] * plan.nranks if isinstance(op, (str, ReduceOp)) else list(op)
    if layout is None:
        segments = max(1, collective.segments("INPUT"))
        if first.size % segments:
            raise ArgumentError(
                f"{collective}: inputs of {first.size} elements in {segments} segments"
            )
        layout = Layout(collective, (first.size // segments,))
    buffers = _buffers(plan, inputs, layout, dtype.numpy)
    written: dict[tuple[int, Buffer, int], Array] = {}

    def view(chunk: Chunk) -> Array:
        if not chunk.buffer.given:
            held = written.get((chunk.rank, chunk.buffer, chunk.index))
            if held is None:
                raise IllegalStep(f"{collective}: {chunk} is read before it is written")
            return held
        offset, count = layout.span(chunk.buffer, chunk.rank, chunk.index)
        return buffers[chunk.rank, chunk.buffer][offset : offset + count]

    found = dict(zip(map(id, (step for _, step in plan.order)), labels(plan), strict=True))
    for block, step in walk(plan):
        if not step.dsts:
            continue
        label = found[id(step)]
        srcs = [view(src) for src in step.srcs]
        width = dtype.partial if label.dst is Label.PARTIAL else dtype.numpy
        for dst in step.dsts:
            if not dst.buffer.given:
                written[dst.rank, dst.buffer, dst.index] = np.empty(len(srcs[0]), width)
        compile_reduce(
            srcs,
            [view(dst) for dst in step.dsts],
            op=ops[block.rank] if label.reduces else None,
            dtype=dtype,
            nranks=plan.nranks,
            raw=[kind is Label.RAW for kind in label.srcs],
            final=label.dst is Label.FINAL,
            loads=[ops[owner] for owner in label.owners],
        )()
    return [buffers.get((rank, Buffer.OUTPUT)) for rank in range(plan.nranks)]


def compile_reduce(
    srcs: Sequence[Array], dsts: Sequence[Array], **how: Any
) -> Callable[[], object]:
    """A closure that combines ``srcs`` and stores the result in each of ``dsts``."""
    return Reduction([src.dtype for src in srcs], dsts[0].dtype, **how).on(srcs, dsts)


def _buffers(
    plan: Plan, inputs: Sequence[Array | None], layout: Layout, dtype: np.dtype[Any]
) -> dict[tuple[int, Buffer], Array]:
    """INPUT and OUTPUT of every rank; in place, the smaller one is a view of the larger."""
    collective = plan.collective
    if len(inputs) != plan.nranks:
        raise ArgumentError(f"{collective}: {len(inputs)} inputs, one a rank is needed")
    buffers: dict[tuple[int, Buffer], Array] = {}
    for rank in range(plan.nranks):
        size = {b: _size(plan, layout, b, rank) for b in (Buffer.INPUT, Buffer.OUTPUT)}
        given = inputs[rank]
        if collective.has("INPUT", rank):
            if given is None or given.size != size[Buffer.INPUT]:
                seen = "None" if given is None else given.size
                raise ArgumentError(
                    f"{collective}: input of rank {rank}: seen {seen}, wanted {size[Buffer.INPUT]}"
                )
            buffers[rank, Buffer.INPUT] = given.ravel().copy()
        if collective.has("OUTPUT", rank):
            buffers[rank, Buffer.OUTPUT] = np.zeros(size[Buffer.OUTPUT], dtype)
            if collective.in_place and collective.has("INPUT", rank):
                _alias(plan, layout, buffers, rank)
    return buffers


def _size(plan: Plan, layout: Layout, buffer: Buffer, rank: int) -> int:
    if not plan.collective.has(buffer.name, rank):
        return 0
    last = plan.collective.segments(buffer.name) - 1
    return max(sum(layout.segment(buffer, rank, i)) for i in range(last + 1)) if last >= 0 else 0


def _alias(plan: Plan, layout: Layout, buffers: dict[tuple[int, Buffer], Array], rank: int) -> None:
    """One memory for both: the larger buffer, holding the input where it belongs."""
    source, target = buffers[rank, Buffer.INPUT], buffers[rank, Buffer.OUTPUT]
    if target.size > source.size:
        at, count = layout.segment(Buffer.OUTPUT, rank, rank)
        target[at : at + count] = source
        buffers[rank, Buffer.INPUT] = target[at : at + count]
    elif source.size > target.size:
        at, count = layout.segment(Buffer.INPUT, rank, rank)
        buffers[rank, Buffer.OUTPUT] = source[at : at + count]
    else:
        buffers[rank, Buffer.OUTPUT] = source
