"""Calls on one large tensor, which has a part for each rank, and a small one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from ringcoll.torch.calling import Calling, first, paired
from ringcoll.torch.ops import op_of
from ringcoll.torch.overloads import options
from ringcoll.torch.tensors import dense, put_back
from ringcoll.torch.untraced import untraced

__all__ = ["Singles"]


@untraced
class Singles(Calling):
    """``all_gather_single`` and ``reduce_scatter_single``, and several of them in one call."""

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Every rank's input, one behind the other, in the output of all."""
        return self._gathered((output,), (input,), opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        """:meth:`all_gather_single` of several pairs of tensors."""
        return self._gathered(outputs, inputs, opts)

    def _gathered(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any) -> Any:
        engine, opts = self._engine(first(inputs, "all_gather")), options(AllgatherOptions, opts)
        pairs = paired(outputs, inputs, "all_gather")

        def body() -> None:
            for output, input_ in pairs:
                copy = dense(output, "all_gather")
                engine.call("all_gather", dense(input_, "all_gather"), copy)
                put_back(output, copy)

        return self._run(
            "all_gather", engine, body, reads=inputs, writes=outputs, later=opts.asyncOp
        )

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Combine every rank's input; rank r gets its segment r."""
        return self._scattered((output,), (input,), opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        """:meth:`reduce_scatter_single` of several pairs of tensors."""
        return self._scattered(outputs, inputs, opts)

    def _scattered(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any) -> Any:
        engine = self._engine(first(inputs, "reduce_scatter"))
        opts, pairs = options(ReduceScatterOptions, opts), paired(outputs, inputs, "reduce_scatter")
        op = op_of(opts.reduceOp)

        def body() -> None:
            for output, input_ in pairs:
                copy = dense(output, "reduce_scatter")
                engine.call("reduce_scatter", dense(input_, "reduce_scatter"), copy, op)
                put_back(output, copy)

        return self._run(
            "reduce_scatter", engine, body, reads=inputs, writes=outputs, later=opts.asyncOp
        )
