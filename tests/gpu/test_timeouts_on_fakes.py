"""A call of GPU ranks that has a timeout of its own ends by it and says it; by fakes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll.cuda.raw import from_pointer
from ringcoll.errors import DeadlineError
from tests.gpu.ranks import close, ordinal
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from tests.gpu.fake_gpus import in_threads

pytestmark = needs_compiler


@pytest.fixture(params=[[0, 1], [0, 0]], ids=str)
def ranks(request, gpus) -> Iterator[Any]:
    """Two ranks with launches of their own, and two that share theirs."""
    made: list[Any] = ringcoll.init_all(request.param, device="cuda", timeout=20)
    yield made, gpus
    close(made, failed=True)


@pytest.mark.parametrize("protocol", ["LL", "Simple"])
@pytest.mark.parametrize("first", [{}, {"timeout": 15}], ids=str)
def test_a_call_ends_by_its_own_timeout_and_says_it(ranks, protocol, first):
    """Though calls behind it, which wait for it, have more."""
    comms, gpus = ranks
    held = [np.ones(500, "float32") for _ in comms]
    given = [
        from_pointer(x.ctypes.data, 500, "float32", ordinal(comm))
        for comm, x in zip(comms, held, strict=True)
    ]

    def together(comm: Any) -> None:
        comm.all_reduce(given[comm.rank], protocol=protocol, **first)
        for seconds in (11, 12, 13, 13, 13.5):
            comm.all_reduce(given[comm.rank], protocol=protocol, timeout=seconds)
            comm.barrier(timeout=seconds)
        comm.synchronize()

    assert in_threads(comms, together, gpus) == []
    assert [x.tolist() for x in held] == [[64.0] * 500] * 2

    def alone(comm: Any) -> None:
        if comm.rank == 0:
            comm.all_reduce(given[0], protocol=protocol, timeout=0.4)
            comm.all_reduce(given[0], protocol=protocol, timeout=13)
            comm.synchronize()

    started = time.monotonic()
    (error,) = in_threads(comms, alone, gpus)
    assert time.monotonic() - started < 8
    with pytest.raises(DeadlineError, match=r"waited 0\.4 s for (rank 1|the other ranks)"):
        raise error
