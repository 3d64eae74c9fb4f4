"""What ranks on GPUs say of a call is what then runs."""

from __future__ import annotations

from typing import Any

import pytest

import ringcoll
from tests.gpu.ranks import close, on, together

pytestmark = pytest.mark.gpu

CASES = (("all_reduce", 256), ("all_reduce", 4 << 20), ("all_gather", 64 << 10))


@pytest.mark.parametrize(("name", "nbytes"), CASES)
def test_what_is_explained_is_what_runs(name, nbytes):
    comms = ringcoll.init_all([0, 0], device="cuda", timeout=20)

    def arrays(comm):
        count = nbytes // 4
        half = count // 2 if name == "all_gather" else count
        return comm.empty(half, "float32"), comm.empty(count, "float32")

    buffers = together(comms, arrays)
    with ringcoll.group():
        for comm, pair in zip(comms, buffers, strict=True):
            with on(comm):
                getattr(comm, name)(*pair)
    for comm in comms:
        comm.synchronize()
    state: Any = comms[1]._state
    ran = state.executor.async_errors.last.choice
    text = comms[1].explain(name, nbytes)
    said = text.partition("buffers of plain")[0]
    assert f" by {ran.launch.protocol}, S = {ran.launch.slices}, {ran.grid.blocks} block" in said
    assert f" of {ran.grid.threads} threads" in said
    close(comms)
