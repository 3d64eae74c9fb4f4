"""torch's names of operators and element types in ringcoll's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ringcoll.dtypes import DTYPES, DType, ReduceOp, premul_sum
from ringcoll.errors import ArgumentError

__all__ = ["ROWS", "op_of"]

ROWS: Mapping[Any, DType] = {
    getattr(torch, row.name): row for row in DTYPES if hasattr(torch, row.name)
}
"""The row of a torch dtype; those without one are moved as bytes, and reduced by nobody."""

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
# By the hash, which tells the kinds apart: options make their ReduceOp anew at every look, and a
# comparison costs seven times as much.
_PLAIN: Mapping[int, str] = {
    hash(dist.ReduceOp(getattr(_Kind, theirs))): ours for theirs, ours in _NAMES.items()
}


def op_of(given: Any) -> str | ReduceOp:
    """The operator that torch's options name.

    Args:
        given: a ``torch.distributed.ReduceOp``, premul_sum's with its factor: a number, or a tensor
            of one element.

    Raises:
        ArgumentError: torch has added an operator that ringcoll does not know.

    """
    plain = _PLAIN.get(hash(given))
    if plain is not None:
        return plain
    return _with_factor(given)


def _with_factor(given: Any) -> ReduceOp:
    kind, factor = given.__getstate__()
    if kind == _Kind.PREMUL_SUM and factor is not None:
        return premul_sum(factor.item() if isinstance(factor, torch.Tensor) else factor)
    raise ArgumentError(
        f"ringcoll: {kind} is not an operator that it has; it has {', '.join(_NAMES)} and "
        f"PREMUL_SUM"
    )
