"""A prepared call of a GPU rank, with all but its launch: choice, kernel and addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringcoll.arguments.calls import Call
from ringcoll.executors.cuda.copy_launch import CopyLaunch
from ringcoll.executors.cuda.kernel_choice import KernelChoice
from ringcoll.executors.cuda.loader import Launchable
from ringcoll.executors.cuda.params import Addresses


@dataclass(slots=True, eq=False)
class CudaCall:
    """A checked call of one rank and its launch without a stream."""

    call: Call
    choice: KernelChoice
    signature_text: str  # what the ranks must agree on
    signature: int  # its digest in 32 bits
    number: int
    slot: int
    timeout: float  # seconds that a wait of its kernels may take
    at: Addresses
    changes: int
    launchable: Launchable | CopyLaunch | None  # None where ranks share a launch


@dataclass(frozen=True, slots=True)
class StreamCall:
    """A prepared call and its stream."""

    ready: Any
    stream: int
    owned: bool = True  # whether the caller keeps the stream alive until the next call

    @property
    def timeout(self) -> float:
        """Seconds that a wait of its kernels may take."""
        return float(self.ready.timeout)
