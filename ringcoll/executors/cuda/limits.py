"""By what GPU ranks choose: what they have, the same on all, and the options of a call."""

from __future__ import annotations

from dataclasses import dataclass

from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.model.machine import Machine
from ringcoll.plan import Plan

__all__ = ["KernelOptions", "Resources"]


@dataclass(frozen=True, slots=True)
class Resources:
    """What the ranks of a communicator have for a call, the same on all of them.

    Args:
        workspace: what must hold lines and SCRATCH.
        blocks: CUDA blocks a rank that are sure to run at the same time.
        nvlink: whether all ranks reach each other over it: only there is LL128 right.
        together: ranks that may share a launch, at most.
        machine: whose links and rings are known; None: every pair is taken for alike.

    """

    workspace: Workspace
    blocks: int
    nvlink: bool
    together: int = 1
    machine: Machine | None = None

    @property
    def nranks(self) -> int:
        """Of the communicator."""
        return self.workspace.nranks


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """The options of a call that decide what runs; None leaves it to the library.

    Args:
        blocks: CUDA blocks a rank, at most.
        hellos_decide: the launch carries two programs, and the hellos say which one runs.

    """

    algorithm: str | None = None
    protocol: str | None = None
    slices: int | None = None
    blocks: int | None = None
    plan: Plan | None = None
    engine: str | None = None
    channels: int | None = None
    ordered: bool = False
    hellos_decide: bool = False
