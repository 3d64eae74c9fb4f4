"""Timed copies between the GPUs of this process, to correct the bandwidths of links.

Copies of one pair do not show what pairs share, so all GPUs send at once, too. The GPUs should be
idle; it takes some tens of milliseconds, and 128 MiB of each GPU meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ringcoll.errors import MachineError
from ringcoll.folders import pip_install
from ringcoll.topology.detect.rates import Rates, with_rates
from ringcoll.topology.system import Gpu, System

_BUFFER = 64 << 20
_FIRST = 4 << 20
"""Bytes of the first copy of a pair, and of the second, which estimates its rate."""

_ALONE, _TOGETHER = 0.4e-3, 1e-3
"""Seconds that a pair's copies should take, alone and with all others."""

_TIMES = 2
"""How often all send at once; the faster time counts."""

_HEAD_START = 16
"""Copies within a GPU that delay all others until the host has enqueued them."""

_PEER_ACCESS_ALREADY_ENABLED = 704


def measure(system: System) -> System:
    """The system with measured bandwidths where they differ from the assumed ones by over 10 %.

    Bus ids must be this machine's. GPUs that this process does not see, and pairs without peer
    access, are left out.
    """
    try:
        from cupy.cuda import runtime
    except ImportError:
        raise MachineError(
            f"measure needs CuPy: {pip_install('cu13')}, or with a driver before 580 "
            f"{pip_install('cu12')}"
        ) from None
    try:
        return _measure(system, runtime)
    except RuntimeError as error:  # CuPy's errors are such
        raise MachineError(f"measure: a CUDA call failed: {error}") from error


def _measure(system: System, runtime: Any) -> System:
    """The same, given CuPy's wrapper of the runtime."""
    hosts = {gpu.host for gpu in system.gpus}
    here = [] if len(hosts) > 1 else list(_here(system.gpus, runtime))
    notes = []
    if len(here) < len(system.gpus):
        notes.append(
            f"measured: {len(here)} of {len(system.gpus)} GPUs, because this process sees no "
            f"others; check CUDA_VISIBLE_DEVICES"
        )
    if len(here) < 2:
        return replace(system, notes=(*system.notes, *notes))
    with _allocated(here, runtime) as bench:
        rates = bench.rates()
    measured = with_rates(system, rates)
    return replace(measured, notes=(*measured.notes, *notes))


def _here(gpus: Sequence[Gpu], runtime: Any) -> Iterator[tuple[str, int]]:
    """Name and ordinal of every GPU that this process sees."""
    seen = runtime.getDeviceCount()
    for gpu in gpus:
        try:
            ordinal = int(runtime.deviceGetByPCIBusId(gpu.busid))
        except runtime.CUDARuntimeError:
            continue
        if 0 <= ordinal < seen:
            yield gpu.name, ordinal


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """A GPU with its buffers to send from and receive into, its stream and its events.

    Copies of all GPUs wait for ``ready`` of the first; ``start`` and ``end`` enclose its own.
    """

    name: str
    ordinal: int
    source: int
    target: int
    stream: int
    ready: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Copy:
    """``times`` copies of ``nbytes`` from one GPU to another."""

    sender: _Endpoint
    receiver: _Endpoint
    nbytes: int
    times: int = 1


@contextmanager
def _allocated(here: Sequence[tuple[str, int]], runtime: Any) -> Iterator[_Bench]:
    """Memory, streams and events of these GPUs, freed at the end."""
    with ExitStack() as stack:
        stack.callback(runtime.setDevice, runtime.getDevice())
        devices = []
        for name, ordinal in here:
            runtime.setDevice(ordinal)

            def own(thing: int, free: Any, ordinal: int = ordinal) -> int:
                stack.callback(free, thing)
                stack.callback(runtime.setDevice, ordinal)  # called before ``free``
                return thing

            devices.append(
                _Endpoint(
                    name,
                    ordinal,
                    own(runtime.malloc(_BUFFER), runtime.free),
                    own(runtime.malloc(_BUFFER), runtime.free),
                    own(
                        runtime.streamCreateWithFlags(runtime.streamNonBlocking),
                        runtime.streamDestroy,
                    ),
                    *(own(runtime.eventCreate(), runtime.eventDestroy) for _ in range(3)),
                )
            )
        yield _Bench(runtime, devices)


