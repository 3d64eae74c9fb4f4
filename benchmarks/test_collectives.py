"""Each collective from its first rank's call to its last rank's end, of ranks of one process.

::

    pytest benchmarks/test_collectives.py                    # CPU ranks, GPUs where there are any
    pytest benchmarks/test_collectives.py -m 'not gpu and not multi_gpu'

All ranks are called by one thread, in a group: on the CPU a time is all that they do together. On
GPUs it is an eager call and the wait for it; graphs are what ``benchmarks.peers`` times.
"""

# ruff: noqa: D103  # a name says what is timed

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

import ringcoll
from ringcoll.collectives import COLLECTIVES, Collective
from ringcoll.fabric import each

RANKS = 4
SIZES = {"4K": 4 << 10, "1M": 1 << 20}
NAMES = [name for name in COLLECTIVES if name != "send"]


def cpu():
    return ringcoll.init_all(RANKS, device="cpu")


def one_gpu():
    return ringcoll.init_all([0] * RANKS, device="cuda")


def gpus():
    from ringcoll.cuda.device import devices

    return ringcoll.init_all(min(8, len(devices())), device="cuda")


WORLDS = [
    cpu,
    pytest.param(one_gpu, marks=pytest.mark.gpu),
    pytest.param(gpus, marks=pytest.mark.multi_gpu),
]


@pytest.fixture(params=WORLDS, ids=lambda world: world.__name__, scope="module")
def comms(request):
    made = request.param()
    yield made
    for comm in made:
        comm.close()


def on(comm):
    """Its GPU is the current one; nothing on the CPU."""
    if comm.device == "cpu":
        return ExitStack()
    return comm.xp.cuda.Device(int(comm.device.partition(":")[2]))


def arrays_of(comms, name, nbytes):
    """What each rank sends and receives: its own number, counted from 1, and zeros."""
    kind = Collective(name, len(comms))
    segments = max(1, kind.segments("INPUT"), kind.segments("OUTPUT"))
    count = nbytes // 4 // segments

    def make(comm):
        with on(comm):
            found = []
            for buffer in ("INPUT", "OUTPUT"):
                array = comm.empty(count * kind.segments(buffer), "float32")
                array[:] = comm.rank + 1 if buffer == "INPUT" else 0
                found.append(array if kind.has(buffer, comm.rank) else None)
            return found

    return each(comms, make)


def wanted(name, nranks, count):
    """What every rank that receives must receive."""
    kind = COLLECTIVES[name]
    if kind.reduces:
        return np.full(count, nranks * (nranks + 1) / 2, np.float32)
    if kind.output == "all":
        return np.repeat(np.arange(1, nranks + 1, dtype=np.float32), count // nranks)
    return np.ones(count, np.float32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_collective(benchmark, comms, name, size):
    arrays = arrays_of(comms, name, SIZES[size])

    def call():
        with ringcoll.group():
            for comm, buffers in zip(comms, arrays, strict=True):
                with on(comm):
                    getattr(comm, name)(*buffers if name != "barrier" else ())
        for comm in comms:
            comm.synchronize()

    benchmark(call)
    for comm, (_, received) in zip(comms, arrays, strict=True):
        if received is not None and name != "barrier":
            with on(comm):
                got = received if comm.device == "cpu" else received.get()
            assert np.array_equal(got, wanted(name, len(comms), got.size))


def test_sendrecv(benchmark, comms):
    """Around the ring, each rank to the next."""
    n = len(comms)
    arrays = arrays_of(comms, "all_reduce", SIZES["4K"])

    def call():
        with ringcoll.group():
            for comm, (sent, received) in zip(comms, arrays, strict=True):
                with on(comm):
                    comm.sendrecv(sent, (comm.rank + 1) % n, received, (comm.rank - 1) % n)
        for comm in comms:
            comm.synchronize()

    benchmark(call)
    assert [float(received[0]) for _, received in arrays] == [
        (rank - 1) % n + 1 for rank in range(n)
    ]
