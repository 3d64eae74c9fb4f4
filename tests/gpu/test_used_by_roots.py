"""Plain memory that calls with a root use again, by communicators whose kernels run on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gpu.ranks import together
from tests.gpu.test_auto_register import memory
from tests.gpu.test_used_again import (
    COUNT,
    DIRECT,
    LATER,
    STAGED,
    clear,
    numbers,
    placed,
    which,
    world,
)
from tests.kernels.stand_in import needs_compiler

__all__ = ["memory", "world"]

pytestmark = needs_compiler


def rooted(comm: Any, name: str, root: int, send: Any, recv: Any, seed: int) -> int | None:
    """A call of a root on arrays of which ranks may lack one, compared; which program has run."""
    n, sent = comm.nranks, numbers(comm, seed, COUNT * comm.nranks)
    mine = slice(comm.rank * COUNT, (comm.rank + 1) * COUNT)
    if recv is not None:
        recv._values()[:] = -1
    if send is not None:  # in place after the poison
        send._values()[:] = sent[comm.rank][: send.shape]
    arrays = (None if send is None else send.array, None if recv is None else recv.array)
    if name == "broadcast" and comm.rank != root:
        arrays = arrays[1], None
    elif recv is send:
        arrays = arrays[0], None
    getattr(comm, name)(*arrays, root=root)
    found = which(comm)
    wanted = {
        "broadcast": lambda: sent[root][:COUNT],
        "reduce": lambda: np.sum(sent, axis=0)[:COUNT],
        "gather": lambda: np.concatenate([each[:COUNT] for each in sent]),
        "scatter": lambda: sent[root][: n * COUNT][mine],
    }[name]
    if recv is not None:
        recv.check(wanted())
    return found


@pytest.mark.parametrize("name", ["broadcast", "reduce", "gather", "scatter"])
@pytest.mark.parametrize("root", [0, 2])
def test_calls_of_a_root_map_the_buffers_that_ranks_have(world, memory, name, root):
    def work(comm):
        mine, whole = comm.rank == root, COUNT * comm.nranks
        counts = {"gather": (COUNT, whole), "scatter": (whole, COUNT)}.get(name, (COUNT, COUNT))
        lacks = {"broadcast": (not mine, False), "scatter": (not mine, False)}
        no_send, no_recv = lacks.get(name, (False, not mine))
        send, recv = (
            None if lacking else placed(comm, memory, count)
            for lacking, count in zip((no_send, no_recv), counts, strict=True)
        )
        found = [rooted(comm, name, root, send, recv, seed) for seed in range(5)]
        # The root's own other memory, then that of another rank, is staged by all.
        for turn, rank in enumerate((root, 1)):
            here = comm.rank == rank
            other = placed(comm, memory, counts[1]) if here and recv is not None else recv
            sent = send
            if here and recv is None:
                sent = placed(comm, memory, counts[0])
            found.append(rooted(comm, name, root, sent, other, 10 + turn))
            found.append(rooted(comm, name, root, send, recv, 20 + turn))
        return clear(found[:5]) + found[5:]

    wanted = LATER + [STAGED, DIRECT] * 2
    assert together(world([0, 1, 2]), work) == [wanted] * 3


def test_a_broadcast_in_place_is_mapped_at_the_root_too(world, memory):
    def work(comm):
        buffer = placed(comm, memory)
        send = buffer if comm.rank == 1 else None
        return clear([rooted(comm, "broadcast", 1, send, buffer, seed) for seed in range(5)])

    assert together(world([0, 1, 2]), work) == [LATER] * 3
