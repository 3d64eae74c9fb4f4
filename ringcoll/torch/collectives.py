"""The collectives of a group, in the shapes by which torch calls them.

torch's Python functions find these methods by name, and what is written in C++ (DDP's reducer,
functional collectives) by a table of the same names. Lists hold one entry for each device that a
rank has: always one here. The names of parameters are those of groups in C++.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from ringcoll.errors import ArgumentError
from ringcoll.torch.ops import op_of
from ringcoll.torch.overloads import listed, options
from ringcoll.torch.profiled import profiler, recorded
from ringcoll.torch.tensors import dense, flat_of, put_back, single, sparse, spread
from ringcoll.torch.untraced import untraced

__all__ = ["Collectives"]

_COUNTS = 64
"""More calls on one element than a program makes between a forward pass and its backward pass."""

# What torch's own callers leave out. A group may be called without any of its Python functions.
_ALL_REDUCE = AllreduceOptions()
_ALL_GATHER = AllgatherOptions()
_REDUCE_SCATTER = ReduceScatterOptions()


@untraced
class Collectives(dist.ProcessGroup):  # type: ignore[misc]
    """The collectives, for a group that says which engine serves a tensor."""

    _nranks: int
    _rank: int

    def __init__(self, rank: int, nranks: int) -> None:
        super().__init__(rank, nranks)
        # DDP's join counts the ranks that are left, and hands the Work on to C++ alone, which waits
        # for it in the backward pass: without its half in Python a Work never ends.
        self._counted: deque[Any] = deque(maxlen=_COUNTS)

    @abstractmethod
    def _engine(self, tensor: Any) -> Any:
        """Who carries out calls on tensors of this device."""

    def _run(
        self,
        name: str,
        engine: Any,
        body: Callable[[], None],
        *,
        reads: Sequence[Any] = (),
        writes: Sequence[Any] = (),
        later: bool,
    ) -> Any:
        """Let an engine carry out a call; torch's profiler is told if it runs."""
        if not profiler._is_profiler_enabled:
            return engine.run(body, reads=reads, writes=writes, later=later)
        with recorded(name):
            return engine.run(body, reads=reads, writes=writes, later=later)

    # -- in place -------------------------------------------------------------------------------

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

        def body() -> None:
            copy = dense(tensor, name)
            engine.call(name, copy, None, op, root)
            put_back(tensor, copy)

        return self._run(name, engine, body, reads=tensors, writes=tensors, later=later)

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Any:
        """:meth:`allreduce` of several tensors."""
        opts = opts or _ALL_REDUCE
        op = op_of(opts.reduceOp)
        engine = self._engine(_first(tensors, "all_reduce_coalesced"))

        def body() -> None:
            for tensor in tensors:
                copy = dense(tensor, "all_reduce")
                engine.call("all_reduce", copy, None, op)
                put_back(tensor, copy)

        return self._run(
            "all_reduce", engine, body, reads=tensors, writes=tensors, later=opts.asyncOp
        )

    # -- one large and one small tensor -----------------------------------------------------------

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Every rank's input, one behind the other, in the output of all."""
        return self._gathered((output,), (input,), opts or _ALL_GATHER)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        """:meth:`all_gather_single` of several pairs of tensors."""
        return self._gathered(outputs, inputs, opts or _ALL_GATHER)

    def _gathered(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any) -> Any:
        engine = self._engine(_first(inputs, "all_gather"))

        def body() -> None:
            for output, input_ in zip(outputs, inputs, strict=True):
                copy = dense(output, "all_gather")
                engine.call("all_gather", dense(input_, "all_gather"), copy)
                put_back(output, copy)

        return self._run(
            "all_gather", engine, body, reads=inputs, writes=outputs, later=opts.asyncOp
        )

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Combine every rank's input; rank r gets its segment r."""
        return self._scattered((output,), (input,), opts or _REDUCE_SCATTER)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        """:meth:`reduce_scatter_single` of several pairs of tensors."""
        return self._scattered(outputs, inputs, opts or _REDUCE_SCATTER)

    def _scattered(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any) -> Any:
        engine = self._engine(_first(inputs, "reduce_scatter"))
        op = op_of(opts.reduceOp)

        def body() -> None:
            for output, input_ in zip(outputs, inputs, strict=True):
                copy = dense(output, "reduce_scatter")
                engine.call("reduce_scatter", dense(input_, "reduce_scatter"), copy, op)
                put_back(output, copy)

        return self._run(
            "reduce_scatter", engine, body, reads=inputs, writes=outputs, later=opts.asyncOp
        )

    # -- a list and a tensor --------------------------------------------------------------------

    def allgather(
        self,
        output_tensors: Any,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: Any = None,
        *,
        input_tensor: Any = None,
    ) -> Any:
        """Every rank's tensor in a list of all; their sizes may differ."""
        if type(opts) is not AllgatherOptions:
            output_tensors, input_tensors = _lists(output_tensors, input_tensors, input_tensor)
            opts = options(AllgatherOptions, opts, timeout)
        given = single(input_tensors, "all_gather")
        parts = self._list(output_tensors, "all_gather")
        counts = [part.numel() for part in parts]
        engine = self._engine(given)

        def body() -> None:
            flat, own = flat_of(parts, "all_gather", filled=False)
            send = dense(given, "all_gather")
            if len(set(counts)) == 1:
                engine.call("all_gather", send, flat)
            else:
                sent, received = (engine.buffer(t, "all_gather") for t in (send, flat))
                engine.comm.all_gather_v(sent, received, counts, **engine.how())
            if not own:
                spread(flat, parts)

        return self._run(
            "all_gather", engine, body, reads=input_tensors, writes=parts, later=opts.asyncOp
        )

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        """Several tensors of every rank; list r of the outputs is what rank r has given."""
        opts = opts or _ALL_GATHER
        engine = self._engine(_first(inputs, "all_gather_coalesced"))
        rows = [list(row) for row in outputs]
        if len(rows) != self._nranks or any(len(row) != len(inputs) for row in rows):
            raise ArgumentError(
                f"ringcoll: all_gather_coalesced takes {self._nranks} lists of {len(inputs)} "
                f"tensors as outputs, one list for each rank"
            )

        def body() -> None:
            for number, given in enumerate(inputs):
                parts = [row[number] for row in rows]
                flat, own = flat_of(parts, "all_gather", filled=False)
                engine.call("all_gather", dense(given, "all_gather"), flat)
                if not own:
                    spread(flat, parts)

        written = [tensor for row in rows for tensor in row]
        return self._run(
            "all_gather", engine, body, reads=inputs, writes=written, later=opts.asyncOp
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
        """Combine every rank's list; rank r gets its tensor r. The sizes may differ."""
        if type(opts) is not ReduceScatterOptions:
            input_tensors, output_tensors = _lists(
                input_tensors if input is None else input, output_tensors, output
            )
            opts = options(ReduceScatterOptions, opts, timeout, op=op)
        result = single(output_tensors, "reduce_scatter")
        parts = self._list(input_tensors, "reduce_scatter")
        counts = [part.numel() for part in parts]
        engine, op = self._engine(result), op_of(opts.reduceOp)

        def body() -> None:
            flat, _ = flat_of(parts, "reduce_scatter", filled=True)
            copy = dense(result, "reduce_scatter")
            if len(set(counts)) == 1:
                engine.call("reduce_scatter", flat, copy, op)
            else:
                sent, received = (
                    engine.buffer(t, "reduce_scatter", reduces=True) for t in (flat, copy)
                )
                engine.comm.reduce_scatter_v(sent, received, counts, op, **engine.how())
            put_back(result, copy)

        return self._run(
            "reduce_scatter", engine, body, reads=parts, writes=output_tensors, later=opts.asyncOp
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
        """The root gets every rank's tensor in a list."""
        if type(opts) is not GatherOptions:
            output_tensors, input_tensors = _lists(output_tensors, input_tensors, input_tensor)
            opts = options(GatherOptions, opts, timeout, root=root)
        given, root = single(input_tensors, "gather"), opts.rootRank
        parts = self._list(output_tensors, "gather") if root == self._rank else []
        engine = self._engine(given)

        def body() -> None:
            send = dense(given, "gather")
            if not parts:
                engine.call("gather", send, None, None, root)
                return
            flat, own = flat_of(parts, "gather", filled=False)
            engine.call("gather", send, flat, None, root)
            if not own:
                spread(flat, parts)

        return self._run(
            "gather", engine, body, reads=input_tensors, writes=parts, later=opts.asyncOp
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
        engine = self._engine(result)

        def body() -> None:
            flat = flat_of(parts, "scatter", filled=True)[0] if parts else None
            copy = dense(result, "scatter")
            engine.call("scatter", flat, copy, None, root)
            put_back(result, copy)

        return self._run(
            "scatter", engine, body, reads=parts, writes=output_tensors, later=opts.asyncOp
        )

    def _list(self, lists: Sequence[Sequence[Any]], name: str) -> list[Any]:
        tensors = list(single(lists, name))
        if len(tensors) != self._nranks:
            raise ArgumentError(
                f"ringcoll: {name} takes a list of {self._nranks} tensors, one for each rank, "
                f"not {len(tensors)}"
            )
        return tensors

    # -- all to all -------------------------------------------------------------------------------

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: Any = None,
    ) -> Any:
        """Part q of the input goes to rank q; the parts are equal, or of so many rows."""
        if type(opts) is not AllToAllOptions:
            opts = options(AllToAllOptions, opts, timeout)
        engine = self._engine(input)
        if not output_split_sizes and not input_split_sizes:

            def body() -> None:
                copy = dense(output, "all_to_all")
                engine.call("all_to_all", dense(input, "all_to_all"), copy)
                put_back(output, copy)

        else:
            sent = self._counts(input, input_split_sizes, "input")
            received = self._counts(output, output_split_sizes, "output")

            def body() -> None:
                copy = dense(output, "all_to_all")
                self._exchange(engine, dense(input, "all_to_all"), sent, copy, received)
                put_back(output, copy)

        return self._run(
            "all_to_all", engine, body, reads=(input,), writes=(output,), later=opts.asyncOp
        )

    def alltoall(
        self,
        output_tensors: Sequence[Any],
        input_tensors: Sequence[Any],
        opts: Any = None,
        timeout: Any = None,
    ) -> Any:
        """Tensor q of the inputs goes to rank q; the sizes may differ."""
        if type(opts) is not AllToAllOptions:
            opts = options(AllToAllOptions, opts, timeout)
        sources = self._list([input_tensors], "all_to_all")
        targets = self._list([output_tensors], "all_to_all")
        engine = self._engine(sources[0])

        def body() -> None:
            send, _ = flat_of(sources, "all_to_all", filled=True)
            recv, own = flat_of(targets, "all_to_all", filled=False)
            sent, received = ([part.numel() for part in parts] for parts in (sources, targets))
            self._exchange(engine, send, sent, recv, received)
            if not own:
                spread(recv, targets)

        return self._run(
            "all_to_all", engine, body, reads=sources, writes=targets, later=opts.asyncOp
        )

    def _exchange(
        self, engine: Any, send: Any, sent: list[int], recv: Any, received: list[int]
    ) -> None:
        """Nobody knows of the others whether their parts are equal, so all send in pairs."""
        source, target = (engine.buffer(tensor, "all_to_all") for tensor in (send, recv))
        scale = source.size // max(1, send.numel()) if send.numel() else 1
        wide = target.size // max(1, recv.numel()) if recv.numel() else 1
        engine.comm.all_to_all_v(
            source,
            [count * scale for count in sent],
            target,
            [count * wide for count in received],
            **engine.how(),
        )

    def _counts(self, tensor: Any, splits: Sequence[int], side: str) -> list[int]:
        """Elements for each rank, from rows of the first dimension."""
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
                f"whose sum is the {rows} rows of {side}"
            )
        width = tensor.numel() // rows if rows else 0
        return [int(split) * width for split in splits]

    # The names of torch before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _first(tensors: Sequence[Any], name: str) -> Any:
    """The tensor by whose device a call of several goes."""
    if not tensors:
        raise ArgumentError(f"ringcoll: {name} of no tensors; pass one at least")
    return tensors[0]


def _lists(tensors: Any, one: Any, named: Any) -> tuple[Any, Any]:
    """A list of lists and a list of one, given so or as a list and a bare tensor."""
    bare = isinstance(one if named is None else named, torch.Tensor)
    return ([tensors] if bare else tensors), listed(one, named)
