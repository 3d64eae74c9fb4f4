"""Collectives on single tensors: in place, or from one input tensor to one output tensor.

Those on lists with a tensor for each rank are in :mod:`ringcoll.torch.list_collectives`. torch's
Python functions find these methods by name, and what is written in C++ (DDP's reducer, functional
collectives) by a table of the same names. The names of parameters are those of groups in C++.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceOptions,
    ReduceScatterOptions,
)

from ringcoll.errors import ArgumentError
from ringcoll.torch.base import GroupBase, first, paired
from ringcoll.torch.options import PLAIN, as_list, op_of, options
from ringcoll.torch.tensors import copy_back, dense, single, sparse_error
from ringcoll.torch.tracing import compile_disabled, profiler, profiler_event

__all__ = ["TensorCollectives"]

_KEPT_WORKS = 64
"""More calls on one element than programs make between a forward pass and its backward pass."""


@compile_disabled
class TensorCollectives(GroupBase):
    """``all_reduce``, ``reduce``, ``broadcast``, and the ``_single`` forms of the others."""

    def __init__(self, rank: int, nranks: int) -> None:
        super().__init__(rank, nranks)
        # DDP's join counts the remaining ranks, and keeps the Work in C++ alone, which waits for it
        # in the backward pass: without its Python half a Work never ends.
        self._kept_works: deque[Any] = deque(maxlen=_KEPT_WORKS)

    def allreduce(
        self,
        tensors: Any = None,
        opts: Any = None,
        timeout: Any = None,
        *,
        tensor: Any = None,
        op: Any = None,
    ) -> Any:
        """Reduce every rank's tensor elementwise, in place."""
        if self._start_in_bridge is not None:
            work = self._start_in_bridge(self, tensors, opts)
            if work is not None:
                return work
        if type(opts) is not AllreduceOptions:
            tensors = as_list(tensors, tensor)
            opts = options(AllreduceOptions, opts, timeout, op=op)
        op = PLAIN.get(hash(opts.reduceOp)) or op_of(opts.reduceOp)
        return self._in_place("all_reduce", tensors, op, 0, opts)

    def reduce(
        self,
        tensors: Any = None,
        opts: Any = None,
        op: Any = None,
        timeout: Any = None,
        *,
        tensor: Any = None,
        root: Any = None,
    ) -> Any:
        """Reduce every rank's tensor into the root's."""
        if type(opts) is not ReduceOptions:
            tensors = as_list(tensors, tensor)
            opts = options(ReduceOptions, opts, timeout, op=op, root=root)
        return self._in_place("reduce", tensors, op_of(opts.reduceOp), opts.rootRank, opts)

    def broadcast(
        self,
        tensors: Any = None,
        opts: Any = None,
        timeout: Any = None,
        *,
        tensor: Any = None,
        root: Any = None,
    ) -> Any:
        """Copy the root's tensor to all ranks."""
        if type(opts) is not BroadcastOptions:
            tensors = as_list(tensors, tensor)
            opts = options(BroadcastOptions, opts, timeout, root=root)
        return self._in_place("broadcast", tensors, None, opts.rootRank, opts)

    def _in_place(self, name: str, tensors: Sequence[Any], op: Any, root: int, opts: Any) -> Any:
        tensor = tensors[0] if len(tensors) == 1 else single(tensors, name)
        engine, async_op = self._engine(tensor, name), opts.asyncOp
        kept = engine.find_kept(name, tensor, op, root)
        if kept is None:
            if tensor.layout is not torch.strided:
                raise sparse_error(tensor, name)
            if not 0 <= root < self.size():
                raise ArgumentError(
                    f"{name} on rank {self._rank}: {'dst' if name == 'reduce' else 'src'}={root} "
                    f"is no rank of this group; pass one from 0 to {self.size() - 1}"
                )
        if kept or (tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())):
            call = engine.in_place_async if async_op else engine.in_place
            if not profiler._is_profiler_enabled:
                work = call(name, tensor, op, root, kept)
            else:
                with profiler_event(name):
                    work = call(name, tensor, op, root, kept)
            if async_op and tensor.numel() == 1:
                self._kept_works.append(work)
            return work

        receives = name == "all_reduce" or (name == "reduce") == (self._rank == root)

        def body() -> None:
            copy = dense(tensor, name)
            engine.call(name, copy, None, op, root)
            if receives:
                copy_back(tensor, copy)

        return self._run(
            name, engine, body, reads=tensors, writes=tensors, async_op=async_op, receives=receives
        )

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Any:
        """:meth:`allreduce` of several tensors."""
        opts = options(AllreduceCoalescedOptions, opts)
        op = op_of(opts.reduceOp)
        engine = self._engine(first(tensors, "all_reduce_coalesced"), "all_reduce_coalesced")

        def body() -> None:
            for tensor in tensors:
                copy = dense(tensor, "all_reduce")
                engine.call("all_reduce", copy, None, op)
                copy_back(tensor, copy)

        return self._run(
            "all_reduce", engine, body, reads=tensors, writes=tensors, async_op=opts.asyncOp
        )

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Concatenate every rank's input in the output of all ranks."""
        return self._gathered((output,), (input,), opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        """:meth:`all_gather_single` of several pairs of tensors: a call each, with one Work."""
        return self._gathered(outputs, inputs, opts)

    def _gathered(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any) -> Any:
        engine = self._engine(first(inputs, "all_gather"), "all_gather")
        opts, pairs = options(AllgatherOptions, opts), paired(outputs, inputs, "all_gather")

        def body() -> None:
            for output, input_ in pairs:
                copy = dense(output, "all_gather")
                engine.call("all_gather", dense(input_, "all_gather"), copy)
                copy_back(output, copy)

        return self._run(
            "all_gather", engine, body, reads=inputs, writes=outputs, async_op=opts.asyncOp
        )

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Reduce every rank's input; rank r gets segment r."""
        return self._scattered((output,), (input,), opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        """:meth:`reduce_scatter_single` of several pairs of tensors: a call each, with one Work."""
        return self._scattered(outputs, inputs, opts)

    def _scattered(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any) -> Any:
        engine = self._engine(first(inputs, "reduce_scatter"), "reduce_scatter")
        opts, pairs = options(ReduceScatterOptions, opts), paired(outputs, inputs, "reduce_scatter")
        op = op_of(opts.reduceOp)

        def body() -> None:
            for output, input_ in pairs:
                copy = dense(output, "reduce_scatter")
                engine.call("reduce_scatter", dense(input_, "reduce_scatter"), copy, op)
                copy_back(output, copy)

        return self._run(
            "reduce_scatter", engine, body, reads=inputs, writes=outputs, async_op=opts.asyncOp
        )

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: Any = None,
    ) -> Any:
        """Send part q of the input to rank q; the parts are equal, or have the given rows."""
        if type(opts) is not AllToAllOptions:
            opts = options(AllToAllOptions, opts, timeout)
        engine = self._engine(input, "all_to_all")
        if not output_split_sizes and not input_split_sizes:

            def body() -> None:
                copy = dense(output, "all_to_all")
                engine.call("all_to_all", dense(input, "all_to_all"), copy)
                copy_back(output, copy)

        else:
            sent = self._counts(input, input_split_sizes, "input")
            received = self._counts(output, output_split_sizes, "output")

            def body() -> None:
                copy = dense(output, "all_to_all")
                self._exchange(engine, dense(input, "all_to_all"), sent, copy, received)
                copy_back(output, copy)

        return self._run(
            "all_to_all", engine, body, reads=(input,), writes=(output,), async_op=opts.asyncOp
        )

    def _exchange(
        self, engine: Any, send: Any, sent: list[int], recv: Any, received: list[int]
    ) -> None:
        """all_to_all_v: no rank knows whether the parts of the others are equal."""
        if engine.takes(send, recv):
            engine.comm.all_to_all_v(send, sent, recv, received)
            return
        source, target = (engine.buffer(tensor, "all_to_all") for tensor in (send, recv))
        scale = source.size // max(1, send.numel()) if send.numel() else 1
        wide = target.size // max(1, recv.numel()) if recv.numel() else 1
        engine.comm.all_to_all_v(
            source,
            [count * scale for count in sent],
            target,
            [count * wide for count in received],
            **engine.stream_options(),
        )

    def _counts(self, tensor: Any, splits: Sequence[int], side: str) -> list[int]:
        """Elements for each rank, from rows of the first dimension."""
        if not tensor.dim():
            raise ArgumentError(
                f"ringcoll: all_to_all: {side} has no rows: pass a tensor of at least one dimension"
            )
        rows, n = tensor.size(0), self._nranks
        if not splits:
            if rows % n:
                raise ArgumentError(
                    f"ringcoll: all_to_all: {n} ranks do not divide the {rows} rows of {side}; "
                    f"pass {side}_split_sizes"
                )
            splits = [rows // n] * n
        if len(splits) != n or sum(splits) != rows:
            raise ArgumentError(
                f"ringcoll: all_to_all: {side}_split_sizes={list(splits)} must be {n} numbers "
                f"that add up to the {rows} rows of {side}"
            )
        width = tensor.numel() // rows if rows else 0
        return [int(split) * width for split in splits]

    # The names of torch before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
