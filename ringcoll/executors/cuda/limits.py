"""What a choice is made from: the ranks' resources, the same on all, and the options of a call."""

from __future__ import annotations

from dataclasses import dataclass

from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.model.machine import Machine
from ringcoll.plan import Plan


@dataclass(frozen=True, slots=True)
class Resources:
    """What the ranks of a communicator have for a call, the same on all of them."""

    workspace: Workspace
    blocks: int  # CUDA blocks a rank that are resident at the same time
    nvlink: bool  # whether it joins all ranks, which LL128 requires
    together: int = 1  # the most ranks that share a launch
    machine: Machine | None = None  # its links and rings; None: all pairs are alike

    @property
    def nranks(self) -> int:
        """Of the communicator."""
        return self.workspace.nranks


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """The options of a call that decide what runs; None leaves it to the library."""

    algorithm: str | None = None
    protocol: str | None = None
    slices: int | None = None
    blocks: int | None = None  # CUDA blocks a rank, at most
    plan: Plan | None = None
    engine: str | None = None
    channels: int | None = None
    ordered: bool = False  # only algorithms that sum in rank order
    hellos_decide: bool = False  # the launch carries two programs; the hellos select one
