"""What torch.compile sees of ringcoll's calls: it breaks its graph there, and leaves them alone.

Code of Python is to it like any other, which it would follow to caches, locks and addresses.
``torch.compiler.disable`` would load torch._dynamo, which takes seconds, and wrap every call; the
marks that it leaves are enough, and a call costs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FunctionType
from typing import Any

__all__ = ["break_graphs_at", "leave_alone"]


def leave_alone(functions: Iterable[FunctionType]) -> None:
    """Let torch's compiler skip frames of these functions, and those that they call."""
    if "torch" not in sys.modules:
        return
    try:
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    except ImportError:  # torch before 2.7, built without the compiler, or just being imported
        return
    alone = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for function in functions:
        set_code_exec_strategy(function.__code__, alone)


def break_graphs_at(functions: Iterable[FunctionType]) -> None:
    """Let a graph end before a call of these functions, and begin anew behind it."""
    for function in functions:
        marked: Any = function
        marked._torchdynamo_disable = True
        marked._torchdynamo_disable_msg = "calls of ringcoll run outside of graphs"
