"""What torch's compiler and profiler see of a group's calls.

torch.compile breaks its graph at them, as at the calls of groups in C++. A group in Python is to it
like any other code, which it would follow to streams, locks and addresses.
``torch.compiler.disable`` would load torch._dynamo, which takes seconds, and wrap every call; the
marks that it leaves are enough, and a call costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from types import FunctionType
from typing import Any, TypeVar

from torch.autograd import profiler

__all__ = ["compile_disabled", "profiler", "profiler_event"]

Kind = TypeVar("Kind", bound=type)

try:
    from torch._C._dynamo.eval_frame import (
        _FrameAction,
        _FrameExecStrategy,
        set_code_exec_strategy,
    )
except ImportError:  # torch before 2.7, or built without the compiler

    def _leave_alone(function: Any) -> None:
        pass

else:
    # Skip these frames and those that they call.
    _ALONE = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)

    def _leave_alone(function: Any) -> None:
        set_code_exec_strategy(function.__code__, _ALONE)


def compile_disabled(kind: Kind, *, simple: Collection[str] = ()) -> Kind:
    """Disable torch.compile in a class's own methods, not in inherited ones.

    ``simple`` methods only return a constant of the group, and may be part of a graph.
    """
    for found in vars(kind).values():
        if isinstance(found, property):
            _leave_alone(found.fget)
        elif isinstance(found, FunctionType):
            _leave_alone(found)
            if not found.__name__.startswith("_") and found.__name__ not in simple:
                marked: Any = found
                marked._torchdynamo_disable = True
                marked._torchdynamo_disable_msg = "calls of ringcoll run outside of graphs"
    return kind


def profiler_event(name: str) -> Any:
    """A context that records an event; call it only while ``profiler._is_profiler_enabled``.

    It spans the caller's thread, as NCCL's events do. An event that a worker thread ends might
    outlive the profiler's memory.
    """
    return profiler.record_function(f"ringcoll:{name}")
