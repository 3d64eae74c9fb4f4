"""Messages of CUDA tensors of which not all ranks know: three ranks, of which two have a GPU each.

The third's is one of theirs where there are but two, and does nothing there.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist

A_GPU_EACH = ("what_began_between_two_stays_there", "a_ring_that_receives_first")
"""Where the third has something to do."""

LONG = 200_000_000  # cycles of a kernel that only takes time


@contextlib.contextmanager
def _group(ranks=None):
    group = dist.new_group(ranks)
    yield group
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        torch.cuda.synchronize()
        dist.destroy_process_group(group)


def _full(count, value):
    return torch.full((count,), float(value), device="cuda")


def two_of_three(rank, n):
    with _group() as group:
        for count in (0, 3, 300_000, 5_000_000):
            x = _full(count, rank)
            if rank == 0:
                dist.send(x, 1, group=group)
                dist.recv(x, 1, group=group)
                assert (x == 8).all()
            if rank == 1:
                dist.recv(x, 0, group=group)
                assert (x == 0).all()
                dist.send(x.fill_(8), 0, group=group)
        assert group._device is None
        assert (group._pairs is None) == (rank == 2)


def two_that_receive_first(rank, n):
    with _group() as group:
        if rank < 2:
            x = _full(2000, -1)[::2]
            works = [dist.irecv(x, 1 - rank, group=group)]
            works += [dist.isend(_full(1000, rank), 1 - rank, group=group)]
            for work in works:
                work.wait()
            assert x.tolist() == [1.0 - rank] * 1000


def in_order_with_the_callers_stream(rank, n):
    """Also what was posted before there was a communicator."""
    with _group() as group:
        for turn in range(3):
            x = _full(1 << 20, -1)
            torch.cuda._sleep(LONG // 4)
            if rank == 0:
                x.fill_(turn)
                work = dist.isend(x, 1, group=group)
                work.wait()
                x.fill_(-2)
            elif rank == 1:
                work = dist.irecv(x, 0, group=group)
                work.wait()
                x += 1
                assert (x == turn + 1).all()


def with_oneself(rank, n):
    with _group() as group:
        if rank == 0:
            for count in (3, 3_000_000):
                x = _full(count, -1)
                works = [dist.irecv(x, 0, group=group), dist.isend(_full(count, 4), 0, group=group)]
                for work in works:
                    work.wait()
                assert (x == 4).all()


def _swap(group, rank, peer):
    x = _full(1000, -1)
    parts = [(dist.irecv, x), (dist.isend, _full(1000, rank))]
    operations = [dist.P2POp(end, y, peer, group=group) for end, y in parts]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert x.tolist() == [float(peer)] * 1000


def batches_of_some_behind_a_barrier(rank, n):
    """As PyTorch's own tests have it, whose barrier comes before any rank has used a GPU."""
    with _group() as group:
        dist.barrier(group=group)
        if rank == 0:
            _swap(group, 0, 0)
        if rank < 2:
            _swap(group, rank, 1 - rank)


def a_barrier_opens_the_group(rank, n):
    for named in (None, [rank]):
        with _group([0, 1]) as group:
            if rank > 1:
                continue
            x = _full(5, rank)
            assert group._device is None
            dist.barrier(group=group, device_ids=named, async_op=named is None)
            if rank == 1:
                _swap(group, 1, 1)
            dist.barrier(group=group)
            assert group._device is not None
            assert group._pairs is None
            dist.all_reduce(x, group=group)
            assert x.tolist() == [1.0] * 5


def what_began_between_two_stays_there(rank, n):
    with _group() as group:
        for turn in range(3):
            if rank == 0:
                works = [dist.isend(_full(1000, turn + k), 1, group=group) for k in range(2)]
                for work in works:
                    work.wait()
            elif rank == 1:
                for k in range(2):
                    x = _full(1000, -1)
                    dist.recv(x, 0, group=group)
                    assert (x == turn + k).all()
            y = _full(7, rank)
            dist.all_reduce(y, group=group)
            assert y.tolist() == [3.0] * 7
            _swap(group, rank, (2, 1, 0)[rank])


def a_ring_that_receives_first(rank, n):
    with _group() as group:
        x = _full(100_000, -1)
        works = [dist.irecv(x, (rank - 1) % n, group=group)]
        works += [dist.isend(_full(100_000, rank), (rank + 1) % n, group=group)]
        for work in works:
            work.wait()
        assert (x == (rank - 1) % n).all()
        assert group._device is None
