"""What torch's compiler and profiler see of a group's calls; see :mod:`ringcoll.tracing` too.

torch.compile breaks its graph at them, as at the calls of groups in C++.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any, TypeVar

from torch.autograd import profiler

from ringcoll.tracing import break_graphs_at, leave_alone

__all__ = ["compile_disabled", "profiler", "profiler_event", "runs_outside_graphs"]

Kind = TypeVar("Kind", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])


def compile_disabled(kind: Kind, *, simple: Collection[str] = ()) -> Kind:
    """Disable torch.compile in a class's own methods, not in inherited ones.

    ``simple`` methods only return a constant of the group, and may be part of a graph.
    """
    own = vars(kind).values()
    methods = [found for found in own if isinstance(found, FunctionType)]
    getters = [found.fget for found in own if isinstance(found, property)]
    leave_alone([*methods, *(found for found in getters if isinstance(found, FunctionType))])
    break_graphs_at(
        found
        for found in methods
        if not found.__name__.startswith("_") and found.__name__ not in simple
    )
    return kind


def runs_outside_graphs(function: Function) -> Function:
    """Disable torch.compile in a function."""
    if isinstance(function, FunctionType):
        leave_alone([function])
        break_graphs_at([function])
    return function


def profiler_event(name: str) -> Any:
    """A context that records an event; call it only while ``profiler._is_profiler_enabled``.

    It spans the caller's thread, as NCCL's events do. An event that a worker thread ends might
    outlive the profiler's memory.
    """
    return profiler.record_function(f"ringcoll:{name}")
