"""Subgroups, and groups that end or fail."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll.torch.group import ProcessGroupRingcoll


def subgroups(rank, n):
    group, _ = dist.new_subgroups(2)
    x = torch.full((2,), float(rank))
    dist.all_reduce(x, group=group)
    assert x.tolist() == [1.0 if rank < 2 else 5.0] * 2
    odd = dist.new_group([3, 1])
    if rank in (1, 3):
        y = torch.full((1,), float(rank))
        dist.broadcast(y, src=3, group=odd)
        assert y.item() == 3
    alone = dist.new_group([2])
    if rank == 2:
        dist.all_reduce(x, group=alone)
        dist.barrier(group=alone)
        assert x[0] == 5
    for made in (group, odd, alone):
        if made is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(made)


def local_synchronization(rank, n):
    # Each rank makes one: torch 2.15 counts them, and names later groups of all by that count.
    group = dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True)
    x = torch.full((1,), float(rank))
    dist.all_reduce(x, group=group)
    assert x.item() == 2 * (rank % 2) + 2
    dist.destroy_process_group(group)


def names_and_ranks(rank, n):
    group = dist.new_group([1, 0, 3, 2], group_desc="mine")
    assert dist.get_backend(group) == "ringcoll"
    assert group.name() == group.getBackendName() == "ringcoll"
    assert (group.rank(), group.size()) == (dist.get_rank(group), 4)
    assert group.group_desc == "mine"
    assert group.group_name == dist.group.WORLD.group_name or group.group_name
    backend = group._get_backend(torch.device("cuda", 0))
    assert not backend.supports_splitting  # trap 6
    assert not backend.supports_coalescing
    assert backend.name() == "ringcoll"
    assert group.bound_device_id is None
    dist.destroy_process_group(group)


def options(rank, n):
    for given in ({"algorithm": "ring", "slices": 2}, ringcoll.Config(slices=2)):
        group = dist.new_group(pg_options=given)
        x = torch.full((1000,), float(rank))
        dist.all_reduce(x, group=group)
        assert x[0] == 6
        dist.destroy_process_group(group)
    kernels: Any = {"max_sms": 132, "protocol": "LL", "engine": "copy"}  # of its tensors on GPUs
    for given in (kernels, ringcoll.Config(**kernels)):
        group = dist.new_group(pg_options=given)
        x = torch.full((3,), float(rank))
        dist.all_reduce(x, group=group)
        assert x.tolist() == [6] * 3
        dist.destroy_process_group(group)
    group = dist.new_group(pg_options={"algorithm": "ring", "deterministic": True})
    for _ in range(2):  # refused before anything moves, so the group goes on
        with pytest.raises(RuntimeError, match="not deterministic"):
            dist.all_reduce(torch.ones(8), group=group)
    dist.barrier(group=group)
    dist.destroy_process_group(group)
    with pytest.raises(TypeError, match="pg_options"):
        dist.new_group(pg_options=object())
    with pytest.raises(TypeError, match=r"pg_options: .* no option 'slice'; did you mean 'slices'"):
        dist.new_group(pg_options={"slice": 2})
    dist.barrier()


def monitored_barrier(rank, n):
    group = dist.new_group()
    group.monitored_barrier(timedelta(seconds=20))
    if rank != 2:
        with pytest.raises(RuntimeError, match=r"Timed out.*rank 2\b"):
            group.monitored_barrier(timedelta(seconds=0.5), wait_all_ranks=True)
    dist.barrier()


def groups_of_one_name(rank, n):
    """torch may name a group like an earlier one of other ranks, which had the same store."""
    store = dist.PrefixStore("one name", dist.distributed_c10d._get_default_store())
    for ranks in ((0, 1), (1, 2), tuple(range(n)), (0, 2), tuple(range(n))):
        if rank in ranks:
            mine = ranks.index(rank)
            group = ProcessGroupRingcoll(store, mine, len(ranks), timedelta(seconds=20))
            x = torch.full((3,), float(rank))
            group.allreduce([x]).wait()
            assert x[0] == sum(ranks)
            group.shutdown()
        dist.barrier()


def deterministic(rank, n):
    """A sum is the left fold in rank order, whatever is reduced together."""
    group = dist.new_group(pg_options={"deterministic": True})
    values = [torch.randn(5000, generator=torch.Generator().manual_seed(q)) for q in range(n)]
    wanted = values[0] + values[1] + values[2] + values[3]
    for first, last in ((0, 5000), (17, 1234)):
        x = values[rank][first:last].clone()
        dist.all_reduce(x, group=group)
        assert torch.equal(x, wanted[first:last])
    dist.destroy_process_group(group)


def a_rank_that_does_not_come(rank, n):
    """Trap 13: the error is torch's for a timeout, and the group takes no more calls."""
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    if rank != 3:
        with pytest.raises(RuntimeError, match=r" (Timed out|closed|timeout) ") as caught:
            dist.all_reduce(x, group=group)
        assert isinstance(caught.value, dist.DistBackendError)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"(?s) closed .*out of step"):
            dist.all_reduce(x, group=group)
        with pytest.raises(RuntimeError, match=" closed "):
            dist.barrier(group=group)
        with pytest.raises(RuntimeError, match=" closed "):
            dist.send(x, (rank + 1) % 3, group=group)
        assert time.monotonic() - began < 4  # three waits would take 4.5 s
    dist.barrier()
    dist.destroy_process_group(group)


