"""Ranks that leave, or make a control call, while others wait for them in a call on GPUs.

What a rank has raised is its result. ``array(comm, count)`` makes a float32 array of a rank.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ringcoll

Array = Callable[[Any, int], Any]
Call = Callable[[Any, Array], None]

SMALL, LARGE = 100, 400_000


def _recv(comm: Any, array: Array) -> None:
    comm.recv(array(comm, SMALL), 1)


def _send(comm: Any, array: Array) -> None:
    comm.send(array(comm, LARGE * 5), 1)


def _group(comm: Any, array: Array) -> None:
    with ringcoll.group():
        comm.all_reduce(array(comm, SMALL))
        comm.barrier()


CALLS: dict[str, Call] = {
    "all_reduce": lambda comm, array: comm.all_reduce(array(comm, SMALL)),
    "large": lambda comm, array: comm.all_reduce(array(comm, LARGE)),
    "broadcast": lambda comm, array: comm.broadcast(array(comm, SMALL), root=1),
    "broadcast from 0": lambda comm, array: comm.broadcast(array(comm, SMALL), root=0),
    "barrier": lambda comm, _: comm.barrier(),
    "recv": _recv,
    "send": _send,
    "group": _group,
}


def _exits() -> None:
    sys.exit(3)


def _raises() -> None:
    raise KeyError("nobody catches it")


ENDS: dict[str, Callable[[], None]] = {"returns": int, "exits": _exits, "raises": _raises}  # type: ignore[dict-item]

CONTROL: dict[str, Callable[[Any, Array], object]] = {
    "empty": lambda comm, _: comm.empty(4),
    "register": lambda comm, array: comm.register(array(comm, SMALL)),
    "split": lambda comm, _: comm.split(0),
    "shrink": lambda comm, _: comm.shrink(),
}


def in_threads(comms: Sequence[Any], work: Callable[[Any], Any], use: Callable[[Any], Any]) -> dict:
    """A thread for each rank, with its device as current one; what each has raised."""
    raised: dict[int, BaseException] = {}

    def run(comm: Any) -> None:
        with use(comm):
            try:
                work(comm)
            except ringcoll.Error as error:
                raised[comm.rank] = error

    threads = [threading.Thread(target=run, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def leaves(name: str, end: str, array: Array) -> Callable[[Any], None]:
    """Rank 1 makes two calls and closes, or ends its thread; the others make a third call."""

    def work(comm: Any) -> None:
        comm.barrier()
        comm.all_reduce(array(comm, SMALL))
        comm.synchronize()
        if comm.rank == 1:
            if end == "closes":
                comm.close()
                return
            ENDS[end]()
            return
        CALLS[name](comm, array)
        comm.synchronize()

    return work


def control(name: str, data: str, later: int, array: Array) -> Callable[[Any], None]:
    """Rank 0 makes a control call, the others one that moves data; ``later``: which is second."""

    def work(comm: Any) -> None:
        x = array(comm, SMALL)  # some ranks' first call of a kind takes long
        comm.barrier()
        comm.all_reduce(x)
        comm.synchronize()
        if int(comm.rank > 0) == later:
            threading.Event().wait(0.3)
        if comm.rank == 0:
            CONTROL[name](comm, array)
        else:
            CALLS[data](comm, array)
            comm.synchronize()

    return work
