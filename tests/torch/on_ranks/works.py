"""Work objects and their futures on CPU tensors."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist


def asynchronous_calls_keep_their_order(rank, n):
    x = torch.full((1000,), float(rank))
    works = [dist.all_reduce(x, async_op=True), dist.broadcast(x, 1, async_op=True)]
    works.append(dist.all_reduce(x, async_op=True))
    for work in works:
        assert work.wait() is True
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
    assert x[0] == 24
    y = torch.ones(2)
    dist.all_reduce(y, async_op=True)
    dist.all_reduce(y)  # a blocking call comes after those before it
    assert y.tolist() == [16, 16]


def every_call_returns_a_work_whose_result_is_a_list(rank, n):
    group = dist.group.WORLD
    x = torch.ones(3)
    options = dist.AllreduceOptions()
    for later in (False, True):
        options.asyncOp = later
        work = group.allreduce([x], options)
        assert isinstance(work, dist.Work)
        work.wait()
        (found,) = work.get_future().wait()
        assert found.data_ptr() == x.data_ptr()
        assert work.result()[0].data_ptr() == x.data_ptr()
    barrier = dist.barrier(async_op=True)
    barrier.wait()
    assert barrier.is_completed()


def futures_chain(rank, n):
    x = torch.full((3,), float(rank))
    work = dist.all_reduce(x, async_op=True)
    then = work.get_future().then(lambda done: done.value()[0] * 2)
    assert then.wait().tolist() == [12.0] * 3
    after = work.get_future().then(lambda done: done.value()[0] + 1)  # it has ended already
    assert after.wait().tolist() == [7.0] * 3


def tensors_live_as_long_as_their_call(rank, n):
    def start():
        x = torch.full((100_000,), float(rank))
        return dist.all_reduce(x, async_op=True)

    works = [start() for _ in range(5)]
    for work in works:
        work.wait()
        assert work.result()[0][-1] == 6


def a_callback_may_make_calls(rank, n):
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)

    def again(done):
        dist.all_reduce(done.value()[0])
        return done.value()[0]

    assert work.get_future().then(again).wait().tolist() == [16.0] * 2


def a_callback_that_waits_for_a_later_call_is_told(rank, n):
    """The thread that runs it would have to carry out the call."""
    x, y = torch.ones(2), torch.ones(2)
    for wait in (
        lambda: dist.all_reduce(y, async_op=True).wait(),
        lambda: dist.all_reduce(y, async_op=True).get_future().wait(),
    ):
        held = (
            threading.Event()
        )  # of a call that has ended callbacks run at once, where they are made
        dist.distributed_c10d._get_default_group()._engine(x, "all_reduce")._state.submit(
            held.wait, ()
        )
        future = dist.all_reduce(x, async_op=True).get_future().then(lambda _, wait=wait: wait())
        held.set()
        with pytest.raises(RuntimeError, match="make that call without async_op"):
            future.wait()
    dist.all_reduce(x)


def a_wait_that_is_too_short_leaves_the_call_alone(rank, n):
    x = torch.ones(2)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        with pytest.raises(RuntimeError, match=r" (Timed out|closed|timeout) "):
            work.wait(timedelta(milliseconds=50))
        assert not work.is_completed()
    dist.distributed_c10d._get_default_store().add("short", 1)
    while dist.distributed_c10d._get_default_store().add("short", 0) < n:
        time.sleep(0.01)
    if rank != 0:
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert x.tolist() == [4, 4]


def threads_may_call(rank, n):
    """DDP's reducer calls from autograd's threads."""
    x = torch.ones(2)
    thread = threading.Thread(target=lambda: dist.all_reduce(x))
    thread.start()
    thread.join()
    assert x.tolist() == [4, 4]


def tensors_of_inference_mode(rank, n):
    """Other threads, which are not in that mode, write to them."""
    with torch.inference_mode():
        parts = [torch.zeros(3, 2).t() for _ in range(n)]
        x = torch.zeros(4)[::2]
    works = [
        dist.all_gather(parts, torch.full((2, 3), float(rank)), async_op=True),
        dist.irecv(x, (rank + 1) % n),
        dist.isend(torch.ones(2), (rank - 1) % n),
    ]
    for work in works:
        work.wait()
    assert [part[0, 0].item() for part in parts] == [0, 1, 2, 3]
    assert x.tolist() == [1, 1]
