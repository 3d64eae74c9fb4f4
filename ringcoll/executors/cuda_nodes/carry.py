"""The host's part of exchanges along rails: several are on their way at once.

The next exchange of a lane begins as soon as its stream has posted it, whatever the other lane
waits for, so that MPI has messages to move while a stream folds and copies. The messages of a lane
have a channel of their own, in which both ends have the same order.

MPI moves messages only inside its calls: a test of the oldest message of each lane moves all.
Other work between two tests delays them, so there are several in a row.

Launchers may bind a process to one core (Open MPI does so with up to two ranks a host). There a
thread that synchronizes with a stream spins inside CUDA, and a thread that only yields waits for
the end of its time slice, so this one sleeps between tests.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from ringcoll.bootstrap.contract import named
from ringcoll.errors import AbortedError, ClosedError, Error
from ringcoll.executors.cuda_nodes.executor import CudaNodesExecutor, await_stream
from ringcoll.executors.cuda_nodes.lane import Lane
from ringcoll.executors.cuda_nodes.pieces import Move
from ringcoll.fabric.mpi import Transfer

_SPIN_SECONDS = 10e-3
"""Time after progress in which the host polls without sleeping, which would delay messages."""

_LOOKS = 8
"""Tests of messages and counts in a row, before errors are checked and the processor is yielded."""

_NAP_SECONDS = 20e-6
"""Between two looks on a single core."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages to and from other ranks, through a slot."""

    what: str
    sends: tuple[tuple[int, Bytes], ...]  # to whom, and which bytes of the slot
    recvs: tuple[tuple[int, Bytes], ...]
    into: tuple[Move, ...]  # copies from the device, before them
    out: tuple[Move, ...]  # copies to the device, after them


@dataclass(slots=True, eq=False)
class Flow:
    """The exchanges of one lane in a call, and how far they have come."""

    lane: Lane
    channel: int
    base: int  # the number of the first exchange among all that the lane has ever had
    exchanges: Sequence[Exchange]
    begun: int = 0
    ended: int = 0
    under_way: deque[list[tuple[int, Transfer]]] = field(default_factory=deque)
    """Of each exchange that has begun and not ended, messages with their peers."""

    def posted(self) -> bool:
        """Whether the stream has brought an exchange that has not begun."""
        return self.begun < len(self.exchanges) and self.lane.posted(self.base + self.begun)

    def over(self) -> bool:
        """Whether all exchanges have ended."""
        return self.ended == len(self.exchanges)


def carry(
    executor: CudaNodesExecutor,
    failure: Callable[[], Error | None],
    flows: Sequence[Flow],
    timeout: float,
) -> None:
    """Carry out the exchanges of a call, on the communicator's thread.

    The stream brings them as late as it likes; messages must not stand still for longer than the
    timeout.

    Args:
        timeout: seconds.

    Raises:
        DeadlineError: messages stood still; the ranks that they wait for are named.
        AbortedError: the communicator is broken or aborted.
        Error: a rank has died or given up, or the device has failed.

    """
    fabric = executor.fabric
    last = time.monotonic()  # when something moved
    looks, pause = _LOOKS, os.sched_yield
    if on_one_core():
        looks, pause = 1, partial(time.sleep, _NAP_SECONDS)

    def moved() -> bool:
        over = executor.owner.over()
        if over is not None:
            raise AbortedError(f"rank {fabric.rank}: given up") from over
        some = any(flow.posted() for flow in flows)
        if some:
            _usable(executor, failure)
            _begin(flows, executor)
        for flow in flows:
            some = _end(flow) or some
        return some

    def peers() -> list[int]:
        return _awaited(flows)

    def describe() -> str:
        what = next(flow.exchanges[flow.ended].what for flow in flows if flow.under_way)
        return (
            f"{what} on rank {fabric.rank}: waited {time.monotonic() - last:.3g} s for messages to "
            f"or from {named(peers())}, which entered the call and stopped inside it"
        )

    while not all(flow.over() for flow in flows):
        if moved():
            last = time.monotonic()
        elif not any(flow.under_way for flow in flows):
            await_stream(lambda: any(flow.posted() for flow in flows), fabric, executor.owner)
        elif time.monotonic() - last < _SPIN_SECONDS:
            if not any(_stirs(flow) for _ in range(looks) for flow in flows):
                pause()
        else:
            fabric.wait(moved, deadline=fabric.deadline(timeout), describe=describe, peers=peers)
            last = time.monotonic()


def on_one_core() -> bool:
    """Whether the threads of this process take turns on one core."""
    return len(os.sched_getaffinity(0)) == 1


def _usable(executor: CudaNodesExecutor, failure: Callable[[], Error | None]) -> None:
    """Before messages begin: raise what has gone wrong on the device or with other ranks."""
    error = failure()
    if error is not None:
        raise error
    executor.fabric.check()


def _begin(flows: Sequence[Flow], executor: CudaNodesExecutor) -> None:
    """Send and receive the messages of all that the stream has brought.

    Sends first: where processes read each other's memory, a receive whose message is announced
    copies all of it before it returns, and the peer is to have something to read meanwhile.
    """
    messages = executor.fabric.messages
    if messages is None:
        raise ClosedError(f"rank {executor.fabric.rank} has closed this communicator")
    begun = []
    for flow in flows:
        while flow.posted():
            exchange = flow.exchanges[flow.begun]
            sent = [
                (peer, messages.send(array, peer, flow.channel)) for peer, array in exchange.sends
            ]
            flow.under_way.append(sent)
            flow.begun += 1
            begun.append((flow.channel, exchange, sent))
    for channel, exchange, under_way in begun:
        for peer, array in exchange.recvs:
            under_way.append((peer, messages.receive(array, peer, channel)))


def _awaited(flows: Sequence[Flow]) -> list[int]:
    """Let go of what has ended, whose peer may have left, and list the other messages' peers."""
    for flow in flows:
        for part in flow.under_way:
            part[:] = [message for message in part if not message[1].done()]
    return sorted({peer for flow in flows for part in flow.under_way for peer, _ in part})


def _stirs(flow: Flow) -> bool:
    """Whether there is something to begin or to end; moves messages."""
    if flow.posted():
        return True
    if not flow.under_way:
        return False
    messages = flow.under_way[0]
    return not messages or messages[-1][1].done()


def _end(flow: Flow) -> bool:
    """Let the stream have what has come, in order; whether a message has ended."""
    some = False
    while flow.under_way:
        messages = flow.under_way[0]
        while messages and messages[-1][1].done():
            messages.pop()
            some = True
        if messages:
            break
        flow.under_way.popleft()
        flow.lane.done(flow.base + flow.ended)
        flow.ended += 1
        some = True
    return some
