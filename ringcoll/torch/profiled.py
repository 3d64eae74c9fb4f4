"""Events of a group's calls for torch's profiler, which sees nothing of what it is not told."""

from __future__ import annotations

from typing import Any

from torch.autograd import profiler

__all__ = ["profiler", "recorded"]


def recorded(name: str) -> Any:
    """An event, from entering to leaving it; to be made while ``profiler._is_profiler_enabled``.

    It spans what the caller's thread does for a call, as NCCL's do. One that another thread ended,
    when the call ends there, might end when the profiler has let go of its memory.

    Args:
        name: of the call, as the other backends have it.

    """
    return profiler.record_function(f"ringcoll:{name}")
