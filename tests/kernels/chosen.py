"""What GPU ranks choose, with the memory and the launches of the kernels."""

from __future__ import annotations

from typing import Any

from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.dtypes import dtype_of, op_of
from ringcoll.executors.cuda.kernel_body import KernelFits, gpu_ranks
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.launch import ALL_MAPPED
from ringcoll.model.machine import Machine
from ringcoll.plan import Buffer
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


def rooted(name, nranks=4, nbytes=64 << 20, mapped=None, together=1, *, in_place=False, **options):
    """A large call whose ranks reach each other's buffers: not what only the root has."""
    kind = COLLECTIVES[name]
    op = op_of("sum") if kind.reduces else None
    own = frozenset(buffer for buffer in Buffer if buffer.name.lower() == kind.rooted)
    count = nbytes // 4 // (nranks if "all" in (kind.input, kind.output) else 1)
    call = Call(name, 0, None, None, count, dtype_of("float32"), op, 0, in_place, nbytes)
    mapped = ALL_MAPPED - own if mapped is None else mapped
    return chosen(call, nranks, together=together, mapped=mapped, **options)
