"""Which device the rank of a communicator has, as the benchmark uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringcoll.bench.devices import CpuDevice, Device
from ringcoll.errors import ArgumentError

if TYPE_CHECKING:
    from ringcoll.communicator.public import Communicator

__all__ = ["device_of"]


def device_of(comm: Communicator, graphs: int = 0) -> Device:
    """The device of a communicator's rank.

    Args:
        comm: of the rank.
        graphs: how often a CUDA graph of each block of calls is launched; 0: calls are eager.

    Raises:
        ArgumentError: graphs of CPU ranks.

    """
    if comm.device != "cpu":
        from ringcoll.bench.gpu import GpuDevice

        return GpuDevice(comm, graphs)
    if graphs:
        raise ArgumentError("-G: CPU ranks have no CUDA graphs; leave it out, or --device cuda")
    return CpuDevice()
