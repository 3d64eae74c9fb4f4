"""torch's options of a call in ringcoll's terms: operators, element types and overloads.

Groups in C++ take shorter forms of their calls too, and DDP's Python uses them: a bare tensor
stands for a list of one; an operator, a root or a timeout for the options that hold it. Callers of
the usual form pay one check of the type of their options.
"""

from __future__ import annotations

from collections.abc import Mapping
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

from ringcoll.dtypes import DTYPES, DType, ReduceOp, premul_sum
from ringcoll.errors import ArgumentError, ArgumentTypeError

__all__ = ["PLAIN", "ROWS", "as_list", "op_of", "options"]

ROWS: Mapping[Any, DType] = {
    getattr(torch, row.name): row for row in DTYPES if hasattr(torch, row.name)
}
"""ringcoll's type of a torch dtype; other dtypes are moved as bytes and cannot be reduced."""

_NAMES = {
    "SUM": "sum",
    "AVG": "avg",
    "PRODUCT": "prod",
    "MIN": "min",
    "MAX": "max",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
}
_Kind = dist.ReduceOp.RedOpType
PLAIN: Mapping[int, str] = {
    hash(dist.ReduceOp(getattr(_Kind, theirs))): ours for theirs, ours in _NAMES.items()
}
"""Operators without a factor, by the hash of torch's, which differs for each kind: options create a
ReduceOp at every access, and comparing costs seven times as much."""


def op_of(given: Any) -> str | ReduceOp:
    """Ringcoll's operator for a ``torch.distributed.ReduceOp``.

    Raises:
        ArgumentError: ringcoll has no such operator.

    """
    plain = PLAIN.get(hash(given))
    if plain is not None:
        return plain
    return _with_factor(given)


def _with_factor(given: Any) -> ReduceOp:
    kind, factor = given.__getstate__()
    if kind == _Kind.PREMUL_SUM and factor is not None:
        return premul_sum(factor.item() if isinstance(factor, torch.Tensor) else factor)
    raise ArgumentError(
        f"ringcoll: unknown operator {kind}; pass one of {', '.join(_NAMES)} or PREMUL_SUM"
    )


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


def as_list(tensors: Any, tensor: Any = None) -> Any:
    """A list of tensors, from a list or a bare tensor; ``tensor`` was passed by keyword."""
    given = tensors if tensor is None else tensor
    return [given] if isinstance(given, torch.Tensor) else given


def options(
    kind: Any, given: Any, timeout: timedelta | None = None, *, op: Any = None, root: Any = None
) -> Any:
    """Options of a call.

    Args:
        kind: the type of the call's options.
        given: such options, or an overload's operator, root or timeout in their place, or None.
        timeout: of the call.
        op: the operator, passed by keyword or behind the root.
        root: the root, passed by keyword.

    Raises:
        ArgumentTypeError: ``given`` is none of these, the options of another call, or an option
            that this call does not have.

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
                f"where {kind.__name__} are needed"
            ) from None
    return made


def _stands_for(given: Any) -> str | None:
    """The name of the argument that is passed in place of the options."""
    if given is None:
        return None
    if isinstance(given, timedelta):
        return "timeout"
    return "op" if isinstance(given, _OPERATORS) else "root"
