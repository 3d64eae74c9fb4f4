"""ringcoll: collective communication for multiple GPUs, in Python that a person can read.

A collective is a plan: for every block of every rank, a short list of steps "wait for these
signals, reduce these sources into these destinations, post these signals". The plan that is
proven is the plan that is timed is the plan that runs.
"""

from __future__ import annotations

import logging

__version__ = "0.1.0"

from ringcoll.collectives import Collective
from ringcoll.communicator.group import group
from ringcoll.communicator.public import Communicator
from ringcoll.communicator.start import init, init_all, spawn
from ringcoll.communicator.work import Work
from ringcoll.config import Config
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
from ringcoll.proof.prover import verify
from ringcoll.transports.cuda.raw import from_pointer

__all__ = [
    "AbortedError",
    "ArgumentError",
    "ArgumentTypeError",
    "Block",
    "Buffer",
    "Chunk",
    "ClosedError",
    "Collective",
    "Communicator",
    "Config",
    "DeadlineError",
    "Error",
    "LauncherError",
    "MachineError",
    "MismatchError",
    "OutOfMemory",
    "Plan",
    "PlanError",
    "RankLostError",
    "Step",
    "UsageError",
    "Work",
    "__version__",
    "from_pointer",
    "group",
    "init",
    "init_all",
    "premul_sum",
    "spawn",
    "verify",
]

logging.getLogger("ringcoll").addHandler(logging.NullHandler())
