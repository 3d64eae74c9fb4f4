"""Ranks on real GPUs: their buffers with a mirror on the host, where cases are made and judged.

A case of the CPU ranks' tests is laid out in host memory, guards and poison included; its bytes go
to the device before the call and come back after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import ringcoll
from ringcoll.executors.cuda.trace import HEAD, ROW, ran
from ringcoll.fabric import each
from tests.communicator.cases import Case, Memory, Wrong, contribution
from tests.communicator.cases import _Call as HostCall

HALF = 2 << 20
"""Bytes for each of the two buffers of a call."""


def ordinal(comm: Any) -> int:
    return int(comm.device.partition(":")[2])


def on(comm: Any) -> Any:
    """Makes a rank's device this thread's current one."""
    return comm.xp.cuda.Device(ordinal(comm))


def together(comms: Sequence[Any], function: Callable[[Any], Any]) -> list[Any]:
    """A collective of the control plane, such as empty, for ranks that share a thread."""

    def call(comm: Any) -> Any:
        with on(comm):
            return function(comm)

    return each(comms, call)


class Mirror(Memory):
    """A rank's bytes on the device, symmetric and plain, and the same on the host."""

    def __init__(self, comm: Any, half: int = HALF) -> None:
        self.half = half
        self.symmetric = np.zeros(2 * half, np.uint8)
        self.plain = np.zeros(2 * half, np.uint8)
        self._symmetric = comm.empty(2 * half, "uint8")
        with on(comm):
            self._plain = comm.xp.empty(2 * half, "uint8")

    def device(self, view: np.ndarray) -> Any:
        """The device's part behind a view of the host's."""
        for host, device in ((self.symmetric, self._symmetric), (self.plain, self._plain)):
            start = view.ctypes.data - host.ctypes.data
            if 0 <= start < host.nbytes:
                return device[start : start + view.nbytes].view(view.dtype)
        raise Wrong("a view of other memory")


class Call(HostCall):
    """A case's call on one rank; arrays of the same buffers are the same objects."""

    def __init__(self, comm: Any, memory: Mirror, case: Case, inputs: Sequence[np.ndarray]) -> None:
        super().__init__(comm, memory, case, inputs)
        self.memory = memory
        self._arrays = {
            id(array): memory.device(array) for array in (self.send, self.recv) if array is not None
        }

    def _raws(self) -> list[np.ndarray]:
        return [raw for raw in (self.send_raw, self.recv_raw) if raw is not None]

    def upload(self) -> None:
        with on(self.comm):
            for raw in self._raws():
                self.memory.device(raw).set(raw)

    def make(self) -> None:
        positional, named = self.arguments()
        arrays = [None if a is None else self._arrays[id(a)] for a in positional]
        with on(self.comm):
            if getattr(self.comm, self.case.collective)(*arrays, **named) is not None:
                raise Wrong("the call returned something")

    def download(self) -> None:
        with on(self.comm):
            for raw in self._raws():
                raw[...] = self.memory.device(raw).get()


def program_of(comm: Any) -> int:
    """Which of its programs the last call ran, where calls are traced; the trace begins anew."""
    recorder = comm._state.cuda.recorder
    rows, room = np.frombuffer(recorder._read(HEAD.itemsize), HEAD)[0].tolist()
    record = recorder._read(HEAD.itemsize + min(rows, room) * ROW.itemsize)
    recorder._clear()
    return ran(record, comm.rank)


def inputs_of(case: Case, nranks: int) -> list[np.ndarray]:
    return [contribution(case, rank, nranks) for rank in range(nranks)]


def run_in_groups(comms: Sequence[Any], cases: Sequence[Case], *, at_once: int = 1) -> int:
    """All cases by one thread, each a group; so many are enqueued before any is looked at."""
    slots = [together(comms, Mirror) for _ in range(at_once)]
    n = len(comms)
    for first in range(0, len(cases), at_once):
        batch = cases[first : first + at_once]
        rows = [
            [
                Call(comm, memory, case, inputs_of(case, n))
                for comm, memory in zip(comms, memories, strict=True)
            ]
            for case, memories in zip(batch, slots, strict=False)
        ]
        for row in rows:
            for call in row:
                call.upload()
        try:
            for row in rows:
                with ringcoll.group():
                    for call in row:
                        call.make()
            for comm in comms:
                comm.synchronize()
        except Exception as error:
            raise Wrong(f"{batch}: {type(error).__name__}: {error}") from error
        for case, row in zip(batch, rows, strict=True):
            for call in row:
                judge(call, case)
    return len(cases)


def run_alone(comm: Any, cases: Sequence[Case]) -> int:
    """All cases on a thread of this rank's own, on its current stream."""
    memory = Mirror(comm)
    for case in cases:
        call = Call(comm, memory, case, inputs_of(case, comm.nranks))
        call.upload()
        with on(comm):  # the stream of another device might have a kernel that waits for this call
            comm.xp.cuda.get_current_stream().synchronize()
        call.make()
        comm.synchronize()
        judge(call, case)
    return len(cases)


def judge(call: Call, case: Case) -> None:
    call.download()
    try:
        call.check()
    except Wrong as error:
        raise Wrong(f"rank {call.comm.rank}, {case}: {error}") from error


def close(comms: Sequence[Any], *, failed: bool = False) -> None:
    """The end of all ranks; ``failed``: what they say of their errors has been heard."""
    for comm in comms:
        with contextlib.suppress(*([ringcoll.Error] if failed else [])):
            comm.close()
