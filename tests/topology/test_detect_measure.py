"""From timed copies to bandwidths, and the copies themselves on a runtime that only reckons."""

# Methods and constants are CuPy's, and so are their names.
# ruff: noqa: N802, N815

import math
import sys
import types
from collections import defaultdict

import pytest

from ringcoll.errors import MachineError
from ringcoll.topology.build import build
from ringcoll.topology.detect import document_of, measure
from ringcoll.topology.detect.rates import Rates, with_rates
from ringcoll.topology.document import parse
from ringcoll.topology.system import LinkKind, Source
from tests.topology.replay import direct, only, vm_facts

GPUS = [f"GPU/{n}" for n in range(8)]


def vm(count=8):
    return build(document_of(only(vm_facts(), range(count))))


def shifts(nranks, rate):
    """Ring shifts where ``rate`` of sender, receiver and shift is carried."""
    return [
        {
            (f"GPU/{n}", f"GPU/{(n + s) % nranks}"): float(rate(n, (n + s) % nranks, s))
            for n in range(nranks)
        }
        for s in range(1, nranks)
    ]


def link(system, src, dst):
    (found,) = (link for link in system.out[src] if link.dst == dst)
    return found


def test_what_agrees_changes_nothing():
    system = vm()
    assert with_rates(system, Rates(shifts=shifts(8, lambda *_: 385.0))) == system
    assert with_rates(system, Rates()) == system


def test_a_switch_carries_what_all_carry_at_once():
    seen = shifts(8, lambda a, _b, s: {4: 10, 2: 900}.get(s, 300) - a)
    system = with_rates(vm(), Rates(shifts=seen))
    for n, gpu in enumerate(GPUS):
        up, down = link(system, gpu, "NVS/0"), link(system, "NVS/0", gpu)
        assert (up.bandwidth, up.source) == (300 - n, Source.MEASURED)
        assert 293 <= down.bandwidth <= 300
        assert (up.count, up.nominal) == (18, pytest.approx(478.116))
        assert link(system, gpu, "CPU/?").source is Source.TABLE
    assert "16 of 16 directed links" in system.notes[-1]
    assert "0.79 to 0.81" in system.notes[-1]


def test_only_the_links_that_disagree_change():
    seen = shifts(4, lambda a, b, _s: 200 if 2 in (a, b) else 370)
    system = with_rates(vm(4), Rates(shifts=seen))
    changed = {(x.src, x.dst) for x in system.links if x.source is Source.MEASURED}
    assert changed == {("GPU/2", "NVS/0"), ("NVS/0", "GPU/2")}


def test_direct_links():
    facts = direct([f"000{n}:01:00.0" for n in range(3)], {(0, 1): 1, (1, 2): 1, (0, 2): 1})
    seen = shifts(3, lambda a, b, _s: 9 if {a, b} == {0, 1} else 18)
    system = with_rates(build(document_of(facts)), Rates(shifts=seen))
    rates = {(x.src, x.dst): x.bandwidth for x in system.links if x.kind is LinkKind.NVLINK}
    assert rates["GPU/0", "GPU/1"] == rates["GPU/1", "GPU/0"] == 9.0
    assert rates["GPU/1", "GPU/2"] == 18.0


TREE = b"""<system version="1">
<cpu numaid="0" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="106">
<pci busid="0000:10:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">
<pci busid="0000:11:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
<gpu dev="0" sm="80"/></pci>
<pci busid="0000:12:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
<gpu dev="1" sm="80"/></pci></pci></cpu>
<cpu numaid="1" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="106">
<pci busid="0000:20:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">
<pci busid="0000:21:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
<gpu dev="2" sm="80"/></pci>
<pci busid="0000:22:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
<gpu dev="3" sm="80"/></pci></pci></cpu></system>"""


def test_what_c2c_carries_is_measured_beside_pcie():
    tree = TREE.replace(b'sm="80"/>', b'sm="90"><c2c bw="44712" count="10"/></gpu>')
    system = build(parse(tree, "tree"))
    found = with_rates(system, Rates(shifts=shifts(4, lambda *_: 40.0)))
    assert {link.kind for link in system.out["GPU/0"]} == {LinkKind.C2C, LinkKind.PCI}
    for n in range(4):
        (up,) = (link for link in found.out[f"GPU/{n}"] if link.kind is LinkKind.C2C)
        assert (up.bandwidth, up.source) == (40.0, Source.MEASURED)


def socket(gpu):
    return gpu // 2


def test_shared_links_of_a_tree():
    """GPUs at 20 alone and in a socket; between sockets 16 in all: two copies get 8 each."""

    def rate(a, b, shift):
        crossing = sum(socket(n) == 0 != socket((n + shift) % 4) for n in range(4))
        return 20 if socket(a) == socket(b) else min(20, 16 / crossing)

    system = build(parse(TREE, "tree"))
    alone = {(f"GPU/{a}", f"GPU/{b}"): 16.0 for a in range(4) for b in range(4) if a != b}
    alone |= dict.fromkeys([("GPU/0", "GPU/1"), ("GPU/1", "GPU/0")], 20.0)
    found = with_rates(system, Rates(alone, shifts(4, rate)))
    assert link(found, "CPU/0", "CPU/1").bandwidth == 16.0
    assert link(found, "CPU/1", "CPU/0").bandwidth == 16.0
    assert link(found, "PCI/0000:10:00.0", "CPU/0").bandwidth == 16.0
    for gpu, switch in (("GPU/0", "PCI/0000:10:00.0"), ("GPU/2", "PCI/0000:20:00.0")):
        assert link(found, gpu, switch).bandwidth == 20.0
    assert "4 of 12 pairs of GPUs are slower when all send at once, down to 0.50" in found.notes[-1]


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"error {status}")
        self.status = status


