"""The shapes in which groups in C++ take their calls, of which DDP uses some."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C._distributed_c10d import AllgatherOptions

import ringcoll

MINUTE = timedelta(minutes=1)


def _of(rank, count=2):
    return torch.full((count,), float(rank))


def in_place(rank, n):
    group, op = dist.group.WORLD, dist.ReduceOp
    summed, largest, of_two = [6.0, 6.0], [3.0, 3.0], [2.0, 2.0]
    wanted = {
        lambda x: group.allreduce(x): summed,
        lambda x: group.allreduce([x]): summed,
        lambda x: group.allreduce((x,)): summed,
        lambda x: group.allreduce(x, op.MAX): largest,
        lambda x: group.allreduce([x], op.MAX, MINUTE): largest,
        lambda x: group.allreduce(tensor=x, op=op.MAX, timeout=MINUTE): largest,
        lambda x: group.allreduce(tensors=[x], opts=dist.AllreduceOptions()): summed,
        lambda x: group.broadcast(x, 2): of_two,
        lambda x: group.broadcast(x, 2, MINUTE): of_two,
        lambda x: group.broadcast(tensor=x, root=2): of_two,
        lambda x: group.broadcast([x]): [0.0, 0.0],
        lambda x: group.reduce(x, 1): summed,
        lambda x: group.reduce(x, 1, op.MAX): largest,
        lambda x: group.reduce(x, root=1, op=op.MAX, timeout=MINUTE): largest,
    }
    for number, (call, values) in enumerate(wanted.items()):
        x = _of(rank)
        work = call(x)
        assert isinstance(work, dist.Work)
        work.wait()
        if number < 11 or rank == 1:
            assert x.tolist() == values, number


def lists(rank, n):
    group, op = dist.group.WORLD, dist.ReduceOp
    for timeout in ((), (MINUTE,)):
        parts = [torch.zeros(2) for _ in range(n)]
        group.allgather(parts, _of(rank), *timeout).wait()
        assert [part[0].item() for part in parts] == [0, 1, 2, 3]
        parts = [torch.zeros(2) for _ in range(n)] if rank == 2 else []
        group.gather(parts, _of(rank), 2, *timeout).wait()
        assert [part[0].item() for part in parts] == [0, 1, 2, 3] * (rank == 2)
        x = torch.zeros(2)
        group.scatter(x, [_of(q + 1) for q in range(n)] * (rank == 2), 2, *timeout).wait()
        assert x.tolist() == [rank + 1] * 2
        x = torch.zeros(2)
        group.reduce_scatter(x, [_of(q + rank) for q in range(n)], op.MAX, *timeout).wait()
        assert x.tolist() == [rank + 3] * 2
        x = torch.zeros(n)
        group.alltoall_base(x, torch.full((n,), float(rank)), [], [], *timeout).wait()
        assert x.tolist() == [0, 1, 2, 3]
        group.barrier(*timeout).wait()
    parts = [torch.zeros(2) for _ in range(n)]
    group.allgather(output_tensors=parts, input_tensor=_of(rank), timeout=MINUTE).wait()
    assert parts[3].tolist() == [3, 3]
    x = torch.zeros(2)
    group.reduce_scatter(output=x, input=[_of(rank)] * n, op=op.SUM).wait()
    assert x.tolist() == [6, 6]
    group.scatter(output_tensor=x, input_tensors=parts * (rank == 0), root=0).wait()
    assert x.tolist() == [rank] * 2
    targets = [torch.zeros(1) for _ in range(n)]
    group.alltoall(targets, list(_of(rank, n).split(1)), timeout=MINUTE).wait()
    assert [target.item() for target in targets] == [0, 1, 2, 3]
    group.barrier(timeout=MINUTE).wait()


def messages_by_name(rank, n):
    group = dist.group.WORLD
    x = torch.zeros(2)
    work = group.recv([x], srcRank=(rank + 1) % n, tag=3)
    group.send([_of(rank)], dstRank=(rank - 1) % n, tag=3).wait()
    work.wait()
    assert x.tolist() == [(rank + 1) % n] * 2


def beside_gloo(rank, n):
    """What is passed on keeps its shape."""
    group = dist.new_group(backend="cuda:ringcoll,cpu:gloo")
    for how in ({}, {"op": dist.ReduceOp.SUM, "timeout": MINUTE}):
        x = _of(rank)
        group.allreduce(tensor=x, **how).wait()
        assert x.tolist() == [6, 6]
    parts = [torch.zeros(2) for _ in range(n)]
    group.allgather(parts, _of(rank)).wait()
    assert parts[3].tolist() == [3, 3]
    work = group.recv([x], (rank + 1) % n, tag=3)
    group.send([_of(rank)], (rank - 1) % n, tag=3).wait()
    work.wait()
    assert x.tolist() == [(rank + 1) % n] * 2
    group.barrier(MINUTE).wait()
    dist.destroy_process_group(group)


def every_collective_beside_gloo(rank, n):
    """Gloo itself lacks the names of most of them, which its group has."""
    group = dist.new_group(backend="cuda:ringcoll,cpu:gloo")
    x, total, whole = _of(rank, n), float(sum(range(n))), torch.zeros(n * n)
    dist.all_gather_into_tensor(whole, x, group=group)
    assert whole.tolist() == [float(k) for k in range(n) for _ in range(n)]
    one = torch.zeros(1)
    dist.reduce_scatter_tensor(one, x, group=group)
    assert one.tolist() == [total]
    out = torch.zeros(n)
    dist.all_to_all_single(out, x, group=group)
    assert out.tolist() == [*map(float, range(n))]
    assert functional.all_gather_tensor(x, 0, group).tolist() == whole.tolist()
    assert functional.reduce_scatter_tensor(x, "sum", 0, group).tolist() == [total]
    assert functional.all_reduce(x, "sum", group).tolist() == [total] * n
    parts = [torch.zeros(n) for _ in range(n)]
    dist.all_gather(parts, x, group=group)
    assert parts[2].tolist() == [2.0] * n
    dist.reduce_scatter(one, list(x.split(1)), op=dist.ReduceOp.MAX, group=group)
    assert one.tolist() == [n - 1.0]
    dist.scatter(one, list(torch.arange(float(n)).split(1)) * (rank == 0), group=group)
    assert one.tolist() == [float(rank)]
    dist.gather(one, list(out.split(1)) if rank == 0 else None, group=group)
    dist.broadcast(x, 1, group=group)
    assert x.tolist() == [1.0] * n
    dist.reduce(x, 0, group=group)
    assert rank != 0 or x.tolist() == [float(n)] * n
    dist.destroy_process_group(group)


def others_are_refused(rank, n):
    group = dist.group.WORLD
    with pytest.raises(TypeError, match="all_reduce: opts is 5 where AllreduceOptions"):
        group.allreduce(torch.ones(1), 5)
    with pytest.raises(TypeError, match="reduce: op is 5 where ReduceOptions"):
        group.reduce(torch.ones(1), 0, op=5)
    with pytest.raises(TypeError, match=r"SUM.* where BroadcastOptions"):
        group.broadcast(torch.ones(1), dist.ReduceOp.SUM)
    with pytest.raises(TypeError, match="'a' where GatherOptions"):
        group.gather([], torch.ones(1), "a")
    dist.barrier()


def lists_of_unequal_length_are_refused_before_anything_moves(rank, n):
    group, x = dist.group.WORLD, torch.ones(2)
    with pytest.raises(ValueError, match="all_gather of 2 inputs has 1 outputs"):
        group.allgather_into_tensor_coalesced([x.repeat(n)], [x, x])
    with pytest.raises(ValueError, match="reduce_scatter of 1 inputs has 2 outputs"):
        group.reduce_scatter_tensor_coalesced([x, x], [x.repeat(n)])
    with pytest.raises(ValueError, match="all_to_all: input has no rows"):
        group.alltoall_base(x, torch.tensor(1.0), [2] + [0] * (n - 1), [1] + [0] * (n - 1))
    dist.barrier()


def options_of_another_call_are_refused(rank, n):
    group, x = dist.group.WORLD, torch.ones(2)
    calls = {
        "all_reduce: opts is BroadcastOptions where AllreduceOptions": lambda: group.allreduce(
            [x], dist.BroadcastOptions()
        ),
        "broadcast: opts is AllreduceOptions where BroadcastOptions": lambda: group.broadcast(
            [x], dist.AllreduceOptions()
        ),
        # These have every option that the call would look at.
        "broadcast: opts is GatherOptions where BroadcastOptions": lambda: group.broadcast(
            [x], dist.GatherOptions()
        ),
        "barrier: opts is AllgatherOptions where BarrierOptions": lambda: group.barrier(
            AllgatherOptions()
        ),
        "all_gather: opts is GatherOptions where AllgatherOptions": lambda: (
            group.allgather_coalesced([[x]] * n, [x], dist.GatherOptions())
        ),
        "all_reduce_coalesced: opts is 5": lambda: group.allreduce_coalesced([x], 5),
        "reduce_scatter: opts is BroadcastOptions": lambda: group.reduce_scatter_tensor_coalesced(
            [x], [x.repeat(n)], dist.BroadcastOptions()
        ),
    }
    for words, call in calls.items():
        with pytest.raises(ringcoll.ArgumentTypeError, match=words):
            call()
    dist.barrier()
