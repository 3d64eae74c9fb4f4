"""Calls by which every rank sends a part to every other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import AllToAllOptions

from ringcoll.errors import ArgumentError
from ringcoll.torch.calling import Calling
from ringcoll.torch.overloads import options
from ringcoll.torch.tensors import dense, flat_of, put_back, spread
from ringcoll.torch.untraced import untraced

__all__ = ["Exchanges"]


@untraced
class Exchanges(Calling):
    """``all_to_all``, of one tensor in parts or of a list."""

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
        if not tensor.dim():
            raise ArgumentError(f"ringcoll: all_to_all: {side} has no rows: it is one number")
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
