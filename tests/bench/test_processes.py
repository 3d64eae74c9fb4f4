"""The processes of benchmarks on GPUs: their parent hears them all, and who has died."""

from __future__ import annotations

import os
import time

from benchmarks.gpu.processes import Link, run_ranks


def uneven(link: Link, late: int) -> None:
    """One rank has sent everything and ended long before the others."""
    if link.rank == late:
        time.sleep(1.0)
    link.send({"number": 1})
    link.send({"number": 2})


def dying(link: Link) -> None:
    link.send({"number": 1})
    if link.rank == 1:
        os._exit(3)
    link.exchange("")


def heard(work, *args):
    found = []
    error = run_ranks(work, 2, args, 20.0, lambda of: found.append([m["number"] for m in of]))
    return error, found


def test_a_rank_may_end_before_another_has_reported():
    assert heard(uneven, 0) == (None, [[1, 1], [2, 2]])
    assert heard(uneven, 1) == (None, [[1, 1], [2, 2]])


def test_a_rank_that_dies_is_named():
    assert heard(dying)[0] == "rank 1 died"