class _Bench:
    """Times copies between these GPUs, by CuPy's wrapper of CUDA's runtime."""

    def __init__(self, runtime: Any, devices: Sequence[_Endpoint]) -> None:
        self._runtime = runtime
        self._devices = devices

    def rates(self) -> Rates:
        """All pairs alone, then all shifts."""
        pairs = [(a, b) for a in self._devices for b in self._devices if self._reaches(a, b)]
        alone = {(a.name, b.name): self._alone(a, b) for a, b in pairs}
        shifts = []
        for shift in range(1, len(self._devices)):
            copies = []
            for place, a in enumerate(self._devices):
                b = self._devices[(place + shift) % len(self._devices)]
                if (a.name, b.name) in alone:
                    copies.append(_sized(a, b, alone[a.name, b.name], _TOGETHER))
            if copies:
                shifts.append(max((self._time(copies) for _ in range(_TIMES)), key=_total))
        return Rates(alone, shifts)

    def _reaches(self, a: _Endpoint, b: _Endpoint) -> bool:
        """Whether one can access the other's memory; enables it."""
        if a is b or not self._runtime.deviceCanAccessPeer(a.ordinal, b.ordinal):
            return False
        self._runtime.setDevice(a.ordinal)
        try:
            self._runtime.deviceEnablePeerAccess(b.ordinal)
        except self._runtime.CUDARuntimeError as error:
            if error.status != _PEER_ACCESS_ALREADY_ENABLED:
                raise
        return True

    def _alone(self, a: _Endpoint, b: _Endpoint) -> float:
        """GB/s; the first copy sets up the path, the second estimates how much to copy."""
        pair = a.name, b.name
        self._time([_Copy(a, b, _FIRST)])
        about = self._time([_Copy(a, b, _FIRST)])[pair]
        return self._time([_sized(a, b, about, _ALONE)])[pair]

    def _time(self, copies: Sequence[_Copy]) -> dict[tuple[str, str], float]:
        """GB/s of copies that begin together."""
        cuda = self._runtime
        first = copies[0].sender
        cuda.setDevice(first.ordinal)
        if len(copies) > 1:
            for _ in range(_HEAD_START):
                cuda.memcpyAsync(
                    first.target, first.source, _BUFFER, cuda.memcpyDeviceToDevice, first.stream
                )
        cuda.eventRecord(first.ready, first.stream)
        for copy in copies:
            a, b = copy.sender, copy.receiver
            cuda.setDevice(a.ordinal)
            cuda.streamWaitEvent(a.stream, first.ready, 0)
            cuda.eventRecord(a.start, a.stream)
            for _ in range(copy.times):
                cuda.memcpyPeerAsync(
                    b.target, b.ordinal, a.source, a.ordinal, copy.nbytes, a.stream
                )
            cuda.eventRecord(a.end, a.stream)
        rates = {}
        for copy in copies:
            a = copy.sender
            cuda.eventSynchronize(a.end)
            seconds = max(cuda.eventElapsedTime(a.start, a.end) / 1e3, 1e-9)
            rates[a.name, copy.receiver.name] = copy.nbytes * copy.times / seconds / 1e9
        return rates


def _sized(a: _Endpoint, b: _Endpoint, rate: float, seconds: float) -> _Copy:
    """Copies that take about so long at a rate in GB/s."""
    nbytes = max(_FIRST, int(rate * 1e9 * seconds))
    times = math.ceil(nbytes / _BUFFER)
    return _Copy(a, b, nbytes // times, times)


def _total(rates: dict[tuple[str, str], float]) -> float:
    return sum(rates.values())
