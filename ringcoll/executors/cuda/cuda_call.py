"""A call that is prepared: chosen, compiled, bound to addresses; only the launch is left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringcoll.arguments.calls import Call
from ringcoll.executors.cuda.copy_launch import CopyLaunch
from ringcoll.executors.cuda.kernel_choice import KernelChoice
from ringcoll.executors.cuda.loader import Launchable
from ringcoll.executors.cuda.params import Addresses

__all__ = ["CudaCall", "StreamCall"]


@dataclass(slots=True, eq=False)
class CudaCall:
    """A checked call of one rank, and all that its launch needs but the stream.

    Args:
        terms: what ranks must agree on, in words.
        signature: of the terms, 32 bits.
        timeout: seconds that a wait of its kernels may take.
        launchable: None where ranks share a launch.

    """

    call: Call
    choice: KernelChoice
    terms: str
    signature: int
    number: int
    slot: int
    timeout: float
    at: Addresses
    changes: int
    launchable: Launchable | CopyLaunch | None


@dataclass(frozen=True, slots=True)
class StreamCall:
    """A call and the stream that it goes to.

    Args:
        stream: its handle.
        owned: whether somebody keeps the stream alive until it is followed no more.

    """

    ready: Any
    stream: int
    owned: bool = True

    @property
    def timeout(self) -> float:
        """Seconds that a wait of its kernels may take."""
        return float(self.ready.timeout)
