"""Calls that replace each rank's tensor by a result of the same shape."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    BroadcastOptions,
    ReduceOptions,
)

from ringcoll.torch.calling import Calling, first
from ringcoll.torch.ops import op_of
from ringcoll.torch.overloads import listed, options
from ringcoll.torch.profiled import profiler, recorded
from ringcoll.torch.tensors import dense, put_back, single, sparse
from ringcoll.torch.untraced import untraced

__all__ = ["InPlace"]

_COUNTS = 64
"""More calls on one element than a program makes between a forward pass and its backward pass."""


@untraced
class InPlace(Calling):
    """``all_reduce``, ``reduce`` and ``broadcast``."""

    def __init__(self, rank: int, nranks: int) -> None:
        super().__init__(rank, nranks)
        # DDP's join counts the ranks that are left, and hands the Work on to C++ alone, which waits
        # for it in the backward pass: without its half in Python a Work never ends.
        self._counted: deque[Any] = deque(maxlen=_COUNTS)

    def allreduce(
        self,
        tensors: Any = None,
        opts: Any = None,
        timeout: Any = None,
        *,
        tensor: Any = None,
        op: Any = None,
    ) -> Any:
        """Combine every rank's tensor elementwise, in place."""
        if type(opts) is not AllreduceOptions:
            tensors = listed(tensors, tensor)
            opts = options(AllreduceOptions, opts, timeout, op=op)
        return self._in_place("all_reduce", tensors, op_of(opts.reduceOp), 0, opts)

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
        """Combine every rank's tensor; the root's is replaced."""
        if type(opts) is not ReduceOptions:
            tensors = listed(tensors, tensor)
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
        """Copy the root's tensor to all."""
        if type(opts) is not BroadcastOptions:
            tensors = listed(tensors, tensor)
            opts = options(BroadcastOptions, opts, timeout, root=root)
        return self._in_place("broadcast", tensors, None, opts.rootRank, opts)

    def _in_place(self, name: str, tensors: Sequence[Any], op: Any, root: int, opts: Any) -> Any:
        tensor, later = single(tensors, name), opts.asyncOp
        engine = self._engine(tensor)
        if tensor.layout is not torch.strided:
            raise sparse(tensor, name)
        if tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj()):
            carry_out = engine.soon if later else engine.now
            if not profiler._is_profiler_enabled:
                work = carry_out(name, tensor, op, root)
            else:
                with recorded(name):
                    work = carry_out(name, tensor, op, root)
            if later and tensor.numel() == 1:
                self._counted.append(work)
            return work

        receives = name == "all_reduce" or (name == "reduce") == (self._rank == root)

        def body() -> None:
            copy = dense(tensor, name)
            engine.call(name, copy, None, op, root)
            if receives:
                put_back(tensor, copy)

        return self._run(
            name, engine, body, reads=tensors, writes=tensors, later=later, receives=receives
        )

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Any:
        """:meth:`allreduce` of several tensors."""
        opts = options(AllreduceCoalescedOptions, opts)
        op = op_of(opts.reduceOp)
        engine = self._engine(first(tensors, "all_reduce_coalesced"))

        def body() -> None:
            for tensor in tensors:
                copy = dense(tensor, "all_reduce")
                engine.call("all_reduce", copy, None, op)
                put_back(tensor, copy)

        return self._run(
            "all_reduce", engine, body, reads=tensors, writes=tensors, later=opts.asyncOp
        )
