"""The shorter shapes in which groups in C++ take their calls, too: DDP's Python uses them.

A bare tensor stands for a list of one; an operator, a root or a timeout for the options that hold
it. The callers of the usual shape pay one look at the type of their options.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringcoll.errors import ArgumentTypeError

__all__ = ["listed", "options"]

_OPERATORS = (dist.ReduceOp, dist.ReduceOp.RedOpType)


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
        ArgumentTypeError: ``given`` is none of these, or the call has no such option.

    """
    if hasattr(given, "asyncOp"):
        return given
    if isinstance(given, timedelta):
        timeout = given
    elif isinstance(given, _OPERATORS):
        op = given
    elif given is not None:
        root = given
    made = kind()
    for name, value in (("reduceOp", op), ("rootRank", root), ("timeout", timeout)):
        if value is None:
            continue
        try:
            getattr(made, name)
            setattr(made, name, value)
        except (AttributeError, TypeError):
            raise ArgumentTypeError(
                f"ringcoll: {value!r} where {kind.__name__} are wanted, or what stands for them"
            ) from None
    return made
