"""The host's part of exchanges along rails: the messages, several exchanges at once.

The next exchange of a lane begins as soon as its stream has posted it, whatever the other lane
waits for, so that MPI has messages to move while kernels reduce and copy. The messages of a lane
have a tag of their own, by which MPI keeps their order.

MPI moves messages only inside its calls: a test of the oldest message of each lane moves all.
Other work between two tests delays them, so there are several in a row.

Launchers may bind a process to one core (Open MPI does so with up to two ranks a host). There a
thread that synchronizes with a stream spins inside CUDA, and a thread that only yields waits for
the end of the other's time slice, so this one sleeps between tests.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ringcoll.bootstrap.contract import named
from ringcoll.errors import AbortedError, ClosedError, Error
from ringcoll.executors.cuda_nodes.executor import CudaNodesExecutor, await_stream
from ringcoll.executors.cuda_nodes.pieces import StagingCopy
from ringcoll.fabric.mpi import Transfer

_SPIN_SECONDS = 10e-3
"""Time after progress in which the host polls without sleeping, which would delay messages."""

_LOOKS = 8
"""Tests of messages and counts in a row, before errors are checked and the processor is yielded."""

_NAP_SECONDS = 20e-6
"""Sleep between two tests on a single core."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages to and from other ranks, through a slot."""

    what: str  # the call, for error messages
    sends: tuple[tuple[int, Bytes], ...]  # peer, and bytes of the slot
    recvs: tuple[tuple[int, Bytes], ...]
    to_host: tuple[StagingCopy, ...]  # before the messages
    to_device: tuple[StagingCopy, ...]  # after them


class Lane(Protocol):
    """The two ends of a lane: its stream posts exchanges, and is told when they have ended."""

    def posted(self, number: int) -> bool:
        """Whether the stream has posted an exchange."""

    def done(self, number: int) -> None:
        """Tell the stream that an exchange has ended."""


@dataclass(slots=True, eq=False)
class Flow:
    """The exchanges of one lane in a call, and how many of them have begun and ended."""

    lane: Lane
    channel: int  # by which both ends match the messages
    base: int  # the number of the first exchange among those of all calls on the lane
    exchanges: Sequence[Exchange]
    begun: int = 0
    ended: int = 0
    under_way: deque[list[tuple[int, Transfer]]] = field(default_factory=deque)
    """(peer, message) of each exchange that has begun and not ended."""

    def posted(self) -> bool:
        """Whether the stream has posted an exchange that has not begun."""
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

    The stream may post them at any time; the timeout bounds the time without progress of messages
    that have begun.

    Args:
        timeout: seconds.

    Raises:
        DeadlineError: no message has made progress; the message names the ranks of the others.
        AbortedError: the communicator is broken or aborted.
        Error: a rank has died or aborted, or the device has failed.

    """
    fabric = executor.fabric
    last = time.monotonic()  # of progress
    looks, pause = _LOOKS, os.sched_yield
    if on_one_core():
        looks, pause = 1, partial(time.sleep, _NAP_SECONDS)

    def progressed() -> bool:
        error = executor.thread.error()
        if error is not None:
            raise AbortedError(f"rank {fabric.rank}: the communicator has failed") from error
        progress = any(flow.posted() for flow in flows)
        if progress:
            _raise_failure(executor, failure)
            _begin(flows, executor)
        for flow in flows:
            progress = _end(flow) or progress
        return progress

    def peers() -> list[int]:
        return _awaited(flows)

    def describe() -> str:
        what = next(flow.exchanges[flow.ended].what for flow in flows if flow.under_way)
        return (
            f"{what} on rank {fabric.rank}: waited {time.monotonic() - last:.3g} s for messages to "
            f"or from {named(peers())}, which entered the call and stopped inside it"
        )

    while not all(flow.over() for flow in flows):
        if progressed():
            last = time.monotonic()
        elif not any(flow.under_way for flow in flows):
            await_stream(lambda: any(flow.posted() for flow in flows), fabric, executor.thread)
        elif time.monotonic() - last < _SPIN_SECONDS:
            if not any(_can_progress(flow) for _ in range(looks) for flow in flows):
                pause()
        else:
            fabric.wait(
                progressed, deadline=fabric.deadline(timeout), describe=describe, peers=peers
            )
            last = time.monotonic()


def on_one_core() -> bool:
    """Whether the threads of this process take turns on one core."""
    return len(os.sched_getaffinity(0)) == 1


def _raise_failure(executor: CudaNodesExecutor, failure: Callable[[], Error | None]) -> None:
    """Raise the error of the device or of another rank, before messages begin."""
    error = failure()
    if error is not None:
        raise error
    executor.fabric.check()


def _begin(flows: Sequence[Flow], executor: CudaNodesExecutor) -> None:
    """Begin all exchanges that the stream has posted, sends first.

    Where processes read each other's memory, MPI copies an announced message inside the call that
    receives it; meanwhile the peer must find this rank's sends.
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
    """The peers of the messages under way; drops ended messages, whose peer may have left."""
    for flow in flows:
        for part in flow.under_way:
            part[:] = [message for message in part if not message[1].done()]
    return sorted({peer for flow in flows for part in flow.under_way for peer, _ in part})


def _can_progress(flow: Flow) -> bool:
    """Whether an exchange can begin or a message has ended; moves messages."""
    if flow.posted():
        return True
    if not flow.under_way:
        return False
    messages = flow.under_way[0]
    return not messages or messages[-1][1].done()


def _end(flow: Flow) -> bool:
    """End exchanges whose messages have all ended, in order; whether a message has ended."""
    progress = False
    while flow.under_way:
        messages = flow.under_way[0]
        while messages and messages[-1][1].done():
            messages.pop()
            progress = True
        if messages:
            break
        flow.under_way.popleft()
        flow.lane.done(flow.base + flow.ended)
        flow.ended += 1
        progress = True
    return progress
