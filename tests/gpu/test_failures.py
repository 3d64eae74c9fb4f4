"""What goes wrong on GPUs is told in time, names both sides, and leaves the devices usable."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll.errors import (
    AbortedError,
    ArgumentError,
    ArgumentTypeError,
    ClosedError,
    DeadlineError,
    Error,
    MismatchError,
)
from tests.gpu.ranks import close, on, together

pytestmark = pytest.mark.gpu

TIMEOUT = 2.0


def ranks(devices, timeout: float = TIMEOUT) -> list:
    """Ranks on these devices whose calls have so long; to make them takes a loaded machine more."""
    comms: list[Any] = ringcoll.init_all(devices, device="cuda", timeout=30)
    for comm in comms:
        state = comm._state
        state.config, state.fabric.timeout = replace(state.config, timeout=timeout), timeout
    return comms


@pytest.fixture(params=[[0, 0], pytest.param([0, 1], marks=pytest.mark.multi_gpu)], ids=str)
def two(request) -> Iterator[list]:
    """Two ranks that share a GPU, and two on GPUs of their own."""
    comms = ranks(request.param)
    yield comms
    close(comms, failed=True)
    usable(request.param)


@pytest.fixture
def apart() -> Iterator[list]:
    comms = ranks([0, 1])
    yield comms
    close(comms, failed=True)
    usable([0, 1])


def usable(devices) -> None:
    """New communicators work after whatever has happened to others."""
    comms = ranks(devices, 20)
    arrays = together(comms, lambda comm: comm.xp.full(5000, comm.rank + 1, "float32"))
    with ringcoll.group():
        for comm, array in zip(comms, arrays, strict=True):
            comm.all_reduce(array)
    for comm, array in zip(comms, arrays, strict=True):
        comm.synchronize()
        assert (array.get() == sum(range(1, len(comms) + 1))).all()
    close(comms)


def vectors(comms, count: int = 100, dtype: str = "float32") -> list:
    return together(comms, lambda comm: comm.xp.ones(count, dtype))


def ended(comm) -> Error | None:
    """What a rank says of its calls."""
    try:
        comm.synchronize()
    except Error as error:
        return error
    return None


def test_a_rank_that_never_comes(two):
    x = vectors(two)[0]
    started = time.monotonic()
    with pytest.raises(DeadlineError) as told:  # by the call, or by the wait for it
        with on(two[0]):
            two[0].all_reduce(x)
        two[0].synchronize()
    assert TIMEOUT * 0.9 < time.monotonic() - started < TIMEOUT + 8
    assert "all_reduce" in str(told.value)
    assert "rank 0" in str(told.value)
    with pytest.raises(ClosedError, match="broken by an earlier error"), on(two[0]):
        two[0].all_reduce(x)
    # The rank that did not come hears of it too.
    with pytest.raises(DeadlineError, match="rank 0"):
        two[1].check()


@pytest.mark.multi_gpu
def test_who_was_waited_for_is_named(apart):
    x = vectors(apart)[0]
    with on(apart[0]):
        apart[0].all_reduce(x)
    error = ended(apart[0])
    assert isinstance(error, DeadlineError)
    assert "rank 1" in str(error)
    # The arrays and kernels of others on the device are not touched.
    with on(apart[0]):
        assert int(apart[0].xp.arange(10).sum()) == 45


@pytest.mark.multi_gpu
def test_an_error_is_raised_by_the_next_call_too(apart):
    x = vectors(apart)[0]
    with on(apart[0]):
        apart[0].all_reduce(x)
        time.sleep(TIMEOUT + 1)
        with pytest.raises((DeadlineError, ClosedError), match="rank 1"):
            apart[0].all_reduce(x)


@pytest.mark.multi_gpu
def test_an_abort_ends_what_waits():
    comms = ranks([0, 1], 60)
    x = vectors(comms)[0]
    with on(comms[0]):
        comms[0].all_reduce(x)
    started = time.monotonic()
    comms[1].abort("no more")
    error = ended(comms[0])
    assert time.monotonic() - started < 10
    assert isinstance(error, AbortedError)
    assert "no more" in str(error)
    close(comms, failed=True)
    usable([0, 1])


DIFFERENT: dict[str, tuple[tuple[str, int, str, dict[str, Any]], Any, tuple[str, str]]] = {
    "op": (("all_reduce", 100, "float32", {"op": "sum"}), {"op": "max"}, ("op=sum", "op=max")),
    "count": (("all_reduce", 100, "float32", {}), 101, ("count=100", "count=101")),
    "large": (("all_reduce", 900_000, "float32", {}), 900_001, ("=900000", "=900001")),
    "dtype": (("all_reduce", 100, "float32", {}), "int32", ("dtype=float32", "dtype=int32")),
    "root": (("broadcast", 100, "float32", {"root": 0}), {"root": 1}, ("root=0", "root=1")),
    "collective": (("all_reduce", 100, "float32", {}), None, ("all_reduce", "barrier")),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_calls_are_shown(two, name):
    (collective, count, dtype, options), other, words = DIFFERENT[name]
    counts = (count, other if isinstance(other, int) else count)
    dtypes = (dtype, other if isinstance(other, str) else dtype)
    given = (options, other if isinstance(other, dict) else options)
    arrays = together(two, lambda comm: comm.xp.ones(counts[comm.rank], dtypes[comm.rank]))
    errors: list[Error | None] = []
    try:
        with ringcoll.group():
            for comm, array in zip(two, arrays, strict=True):
                with on(comm):
                    if comm.rank == 1 and other is None:
                        comm.barrier()
                    else:
                        getattr(comm, collective)(array, **given[comm.rank])
    except Error as error:
        errors.append(error)
    else:
        errors += [ended(comm) for comm in two]
        if name == "root":  # partial calls: who has nothing to wait for hears of it at the next
            errors += [ended(comm) for comm in two]
    told = [str(error) for error in errors if isinstance(error, MismatchError)]
    assert told, errors
    assert all(word in told[0] for word in words), told[0]


def test_host_arrays_are_refused(two):
    for host in (np.ones(4, "float32"), memoryview(b"1234")):
        with pytest.raises(ArgumentError, match=r"comm\.xp") as told:
            two[0].all_reduce(host)
        assert "device='cpu'" in str(told.value)
        assert "rank 0" in str(told.value)


def test_what_is_no_array_is_refused(two):
    with on(two[0]):
        x = two[0].xp.ones(8, "float32")
        for wrong in ([1.0], 3, None):
            with pytest.raises((ArgumentError, ArgumentTypeError)):
                two[0].all_reduce(wrong)
        with pytest.raises(ArgumentError, match="contiguous"):
            two[0].all_reduce(x[::2])
        with pytest.raises((ArgumentError, ArgumentTypeError), match="op="):
            two[0].all_reduce(x, "max")
        with pytest.raises(ArgumentError, match="overlap"):
            two[0].all_reduce(x[:4], x[2:6])


def test_a_refusal_leaves_the_communicator_usable(two):
    with pytest.raises(ArgumentError):
        two[0].all_reduce(np.ones(4, "float32"))
    arrays = vectors(two)
    with ringcoll.group():
        for comm, array in zip(two, arrays, strict=True):
            comm.all_reduce(array)
    for comm, array in zip(two, arrays, strict=True):
        comm.synchronize()
        assert (array.get() == 2).all()


@pytest.mark.multi_gpu
def test_another_device_is_refused(apart):
    with on(apart[1]):
        elsewhere = apart[1].xp.ones(4, "float32")
    with pytest.raises(ArgumentError, match="is on device 1, but this rank is on device 0"):
        apart[0].all_reduce(elsewhere)


def test_devices_that_are_not_there():
    with pytest.raises(ArgumentError, match="none of the"):
        ringcoll.init_all([99], device="cuda")


def test_a_closed_communicator(two):
    x = vectors(two)[0]
    two[0].close()
    two[0].close()
    with pytest.raises(ClosedError), on(two[1]):
        two[0].all_reduce(x)
