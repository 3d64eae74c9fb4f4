"""ringcoll: collective communication for multiple GPUs, in Python that a person can read.

A collective is a plan: for every block of every rank, a short list of steps "wait for these
signals, reduce these sources into these destinations, post these signals". The plan that is
proven is the plan that is timed is the plan that runs.
"""

from __future__ import annotations

from ringcoll import interrupts

if interrupts.is_command():
    interrupts.begin()  # before the modules below are loaded

from typing import TYPE_CHECKING

from ringcoll import lazy
from ringcoll.version import __version__

if TYPE_CHECKING:
    from ringcoll.arguments.calls import ANY
    from ringcoll.bootstrap.tcp import unique_id
    from ringcoll.collectives import Collective
    from ringcoll.communicator.call_options import CallOptions
    from ringcoll.communicator.cpu.posted import Envelope
    from ringcoll.communicator.group import group
    from ringcoll.communicator.public import Communicator
    from ringcoll.communicator.setup.start import init, init_all, spawn
    from ringcoll.communicator.topology import Topology
    from ringcoll.communicator.work import Work
    from ringcoll.config import Config
    from ringcoll.cuda.raw import from_pointer
    from ringcoll.dtypes import premul_sum
    from ringcoll.errors import (
        AbortedError,
        ArgumentError,
        ArgumentTypeError,
        ClosedError,
        DeadlineError,
        Error,
        LauncherError,
        MachineError,
        MismatchError,
        OutOfMemory,
        PlanError,
        RankLostError,
        UsageError,
    )
    from ringcoll.plan import Block, Buffer, Chunk, Plan, Step
    from ringcoll.verifier.launches import prove
    from ringcoll.verifier.prover import verify

__all__ = [
    "ANY",
    "AbortedError",
    "ArgumentError",
    "ArgumentTypeError",
    "Block",
    "Buffer",
    "CallOptions",
    "Chunk",
    "ClosedError",
    "Collective",
    "Communicator",
    "Config",
    "DeadlineError",
    "Envelope",
    "Error",
    "LauncherError",
    "MachineError",
    "MismatchError",
    "OutOfMemory",
    "Plan",
    "PlanError",
    "RankLostError",
    "Step",
    "Topology",
    "UsageError",
    "Work",
    "__version__",
    "from_pointer",
    "group",
    "init",
    "init_all",
    "premul_sum",
    "prove",
    "spawn",
    "unique_id",
    "verify",
]

_HOMES = {
    "unique_id": "ringcoll.bootstrap.tcp",
    "ANY": "ringcoll.arguments.calls",
    "Collective": "ringcoll.collectives",
    "CallOptions": "ringcoll.communicator.call_options",
    "group": "ringcoll.communicator.group",
    "Envelope": "ringcoll.communicator.cpu.progress",
    "Communicator": "ringcoll.communicator.public",
    "init": "ringcoll.communicator.setup.start",
    "init_all": "ringcoll.communicator.setup.start",
    "spawn": "ringcoll.communicator.setup.start",
    "Topology": "ringcoll.communicator.topology",
    "Work": "ringcoll.communicator.work",
    "Config": "ringcoll.config",
    "premul_sum": "ringcoll.dtypes",
    "AbortedError": "ringcoll.errors",
    "ArgumentError": "ringcoll.errors",
    "ArgumentTypeError": "ringcoll.errors",
    "ClosedError": "ringcoll.errors",
    "DeadlineError": "ringcoll.errors",
    "Error": "ringcoll.errors",
    "LauncherError": "ringcoll.errors",
    "MachineError": "ringcoll.errors",
    "MismatchError": "ringcoll.errors",
    "OutOfMemory": "ringcoll.errors",
    "PlanError": "ringcoll.errors",
    "RankLostError": "ringcoll.errors",
    "UsageError": "ringcoll.errors",
    "Block": "ringcoll.plan",
    "Buffer": "ringcoll.plan",
    "Chunk": "ringcoll.plan",
    "Plan": "ringcoll.plan",
    "Step": "ringcoll.plan",
    "prove": "ringcoll.verifier.launches",
    "verify": "ringcoll.verifier.prover",
    "from_pointer": "ringcoll.cuda.raw",
}
"""Where each public name is; its module is loaded when it is first asked for."""

_MODULES = {
    "algorithms": "ringcoll.algorithms",
    "errors": "ringcoll.errors",
    "plan": "ringcoll.plan",
    "verifier": "ringcoll.verifier.launches",
}
"""Modules that the pages name, and that a call may have loaded or not."""


# torch loads this package in every process where both are installed, to register a backend: that
# must cost nothing and cannot fail.
__getattr__ = lazy.attributes(__name__, _HOMES, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
