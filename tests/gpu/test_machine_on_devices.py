"""What communicators on real GPUs find of their machine, and that calls go by it."""

from __future__ import annotations

from typing import Any

import pytest

import ringcoll
from ringcoll.topology.busid import bus_id
from ringcoll.topology.paths import path_class
from ringcoll.topology.system import NvSwitch, PathClass
from tests.gpu.ranks import close, on, together


@pytest.fixture
def cuda():
    return pytest.importorskip("cupy").cuda.runtime


@pytest.mark.gpu
def test_ranks_of_one_gpu_have_no_links(cuda):
    comms = ringcoll.init_all([0, 0], device="cuda")
    try:
        assert comms[1].topology.system is None
        assert "several ranks share the GPU" in comms[0].topology.reason
        assert "the machine is not known" in comms[1].explain("all_reduce", 1 << 20)
    finally:
        close(comms)


@pytest.mark.multi_gpu
def test_ranks_find_their_machine(cuda):
    count = min(8, cuda.getDeviceCount())
    order = [*range(1, count), 0]
    comms = ringcoll.init_all(order, device="cuda")
    try:
        topology: Any = comms[0].topology
        assert topology.reason == "", str(topology)
        assert all(comm.topology == topology for comm in comms)
        busids = [gpu.busid for gpu in topology.system.gpus]
        assert busids == [bus_id(cuda.deviceGetPCIBusId(ordinal)) for ordinal in order]
        first, second = topology.system.gpus[:2]
        assert path_class(topology.system, first.name, second.name) is not PathClass.DIS
        assert topology.rings.bandwidth > 0 and topology.links.topology == "machine"
        if any(isinstance(node, NvSwitch) for node in topology.system.nodes):
            assert topology.machine.all_pairs and topology.machine.channels is None
        assert f"GPU{count - 1}" in str(topology)
        assert "machine: " in comms[0].explain("all_reduce", 1 << 20)

        def work(comm):
            with on(comm):
                right = []
                for how in ({}, {"algorithm": "ring"}, {"channels": 2}):
                    x = comm.xp.full(100_001, comm.rank + 1, "float32")
                    comm.all_reduce(x, **how)
                    comm.synchronize()
                    right.append(bool((x == count * (count + 1) // 2).all()))
                return right

        assert together(comms, work) == [[True] * 3] * count
        children = together(comms, lambda comm: comm.split(comm.rank % 2, -comm.rank))
        for comm, child in zip(comms, children, strict=True):
            part: Any = child.topology
            theirs = [gpu.busid for gpu in part.system.gpus]
            assert theirs == [busids[r] for r in range(count)[::-1] if r % 2 == comm.rank % 2]
        close(children)
    finally:
        close(comms)