class Clock:
    """A runtime whose copies take the time of ``rate``; every stream has a clock of its own."""

    is_hip = False
    memcpyDeviceToDevice = 3
    streamNonBlocking = 1
    CUDARuntimeError = CUDARuntimeError

    def __init__(self, busids, rate):
        self.busids, self.rate = busids, rate
        self.current = 0
        self.alive = {}
        self.times = defaultdict(float)
        self.enabled = set()
        self.copies = []
        self.held = 0.0

    def _new(self, kind):
        self.alive[len(self.alive) + 1000] = (kind, self.current)
        return len(self.alive) + 999

    def _free(self, thing, kind):
        assert self.alive[thing] == (kind, self.current), "freed on another device"
        self.alive[thing] = None

    def __getattr__(self, name):
        made = {"malloc": "memory", "streamCreateWithFlags": "stream", "eventCreate": "event"}
        gone = {"free": "memory", "streamDestroy": "stream", "eventDestroy": "event"}
        if name in made:
            return lambda *_: self._new(made[name])
        if name in gone:
            return lambda thing: self._free(thing, gone[name])
        raise AttributeError(name)

    def getDeviceCount(self):
        return len(self.busids)

    def getDevice(self):
        return self.current

    def setDevice(self, ordinal):
        self.current = ordinal

    def deviceGetByPCIBusId(self, busid):
        if busid not in self.busids:
            raise CUDARuntimeError(101)
        return self.busids.index(busid)

    def deviceCanAccessPeer(self, a, b):
        return self.rate(a, b) > 0

    def deviceEnablePeerAccess(self, peer):
        if (self.current, peer) in self.enabled:
            raise CUDARuntimeError(704)
        self.enabled.add((self.current, peer))

    def _on(self, event, stream):
        assert self.alive[event] == ("event", self.alive[stream][1]), "another device's event"

    def eventRecord(self, event, stream):
        self._on(event, stream)
        self.times[event] = self.times[stream]

    def streamWaitEvent(self, stream, event, _flags):
        self.times[stream] = max(self.times[stream], self.times[event])

    def eventSynchronize(self, event):
        assert self.times[event] > 0

    def eventElapsedTime(self, start, end):
        return (self.times[end] - self.times[start]) * 1e3

    def memcpyAsync(self, _target, _source, nbytes, _kind, stream):
        self.times[stream] += nbytes / 1e12
        self.held = self.times[stream]

    def memcpyPeerAsync(self, target, to, source, came, nbytes, stream):
        assert self.alive[target] == ("memory", to)
        assert self.alive[source] == ("memory", came)
        assert self.alive[stream] == ("stream", came)
        assert (came, to) in self.enabled
        assert 0 < nbytes <= 64 << 20
        assert self.times[stream] >= self.held, "sends before the others are ready"
        self.copies.append((came, to))
        self.times[stream] += nbytes / self.rate(came, to) / 1e9


@pytest.fixture
def clock(monkeypatch):
    def make(busids, rate):
        runtime = Clock(busids, rate)
        cupy, cuda = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
        cuda.runtime = runtime  # type: ignore[attr-defined]
        cupy.cuda = cuda  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
        return runtime

    return make


def test_measuring_a_machine(clock):
    system = vm(4)
    runtime = clock([gpu.busid for gpu in system.gpus], lambda a, b: 0 if a == b else 200 + 10 * a)
    runtime.current = 2
    found = measure(system)
    for n in range(4):
        up = link(found, f"GPU/{n}", "NVS/0")
        assert math.isclose(up.bandwidth, 200 + 10 * n, rel_tol=1e-6)
    assert set(runtime.copies) == {(a, b) for a in range(4) for b in range(4) if a != b}
    assert runtime.current == 2
    assert set(runtime.alive.values()) == {None}


def test_ordinals_are_found_by_bus_id(clock):
    system = vm(4)
    busids = [gpu.busid for gpu in reversed(system.gpus)]
    clock(busids, lambda a, b: 0 if a == b else 200 + 10 * a)
    found = measure(system)
    assert math.isclose(link(found, "GPU/0", "NVS/0").bandwidth, 230, rel_tol=1e-6)


def test_pairs_without_access_are_left_out(clock):
    system = vm(3)
    runtime = clock([gpu.busid for gpu in system.gpus], lambda a, b: 100 * ({a, b} == {0, 1}))
    found = measure(system)
    assert set(runtime.copies) == {(0, 1), (1, 0)}
    assert link(found, "GPU/2", "NVS/0").source is Source.TABLE
    assert math.isclose(link(found, "GPU/1", "NVS/0").bandwidth, 100, rel_tol=1e-6)


def test_gpus_that_the_process_does_not_see(clock):
    system = vm(3)
    clock([gpu.busid for gpu in system.gpus[1:]], lambda *_: 100.0)
    found = measure(system)
    assert "measured: 2 of 3 GPUs" in found.notes[-1]
    assert link(found, "GPU/0", "NVS/0").source is Source.TABLE
    assert link(found, "GPU/2", "NVS/0").source is Source.MEASURED
    runtime = clock([system.gpus[0].busid], lambda *_: 100.0)
    assert measure(system).links == system.links
    assert runtime.copies == []


def test_what_fails_is_the_machines_fault(clock, monkeypatch):
    system = vm(2)
    runtime = clock([gpu.busid for gpu in system.gpus], lambda *_: 100.0)

    def full(_nbytes):
        raise CUDARuntimeError(2)

    monkeypatch.setattr(runtime, "malloc", full, raising=False)
    with pytest.raises(MachineError, match="error 2"):
        measure(system)
    assert runtime.current == 0
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(MachineError, match="needs CuPy"):
        measure(system)
