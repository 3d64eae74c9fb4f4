"""Collectives along rings whose results numpy knows exactly."""

from __future__ import annotations

from typing import Any

import numpy as np


def sums(comm: Any, algorithm: str | None = None, **how: Any) -> bool:
    """Whether collectives give what numpy says, of sizes that fill some channels and not others."""
    n, right = comm.nranks, list[bool]()
    for count in (1, 300, 40_011):
        whole = np.arange(count, dtype="float32") % 97
        x = comm.empty(count, "float32")
        x[:] = whole * (comm.rank + 1)
        comm.all_reduce(x, algorithm=algorithm, **how)
        right.append(np.array_equal(x, whole * (n * (n + 1) // 2)))
        y = whole * (comm.rank + 1)  # plain memory
        comm.broadcast(y, root=n - 1, algorithm="chain", **how)
        right.append(np.array_equal(y, whole * n))
        comm.reduce(y, root=1 % n, algorithm="chain", **how)
        right.append(comm.rank != 1 or np.array_equal(y, whole * n * n))
        parts = np.empty(n * count, "float32")
        comm.all_gather(whole + comm.rank, parts, algorithm="ring", **how)
        wanted = np.concatenate([whole + rank for rank in range(n)])
        right.append(np.array_equal(parts, wanted))
        part = np.empty(count, "float32")
        comm.reduce_scatter(wanted + comm.rank, part, algorithm="ring", **how)
        right.append(np.array_equal(part, n * (whole + comm.rank) + n * (n - 1) // 2))
    return all(right)
