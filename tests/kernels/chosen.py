"""What GPU ranks choose, with the memory and the launches of the kernels."""

from __future__ import annotations

from typing import Any

from ringcoll.arguments.calls import Call
from ringcoll.executors.cuda.kernel_body import KernelFits, gpu_ranks
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.model.machine import Machine
from ringcoll.tuner import Choice, Limits, choose


def chosen(
    call: Call,
    nranks: int,
    resident: int = 132,
    *,
    nvlink: bool = True,
    together: int = 1,
    known: Machine | None = None,
    **limits: Any,
) -> Choice:
    """The choice for GPUs with so many resident blocks."""
    workspace = Workspace(nranks)
    machine = gpu_ranks(workspace, resident, nvlink=nvlink, together=together, known=known)
    return choose(call, machine, Limits(**limits), KernelFits(workspace))
