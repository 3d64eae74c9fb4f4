"""Whole communicators of a machine whose pairs are not alike, with kernels that run on the CPU."""

from __future__ import annotations

import re

import numpy as np
import pytest

import ringcoll
from ringcoll.topology.document import Element, parse, write
from ringcoll.topology.presets import preset_document
from tests.gpu.ranks import close, together
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from tests.gpu.fake_gpus import FakeBuffer, fake

pytestmark = needs_compiler


def with_bus_ids(name: str, choice: list[int]) -> Element:
    """A machine some of whose GPUs have the bus ids of fake devices 0, 1, …"""
    document = preset_document(name)
    text, new = write(document), {}
    busids = [pci.get("busid") for pci in document.walk() if [*pci.named("gpu")]]
    for ordinal, gpu in enumerate(choice):
        new[busids[gpu]] = f"0000:{ordinal:02x}:00.0"
    for at, old in enumerate(busids):
        new.setdefault(old, f"0000:{0x70 + at:02x}:00.0")
    return parse(re.sub("|".join(new), lambda m: new[m[0]], text).encode(), name)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def comms(monkeypatch):
    """Ranks on GPUs 0, 3, 2 and 1 of a DGX-1 V100."""
    gpus = fake(monkeypatch, 4, sms=24)
    looked = []

    def detect(**_how):
        looked.append(1)
        return with_bus_ids("dgx1-v100", [0, 3, 2, 1])

    monkeypatch.setattr("ringcoll.topology.detect.detect", detect)
    made = ringcoll.init_all([0, 1, 2, 3], device="cuda", timeout=30)
    yield made
    close(made, failed=True)
    gpus.close()
    assert looked == [1], "one rank detects, once"


def test_ranks_find_their_gpus_and_go_along_rings(comms):
    topology = comms[0].topology
    assert all(comm.topology is topology for comm in comms)
    assert [gpu.rank for gpu in topology.system.gpus] == [0, 1, 2, 3]
    assert [gpu.busid[5:7] for gpu in topology.rings.gpus] == ["00", "01", "02", "03"]
    assert topology.machine.channels is not None and not topology.machine.all_pairs
    text = comms[1].explain("all_reduce", 1 << 20)
    assert "the clock on this machine's links" in text

    def work(comm):
        comm._settle()
        for count in (1, 50, 3001):
            data = np.arange(count) % 13
            for symmetric in (False, True):
                buffer = FakeBuffer(comm, data + comm.rank, symmetric=symmetric)
                comm.all_reduce(buffer.array, algorithm="ring")
                comm.broadcast(buffer.array, root=2, channels=2)
                comm.synchronize()
                buffer.check(4 * data + 6)

    together(comms, work)


def test_a_child_searches_among_its_members(comms):
    children = together(comms, lambda comm: comm.split(comm.rank // 2))
    names = [[gpu.busid[5:7] for gpu in child.topology.rings.gpus] for child in children]
    assert names == [["00", "01"]] * 2 + [["02", "03"]] * 2
    close(children, failed=True)


def test_ranks_that_share_a_gpu_know_no_machine(monkeypatch, caplog):
    gpus = fake(monkeypatch, 1, sms=24)
    caplog.set_level("INFO", logger="ringcoll")
    comms = ringcoll.init_all([0, 0], device="cuda", timeout=30)
    try:
        assert comms[1].topology.system is None and comms[1].topology.links is None
        said = "several ranks share the GPU 0000:00:00.0"
        assert said in str(comms[0].topology) and said in comms[1].explain("all_reduce", 4096)
        assert [r.getMessage() for r in caplog.records].count(f"init: unknown machine: {said}") == 1
    finally:
        close(comms, failed=True)
        gpus.close()


def test_ranks_in_host_memory_go_along_no_rings(monkeypatch):
    gpus = fake(monkeypatch, 2, sms=24)
    monkeypatch.setattr(
        "ringcoll.topology.detect.detect", lambda **_how: with_bus_ids("dgx1-v100", [0, 5])
    )
    comms = ringcoll.init_all([0, 1], device="cuda", transport="host", timeout=30)
    try:
        assert comms[0].topology.system is not None and comms[0].topology.machine is None
        assert "pinned host memory" in str(comms[1].topology)
        assert "pinned host memory" in comms[0].explain("all_reduce", 4096)
    finally:
        close(comms, failed=True)
        gpus.close()
