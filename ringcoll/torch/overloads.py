"""The shorter shapes in which groups in C++ take their calls, too: DDP's Python uses them.

A bare tensor stands for a list of one; an operator, a root or a timeout for the options that hold
it. The callers of the usual shape pay one look at the type of their options.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from ringcoll.errors import ArgumentTypeError

__all__ = ["listed", "options"]

_OPERATORS = (dist.ReduceOp, dist.ReduceOp.RedOpType)
_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
_CALLS = {
    AllreduceOptions: "all_reduce",
    AllreduceCoalescedOptions: "all_reduce_coalesced",
    ReduceOptions: "reduce",
    BroadcastOptions: "broadcast",
    AllgatherOptions: "all_gather",
    ReduceScatterOptions: "reduce_scatter",
    GatherOptions: "gather",
    ScatterOptions: "scatter",
    AllToAllOptions: "all_to_all",
    BarrierOptions: "barrier",
}


def listed(tensors: Any, tensor: Any = None) -> Any:
    """A list of tensors.

    Args:
        tensors: the list, or a bare tensor.
        tensor: what was passed by this name.

    """
    given = tensors if tensor is None else tensor
    return [given] if isinstance(given, torch.Tensor) else given


def options(
    kind: Any, given: Any, timeout: timedelta | None = None, *, op: Any = None, root: Any = None
) -> Any:
    """Options of a call.

    Args:
        kind: what the usual shape of the call has.
        given: such options, or what stands in their place: an operator, a root, a timeout, None.
        timeout: of the call.
        op: the operator, where it was passed by its name or behind the root.
        root: the root, where it was passed by its name.

    Raises:
        ArgumentTypeError: ``given`` is none of these, or the options of another call, or the call
            has no such option.

    """
    if isinstance(given, kind):
        return given
    values = {"op": op, "root": root, "timeout": timeout}
    stands = _stands_for(given)
    if stands is not None:
        values[stands] = given
    made = kind()
    for argument, value in values.items():
        if value is None:
            continue
        try:
            getattr(made, _FIELDS[argument])
            setattr(made, _FIELDS[argument], value)
        except (AttributeError, TypeError):
            seen = type(value).__name__ if hasattr(value, "asyncOp") else repr(value)
            raise ArgumentTypeError(
                f"ringcoll: {_CALLS[kind]}: {'opts' if argument == stands else argument} is {seen} "
                f"where {kind.__name__} are wanted, or what stands for them"
            ) from None
    return made


def _stands_for(given: Any) -> str | None:
    """The argument in whose place something stands."""
    if given is None:
        return None
    if isinstance(given, timedelta):
        return "timeout"
    return "op" if isinstance(given, _OPERATORS) else "root"
