"""Communicators with the compiled part on some ranks, or on none, and calls that it knows."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import ringcoll
from tests.processes.programs.setting import own_rank


def small_of(comm) -> Any:
    return comm._engine._small


class Counted:
    """A communicator, and how many of its calls the compiled part has made.

    ``handed_over``: of messages and asynchronous calls, those that it has left to Python;
    ``pending``: of asynchronous messages, those that had not ended when they were posted, and
    ``finished`` those of them that a wait has ended without Python.
    """

    def __init__(self, compiled, timeout=20) -> None:
        self.comm = ringcoll.init(timeout=timeout, compiled=compiled)
        self.made = self.handed_over = self.pending = self.finished = 0
        small = small_of(self.comm)
        assert (small is not None) == bool(compiled)
        if small is not None:
            make, start, exchange = small.make, small.start, small.exchange

            def counted(*given):
                made = make(*given)
                self.made += made
                return made

            def counted_start(*given):
                started = start(*given)
                self.made += started is not None
                self.handed_over += started is not None and started[2] is not None
                return started

            def counted_exchange(exchange, *given):
                made = exchange(*given)
                self.made += made is True
                self.handed_over += made is not True and made is not False
                return made

            post, finish = small.post, small.finish

            def counted_post(*given):
                made = post(*given)
                self.made += made
                self.pending += made and not given[-1].done()
                return made

            def counted_finish(*given):
                ended = finish(*given)
                self.finished += ended
                return ended

            small.make, small.start = counted, counted_start
            small.post, small.finish = counted_post, counted_finish
            small.exchange = functools.partial(counted_exchange, exchange)
            small.exchange_group = functools.partial(counted_exchange, small.exchange_group)


@functools.cache
def is_compiled() -> bool:
    """Whether this rank uses the compiled part; asked before its first ``init``."""
    return own_rank() % 3 != 1


def mixed(timeout=20) -> Counted:
    """A communicator of ranks with the compiled part and ranks without."""
    return Counted(is_compiled(), timeout)


def fresh(given, offset):
    """A new array of the same values at an offset in bytes of new memory."""
    memory = np.empty(given.nbytes + 64, np.uint8)
    array = memory[offset : offset + given.nbytes].view(given.dtype)
    array[:] = given
    return array


def warm(comm, count=10, times=6):
    """An array of a call that the compiled part knows."""
    x = np.ones(count, "float32")
    for _ in range(times):
        x[:] = 1
        comm.all_reduce(x)
    return x


def near_recursion_limit(call: Callable[[], str], free: int) -> str:
    """What a call says with so many frames free, without the text behind its first colon."""

    def below(frames: int) -> str:
        return call() if frames <= 0 else below(frames - 1)

    frame, depth = sys._getframe(), 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
    try:
        return below(sys.getrecursionlimit() - depth - free).split(":")[0]
    except RecursionError:
        return "RecursionError"