def a_first_call_to_which_a_rank_does_not_come(rank, n):
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 1:
        with pytest.raises(RuntimeError, match=r"(?s) Timed out .*rank"):
            dist.barrier(group=group)
    dist.barrier()
    dist.destroy_process_group(group)


def a_barrier_with_a_timeout_of_its_own(rank, n):
    group = dist.new_group()
    dist.barrier(group=group)
    if rank == 0:
        with pytest.raises(RuntimeError, match=" Timed out "):
            group.barrier(_barrier_options(0.3)).wait()
    dist.barrier()
    dist.destroy_process_group(group)


def _barrier_options(seconds):
    options = dist.distributed_c10d.BarrierOptions()
    options.timeout = timedelta(seconds=seconds)
    options.asyncOp = False
    return options


def an_asynchronous_failure_reaches_the_future(rank, n):
    group = dist.new_group(timeout=timedelta(seconds=1))
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    if rank == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        then = work.get_future().then(lambda done: done.value()[0])
        with pytest.raises(RuntimeError, match=r" (Timed out|closed) "):
            then.wait()
        with pytest.raises(RuntimeError, match=r" (Timed out|closed) "):
            work.wait()
        assert not work.is_success()
        assert isinstance(work.exception(), Exception)
    dist.barrier()
    dist.destroy_process_group(group)


def a_failure_under_the_reducer_is_an_error_and_no_crash(rank, n):
    """Trap 2: an exception in a Python future kills DDP's process."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3), process_group=group)
    model(torch.randn(2, 3)).sum().backward()
    if rank != 2:
        with pytest.raises(RuntimeError, match=r" (Timed out|closed|timeout) "):
            model(torch.randn(2, 3)).sum().backward()
    dist.barrier()
    dist.destroy_process_group(group)


def ranks_that_differ(rank, n):
    group = dist.new_group()
    x = torch.ones(2 + (rank == 1))
    with pytest.raises(RuntimeError, match=r"(?s)count=2.*count=3|count=3.*count=2"):
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, group=group)
    dist.barrier()
    dist.destroy_process_group(group)


def an_abort_reaches_the_others(rank, n):
    group = dist.new_group()
    dist.barrier(group=group)
    if rank == 0:
        group.abort()
    else:
        with pytest.raises(RuntimeError, match=r" closed .*rank 0"):
            for _ in range(2):
                dist.barrier(group=group)
    dist.barrier()
    dist.destroy_process_group(group)
    group.shutdown()  # again does nothing
    group.abort()


def messages_under_way_end_with_their_group(rank, n):
    group = dist.new_group()
    work = dist.irecv(torch.zeros(2), (rank + 1) % n, group=group)
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError, match=" closed "):
        work.wait()
    dist.barrier()


def one_group_many_times(rank, n):
    """Every group has keys of its own in a store that outlives them all."""
    for turn in range(5):
        group = dist.new_group()
        x = torch.full((1,), float(turn))
        dist.all_reduce(x, group=group)
        assert x.item() == turn * n
        dist.destroy_process_group(group)
