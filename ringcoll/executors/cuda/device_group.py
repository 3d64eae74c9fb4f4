"""The ranks of a communicator by their devices: who shares a launch, and what all ranks have."""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringcoll.cuda.device import Device, joined_by_nvlink
from ringcoll.executors.contract import LaunchRequest
from ringcoll.executors.cuda.kernel_body import gpu_ranks
from ringcoll.executors.cuda.shared_launch import SharedLaunch
from ringcoll.executors.cuda.workspace import MOST_BLOCKS, Workspace
from ringcoll.fabric import Fabric
from ringcoll.transports.scratch import Transport
from ringcoll.tuner import GpuRanks

_IDENTITY = struct.Struct("<QQiiii16s")
"""Process, number of its shared launch, device, multiprocessors, capability, bus address."""

_shared_launches: dict[int, SharedLaunch[LaunchRequest]] = {}
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """What the ranks' devices have in common."""

    shared_launch: SharedLaunch[LaunchRequest]  # of the ranks of this device
    machine: GpuRanks  # what choices are made for, the same on all ranks
    alone: bool  # whether no process has several devices


def group_by_device(
    fabric: Fabric,
    device: Device,
    transport: Transport,
    workspace: Workspace,
    launch: Callable[[Sequence[LaunchRequest], int], None],
) -> DeviceGroup:
    """Group the ranks by device; collective. ``launch`` is for all ranks of this device."""
    mine = next(_numbers)
    capability = device.major, device.minor
    pci = device.pci.encode()
    sent = _IDENTITY.pack(os.getpid(), mine, device.ordinal, device.sms, *capability, pci)
    received = [
        _IDENTITY.unpack(part) for part in fabric.allgather(sent, what="the ranks' devices")
    ]
    ranks = [
        rank
        for rank, (pid, _, ordinal, *_) in enumerate(received)
        if (pid, ordinal) == (os.getpid(), device.ordinal)
    ]
    addresses = [each[6] for each in received]
    together = max(map(addresses.count, addresses))
    most = min(int(each[3]) for each in received) // together
    drivers = {(pid, ordinal) for pid, _, ordinal, *_ in received}
    alone = len(drivers) == len({pid for pid, _ in drivers})
    first = int(received[ranks[0]][1])
    if fabric.rank == ranks[0]:
        _shared_launches[first] = SharedLaunch(ranks, device.ordinal, launch, fabric.notify)
    # NVLink keeps lines of 128 bytes whole between GPUs of one kind, and from Hopper on.
    kinds = {(int(each[4]), int(each[5])) for each in received}
    alike = len(kinds) == 1 or min(kinds) >= (9, 0)
    peers = [bytes(address).rstrip(b"\0").decode() for address in addresses]
    nvlink = alike and transport == "p2p" and joined_by_nvlink(device.pci, peers)
    agreed = fabric.allgather(bytes([nvlink]), what="the ranks' devices")
    shared_launch = _shared_launches[first]
    fabric.allgather(b"", what="the ranks' devices")
    _shared_launches.pop(first, None)
    blocks = max(1, min(most, MOST_BLOCKS))
    joined = all(map(any, agreed))
    machine = gpu_ranks(workspace, blocks, nvlink=joined, together=together)
    return DeviceGroup(shared_launch, machine, alone)
