"""Collectives on lists that hold a tensor for each rank.

Lists of lists hold one list for each device that a rank has: always one here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    GatherOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from ringcoll.errors import ArgumentError
from ringcoll.torch.base import first
from ringcoll.torch.options import as_list, op_of, options
from ringcoll.torch.tensor_collectives import TensorCollectives
from ringcoll.torch.tensors import copy_back, dense, flatten, gathered, single
from ringcoll.torch.tracing import compile_disabled

__all__ = ["Collectives"]


@compile_disabled
class Collectives(TensorCollectives):
    """``all_gather``, ``reduce_scatter``, ``gather``, ``scatter`` and ``all_to_all`` of lists."""

    def allgather(
        self,
        output_tensors: Any,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: Any = None,
        *,
        input_tensor: Any = None,
    ) -> Any:
        """Gather every rank's tensor into a list on all ranks; their sizes may differ."""
        if type(opts) is not AllgatherOptions:
            output_tensors, input_tensors = _lists(output_tensors, input_tensors, input_tensor)
            opts = options(AllgatherOptions, opts, timeout)
        given = single(input_tensors, "all_gather")
        parts = self._list(output_tensors, "all_gather")
        counts = [part.numel() for part in parts]
        engine = self._engine(given, "all_gather")

        def body() -> None:
            with gathered(parts, "all_gather") as flat:
                send = dense(given, "all_gather")
                if len(set(counts)) == 1:
                    engine.call("all_gather", send, flat)
                else:
                    sent, received = (engine.buffer(t, "all_gather") for t in (send, flat))
                    engine.comm.all_gather_v(sent, received, counts, **engine.stream_options())

        return self._run(
            "all_gather", engine, body, reads=input_tensors, writes=parts, async_op=opts.asyncOp
        )

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        """Gather several tensors of every rank; list r of the outputs holds rank r's."""
        opts = options(AllgatherOptions, opts)
        engine = self._engine(first(inputs, "all_gather_coalesced"), "all_gather_coalesced")
        rows = [list(row) for row in outputs]
        if len(rows) != self._nranks or any(len(row) != len(inputs) for row in rows):
            raise ArgumentError(
                f"ringcoll: all_gather_coalesced takes {self._nranks} lists of {len(inputs)} "
                f"tensors as outputs, one list for each rank"
            )

        def body() -> None:
            for number, given in enumerate(inputs):
                parts = [row[number] for row in rows]
                with gathered(parts, "all_gather") as flat:
                    engine.call("all_gather", dense(given, "all_gather"), flat)

        written = [tensor for row in rows for tensor in row]
        return self._run(
            "all_gather", engine, body, reads=inputs, writes=written, async_op=opts.asyncOp
        )

    def reduce_scatter(
        self,
        output_tensors: Any = None,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: Any = None,
        *,
        output: Any = None,
        input: Any = None,
        op: Any = None,
    ) -> Any:
        """Reduce the lists of all ranks; rank r gets tensor r. The sizes may differ."""
        if type(opts) is not ReduceScatterOptions:
            input_tensors, output_tensors = _lists(
                input_tensors if input is None else input, output_tensors, output
            )
            opts = options(ReduceScatterOptions, opts, timeout, op=op)
        result = single(output_tensors, "reduce_scatter")
        parts = self._list(input_tensors, "reduce_scatter")
        counts = [part.numel() for part in parts]
        engine, op = self._engine(result, "reduce_scatter"), op_of(opts.reduceOp)

        def body() -> None:
            flat, _ = flatten(parts, "reduce_scatter", filled=True)
            copy = dense(result, "reduce_scatter")
            if len(set(counts)) == 1:
                engine.call("reduce_scatter", flat, copy, op)
            else:
                sent, received = (
                    engine.buffer(t, "reduce_scatter", reduces=True) for t in (flat, copy)
                )
                engine.comm.reduce_scatter_v(sent, received, counts, op, **engine.stream_options())
            copy_back(result, copy)

        return self._run(
            "reduce_scatter",
            engine,
            body,
            reads=parts,
            writes=output_tensors,
            async_op=opts.asyncOp,
        )

    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: Any = None,
        *,
        input_tensor: Any = None,
        root: Any = None,
    ) -> Any:
        """Gather every rank's tensor into a list on the root."""
        if type(opts) is not GatherOptions:
            output_tensors, input_tensors = _lists(output_tensors, input_tensors, input_tensor)
            opts = options(GatherOptions, opts, timeout, root=root)
        given, root = single(input_tensors, "gather"), opts.rootRank
        parts = self._list(output_tensors, "gather") if root == self._rank else []
        engine = self._engine(given, "gather")

        def body() -> None:
            send = dense(given, "gather")
            if not parts:
                engine.call("gather", send, None, None, root)
                return
            with gathered(parts, "gather") as flat:
                engine.call("gather", send, flat, None, root)

        return self._run(
            "gather", engine, body, reads=input_tensors, writes=parts, async_op=opts.asyncOp
        )

    def scatter(
        self,
        output_tensors: Any = None,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: Any = None,
        *,
        output_tensor: Any = None,
        root: Any = None,
    ) -> Any:
        """Rank r gets tensor r of the root's list."""
        if type(opts) is not ScatterOptions:
            input_tensors, output_tensors = _lists(input_tensors, output_tensors, output_tensor)
            opts = options(ScatterOptions, opts, timeout, root=root)
        result, root = single(output_tensors, "scatter"), opts.rootRank
        parts = self._list(input_tensors, "scatter") if root == self._rank else []
        engine = self._engine(result, "scatter")

        def body() -> None:
            flat = flatten(parts, "scatter", filled=True)[0] if parts else None
            copy = dense(result, "scatter")
            engine.call("scatter", flat, copy, None, root)
            copy_back(result, copy)

        return self._run(
            "scatter", engine, body, reads=parts, writes=output_tensors, async_op=opts.asyncOp
        )

    def alltoall(
        self,
        output_tensors: Sequence[Any],
        input_tensors: Sequence[Any],
        opts: Any = None,
        timeout: Any = None,
    ) -> Any:
        """Send tensor q of the inputs to rank q; the sizes may differ."""
        if type(opts) is not AllToAllOptions:
            opts = options(AllToAllOptions, opts, timeout)
        sources = self._list([input_tensors], "all_to_all")
        targets = self._list([output_tensors], "all_to_all")
        engine = self._engine(sources[0], "all_to_all")

        def body() -> None:
            send, _ = flatten(sources, "all_to_all", filled=True)
            sent, received = ([part.numel() for part in parts] for parts in (sources, targets))
            with gathered(targets, "all_to_all") as recv:
                self._exchange(engine, send, sent, recv, received)

        return self._run(
            "all_to_all", engine, body, reads=sources, writes=targets, async_op=opts.asyncOp
        )


def _lists(tensors: Any, one: Any, named: Any) -> tuple[Any, Any]:
    """A list of lists and a list of one tensor, from these or from a list and a bare tensor."""
    bare = isinstance(one if named is None else named, torch.Tensor)
    return ([tensors] if bare else tensors), as_list(one, named)
