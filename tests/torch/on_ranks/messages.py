"""Sends and receives of CPU tensors."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist


def blocking(rank, n):
    for source in range(n):
        dest = (source + 1) % n
        if rank == source:
            dist.send(torch.full((3,), float(source)), dest)
        if rank == dest:
            x = torch.zeros(3)
            assert dist.recv(x, source) == source
            assert x.tolist() == [float(source)] * 3


def a_message_under_way_owns_its_memory(rank, n):
    """The tensor may be given other memory, as pipelines free what they have sent."""
    x, count = torch.full((1 << 20,), float(rank)), 1 << 20
    if rank == 0:
        work = dist.isend(x, 1)
        x.data = torch.zeros(1)
        other = torch.full((count,), 9.0)  # may lie where the message was
        dist.send(torch.zeros(1), 2)  # now rank 1 receives
        work.wait()
        assert bool((other == 9).all())
    elif rank == 2:
        dist.recv(x[:1], 0)
        dist.send(x[:1], 1)
    elif rank == 1:
        dist.recv(x[:1], 2)
        dist.recv(x, 0)
        assert x.unique().tolist() == [0.0]


def receives_posted_before_sends(rank, n):
    after, before = (rank + 1) % n, (rank - 1) % n
    x, y = torch.zeros(4), torch.zeros(200_000)
    works = [dist.irecv(x, before), dist.irecv(y, after)]
    works += [dist.isend(torch.full((4,), float(rank)), after)]
    works += [dist.isend(torch.full((200_000,), float(rank)), before)]
    for work in works:
        work.wait()
    assert (x[0], y[-1]) == (before, after)


def batches(rank, n):
    after, before = (rank + 1) % n, (rank - 1) % n
    x, y = torch.zeros(2), torch.zeros(2, 2).t()
    operations = [
        dist.P2POp(dist.irecv, x, before),
        dist.P2POp(dist.irecv, y, before),
        dist.P2POp(dist.isend, torch.full((2,), float(rank)), after),
        dist.P2POp(dist.isend, torch.full((2, 2), rank + 0.5), after),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert (x[0], y[0, 0]) == (before, before + 0.5)


def tags_in_any_order(rank, n):
    tags = list(range(6))
    if rank == 0:
        works = [dist.isend(torch.full((3,), float(tag)), 1, tag=tag) for tag in tags]
        for work in works:
            work.wait()
    if rank == 1:
        for tag in (5, 0, 3, 1, 4, 2):
            x = torch.zeros(6)[::2]
            dist.recv(x, 0, tag=tag)
            assert x.tolist() == [float(tag)] * 3


def any_source(rank, n):
    if rank == 2:
        found = set()
        for _ in range(n - 1):
            x = torch.zeros(2)
            source = dist.recv(x)
            assert x.tolist() == [float(source)] * 2
            found.add(source)
        assert found == {0, 1, 3}
    else:
        dist.send(torch.full((2,), float(rank)), 2)


def to_oneself(rank, n):
    x = torch.zeros(2)
    work = dist.irecv(x, rank)
    dist.isend(torch.ones(2), rank).wait()
    work.wait()
    dist.isend(torch.full((2,), 2.0), rank).wait()
    y = torch.zeros(2)
    dist.irecv(y, rank).wait()
    assert (x.tolist(), y.tolist()) == ([1, 1], [2, 2])


def every_dtype(rank, n):
    from ringcoll.torch.options import ROWS

    for kind in [*ROWS, torch.float8_e4m3fnuz]:
        x = torch.full((5,), float(rank == 0)).to(kind)
        if rank == 0:
            dist.send(x, 3)
        elif rank == 3:
            dist.recv(x, 0)
            assert x.to(torch.float32).tolist() == [1.0] * 5, kind
    empty = torch.zeros(0)
    if rank == 0:
        dist.send(empty, 3)
    elif rank == 3:
        dist.recv(empty, 0)


def objects(rank, n):
    found = [None, None]
    if rank == 0:
        dist.send_object_list([{"x": 1}, "y"], 1)
    if rank == 1:
        dist.recv_object_list(found, 0)
        assert found == [{"x": 1}, "y"]


def beside_collectives(rank, n):
    """A message that waits holds up no collective."""
    x = torch.zeros(2)
    work = dist.irecv(x, (rank + 1) % n)
    y = torch.ones(2)
    dist.all_reduce(y)
    dist.barrier()
    dist.send(torch.full((2,), float(rank)), (rank - 1) % n)
    work.wait()
    assert (x[0], y[0]) == ((rank + 1) % n, n)


def a_callback_that_waits_for_a_later_message_is_told(rank, n):
    """Of the same sender, which the thread that runs it would have to meet."""
    for source in (0, None):  # where it is any, the thread is that of who was first
        x, y = torch.zeros(1), torch.zeros(1)
        if rank == 1:
            future = dist.irecv(x, source).get_future().then(lambda _, y=y: dist.recv(y, 0))
        dist.barrier()
        if rank == 0:
            for value in (1.0, 2.0):
                dist.send(torch.full((1,), value), 1)
        if rank == 1:
            with pytest.raises(RuntimeError, match="a callback of a future waits"):
                future.wait()
        if rank == 1:
            while y.item() != 2.0:  # it was posted
                time.sleep(0.01)
            assert x.item() == 1.0
        dist.barrier()


def receives_that_nobody_meets(rank, n):
    """From oneself, and from any rank where there is no other."""

    def groups(seconds):
        how = {"timeout": timedelta(seconds=seconds)}
        mine = [[dist.new_group([q], **how) for q in range(n)][rank] for _ in range(2)]
        return zip([*mine, dist.new_group(**how)], (0, None, rank), strict=True)

    x = torch.zeros(1)

    def posted(group, source):
        return group.recv_anysource([x], 0) if source is None else group.recv([x], source, 0)

    for group, source in groups(0.5):
        with pytest.raises(RuntimeError, match=r" Timed out .*posted no match"):
            posted(group, source).wait()
        dist.destroy_process_group(group)
    for group, source in groups(30):
        work = posted(group, source)
        dist.destroy_process_group(group)
        with pytest.raises(RuntimeError, match=r" closed "):
            work.wait()


def errors_name_the_ranks_of_the_group(rank, n):
    group = dist.new_group([1, 3])
    if rank == 3:
        with pytest.raises(RuntimeError, match="in the group of ranks 1, 3: messages between rank"):
            for _ in range(3):
                dist.send(torch.zeros(3), 1, group=group)
    if rank == 1:
        with pytest.raises(
            RuntimeError,
            match=r"in the group of ranks 1, 3: messages between rank 1 and rank 0, counted as "
            r"rank 0 and rank 1: .*count=3",
        ):
            dist.recv(torch.zeros(2), 3, group=group)
    if rank in (1, 3):
        dist.destroy_process_group(group)


def an_abort_tells_who_waits_for_a_message(rank, n):
    group = dist.new_group([2, 3])
    x = torch.zeros(1)
    if rank == 3:
        dist.send(x, 2, group=group)
        dist.recv(x, 2, group=group)
        group.abort()
    if rank == 2:
        dist.recv(x, 3, group=group)
        dist.send(x, 3, group=group)
        with pytest.raises(RuntimeError, match=r"group of torch\.distributed was abort"):
            dist.recv(x, 3, group=group)
    if rank in (2, 3):
        dist.destroy_process_group(group)


def tensors_that_share_memory_with_themselves(rank, n):
    """Refused before anything moves, so that the group is none the worse."""
    x = torch.zeros(1).expand(4)
    for call in (
        lambda: dist.all_reduce(x),
        lambda: dist.all_gather([x] * n, torch.zeros(4)),
        lambda: dist.recv(x, (rank + 1) % n),
    ):
        with pytest.raises(ValueError, match=r"share memory, as expand\(\) makes it"):
            call()
    dist.broadcast(x if rank == 0 else torch.zeros(4), 0)
    dist.reduce(torch.zeros(4) if rank == 0 else x, 0)


def unequal_ends_fail_and_name_both(rank, n):
    """In a group of its own, which is out of step then."""
    pair = dist.new_group([0, 1])
    if rank < 2:
        x = torch.zeros(3 if rank == 0 else 4)
        with pytest.raises(RuntimeError, match=r"(?s)count=3.*count=4|count=4.*count=3"):
            if rank == 0:
                dist.send(x, 1, group=pair)
                dist.send(x, 1, group=pair)
                dist.send(x, 1, group=pair)
            else:
                dist.recv(x, 0, group=pair)
        with pytest.raises(RuntimeError, match=" closed "):
            dist.all_reduce(x, group=pair)
        dist.destroy_process_group(pair)
