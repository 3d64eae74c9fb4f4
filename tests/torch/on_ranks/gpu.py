"""The backend on CUDA tensors: every rank has a GPU, rank r the r-th."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ringcoll.torch.options import ROWS

LONG = 200_000_000  # cycles of a kernel that only takes time


def _on(rank, *arguments, **how):
    return torch.full(*arguments, device=torch.device("cuda", rank), **how)


def all_reduce_every_size(rank, n):
    for count in (0, 1, 1000, 300_000, 5_000_000):
        x = torch.arange(count, dtype=torch.float32, device="cuda") % 7 + rank
        dist.all_reduce(x)
        wanted = (torch.arange(count, device="cuda") % 7) * float(n) + n * (n - 1) / 2
        assert torch.equal(x, wanted)


def all_reduce_every_dtype(rank, n):
    for kind in ROWS:
        if kind.is_complex or kind == torch.bool:
            continue
        x = _on(rank, (5,), float(rank + 1)).to(kind)
        dist.all_reduce(x)
        assert x.to(torch.float64).tolist() == [n * (n + 1) / 2] * 5, kind


def ops(rank, n):
    op = dist.ReduceOp
    for kind, wanted in ((op.MAX, n), (op.MIN, 1), (op.AVG, (n + 1) / 2)):
        x = _on(rank, (3,), float(rank + 1))
        dist.all_reduce(x, op=kind)
        assert x.tolist() == [wanted] * 3
    x = _on(rank, (3,), float(rank + 1))
    dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))
    assert x.tolist() == [n * (n + 1) / 4] * 3


def every_other_collective(rank, n):
    x = _on(rank, (5,), float(rank))
    dist.broadcast(x, n - 1)
    assert x.tolist() == [n - 1.0] * 5
    y = _on(rank, (5,), float(rank))
    dist.reduce(y, 0)
    assert y[0].item() == (n * (n - 1) / 2 if rank == 0 else rank)
    parts = [_on(rank, (3,), 0.0) for _ in range(n)]
    dist.all_gather(parts, _on(rank, (3,), float(rank)))
    assert [part[0].item() for part in parts] == list(range(n))
    uneven = [_on(rank, (q + 1,), 0.0) for q in range(n)]
    dist.all_gather(uneven, _on(rank, (rank + 1,), float(rank)))
    assert [part[-1].item() for part in uneven] == list(range(n))
    whole = _on(rank, (n * 1000,), 0.0)
    mine = whole.narrow(0, rank * 1000, 1000).fill_(rank + 1.0)
    dist.all_gather_into_tensor(whole, mine)
    assert whole[::1000].tolist() == [q + 1.0 for q in range(n)]
    out = _on(rank, (2,), 0.0)
    dist.reduce_scatter_tensor(out, torch.arange(2.0 * n, device="cuda"))
    assert out.tolist() == [n * 2.0 * rank, n * (2.0 * rank + 1)]
    swapped = _on(rank, (n,), 0.0)
    dist.all_to_all_single(swapped, torch.arange(float(n), device="cuda") + 10 * rank)
    assert swapped.tolist() == [10.0 * q + rank for q in range(n)]
    rows = _on(rank, (n * (rank + 1),), 0.0)
    sent = torch.cat([_on(rank, (q + 1,), 10.0 * rank + q) for q in range(n)])
    dist.all_to_all_single(rows, sent, [rank + 1] * n, [q + 1 for q in range(n)])
    assert rows.tolist() == [10.0 * q + rank for q in range(n) for _ in range(rank + 1)]
    given = [_on(rank, (2,), q + 0.5) for q in range(n)] if rank == 0 else None
    dist.scatter(out, given, src=0)
    assert out.tolist() == [rank + 0.5] * 2
    found = [_on(rank, (2,), 0.0) for _ in range(n)] if rank == 0 else None
    dist.gather(out, found, dst=0)
    if found is not None:
        assert [part[0].item() for part in found] == [q + 0.5 for q in range(n)]


def strided(rank, n):
    x = torch.arange(24.0, device="cuda").view(4, 6)[:, ::2]
    before = x.clone()
    for later in (False, True):
        work = dist.all_reduce(x, async_op=later)
        if work is not None:
            work.wait()
        before = before * n
        assert torch.equal(x, before)


def asynchronous_behind_a_long_kernel(rank, n):
    """Neither the call nor wait() waits on the host; the streams do."""
    dist.all_reduce(_on(rank, (1 << 20,), 1.0), async_op=True).wait()  # what is made only once
    torch.cuda.synchronize()
    x = _on(rank, (1 << 20,), 0.0)
    torch.cuda._sleep(LONG)
    x.fill_(rank + 1.0)
    work = dist.all_reduce(x, async_op=True)
    assert not work.is_completed()
    work.wait()
    y = x * 2
    future = work.get_future().then(lambda done: done.value()[0] + 1)
    assert y[0].item() == n * (n + 1)
    assert future.wait()[-1].item() == n * (n + 1) / 2 + 1
    assert work.is_completed()


def a_blocking_call_has_a_future_too(rank, n):
    options = dist.AllreduceOptions()
    options.asyncOp = False
    x = _on(rank, (3,), 1.0)
    work = dist.group.WORLD.allreduce([x], options)
    assert work.get_future().wait()[0].tolist() == [float(n)] * 3


def freed_before_it_has_run(rank, n):
    works, sums = [], []
    for turn in range(8):
        x = _on(rank, (1 << 20,), float(turn))
        torch.cuda._sleep(LONG // 20)
        works.append(dist.all_reduce(x, async_op=True))
        sums.append(works[-1].get_future().then(lambda done: done.value()[0].sum()))
        del x
        _on(rank, (1 << 20,), -1.0)
    for work in works:
        work.wait()
    assert [total.wait().item() for total in sums] == [float(t * n * (1 << 20)) for t in range(8)]


def on_a_stream_of_the_caller(rank, n):
    stream = torch.cuda.Stream()
    x = _on(rank, (1000,), 0.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG // 4)
        x.fill_(1)
        dist.all_reduce(x)
        y = x + 1
    stream.synchronize()
    assert y.tolist() == [n + 1.0] * 1000


def receives_before_sends(rank, n):
    after, before = (rank + 1) % n, (rank - 1) % n
    for count in (3, 3_000_000):
        x, mine = _on(rank, (count,), 0.0), _on(rank, (count,), float(rank))
        works = [dist.irecv(x, before), dist.isend(mine, after)]
        for work in works:
            work.wait()
        assert x[-1].item() == before
        batch = [dist.P2POp(dist.irecv, x, after), dist.P2POp(dist.isend, mine, before)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert x[-1].item() == after
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(x, 0)
    with pytest.raises(ValueError, match="source"):
        dist.recv(x)


def barriers_and_objects(rank, n):
    dist.barrier()
    dist.barrier(device_ids=[rank])
    dist.barrier(async_op=True).wait()
    found = [None] * n
    dist.all_gather_object(found, rank)
    assert found == list(range(n))
    x = torch.ones(2)
    dist.all_reduce(x)  # CPU tensors beside
    assert x.tolist() == [n, n]


def graphs(rank, n):
    x = _on(rank, (4096,), 1.0)
    for later in (False, True):
        dist.all_reduce(x, async_op=later)  # what is made only once
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work = dist.all_reduce(x, async_op=later)
            if work is not None:
                work.wait()
            x.mul_(1 / n)
        for turn in range(3):
            x.fill_(rank + turn)
            graph.replay()
            assert x[0].item() == pytest.approx((n - 1) / 2 + turn)
        dist.barrier()


def _model():
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)
    return torch.nn.Sequential(*layers).cuda()


def _data(rank):
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(rank)).cuda()


def _step(model, batches, optimizer, count):
    optimizer.zero_grad()
    (sum(model(batch).square().mean() for batch in batches) / count).backward()
    optimizer.step()


def _alone(n):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        _step(model, [_data(rank) for rank in range(n)], optimizer, n)
    return [p.detach() for p in model.parameters()]


def ddp(rank, n):
    model = DistributedDataParallel(_model(), device_ids=[rank], bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        _step(model, [_data(rank)], optimizer, 1)
    for mine, alone in zip(model.parameters(), _alone(n), strict=True):
        torch.testing.assert_close(mine.detach(), alone)
        parts = [torch.zeros_like(mine) for _ in range(n)]
        dist.all_gather(parts, mine.detach())
        assert all(torch.equal(parts[0], part) for part in parts)


def fsdp2(rank, n):
    for allocate in (False, True):
        model = _model()
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=init_device_mesh("cuda", (n,)))
            if allocate:
                layer.set_allocate_memory_from_process_group_for_comm(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            _step(model, [_data(rank)], optimizer, 1)
        for mine, alone in zip(model.parameters(), _alone(n), strict=True):
            torch.testing.assert_close(mine.full_tensor().detach(), alone)


def memory_of_the_group(rank, n):
    device = torch.device("cuda", rank)
    backend = dist.group.WORLD._get_backend(device)
    assert not backend.supports_splitting
    x = backend.allocate_tensor(100_000, dtype=torch.bfloat16, device=device)
    symmetric = dist.group.WORLD._device.comm._state.symmetric
    assert symmetric.lookup(x.data_ptr(), x.nbytes) is not None
    x.fill_(rank + 1)
    dist.all_reduce(x)
    assert x[-1].item() == n * (n + 1) / 2
    place = x.data_ptr()
    del x
    again = backend.allocate_tensor(100_000, dtype=torch.bfloat16, device=device)
    assert again.data_ptr() == place


def tensors_that_come_back(rank, n):
    """They become reachable without being asked to; what a rank reaches alone does no harm."""
    group = dist.new_group()

    def reduced(x, number, later):
        x.fill_(rank + number)
        work = dist.all_reduce(x, group=group, async_op=later)
        if work is not None:
            work.wait()
        wanted = n * number + n * (n - 1) / 2
        assert int((x != wanted).sum()) == 0, (number, x.numel(), later)

    sizes = (300_000, 5_000_003, 7_000_001)
    buckets = [torch.empty(size, device="cuda") for size in sizes]
    for number in range(1, 8):
        for x in buckets:
            reduced(x, number, later=number % 2 == 0)
    registered = group._device.comm._state.cuda.auto_register
    # Over NVLink the smallest goes by LL128, which stages.
    assert all(registered.mapped_address(x.data_ptr(), x.nbytes) for x in buckets[1:])
    # Other collectives know nothing of it: a rank may come with a tensor of another kind.
    x = buckets[1]
    other = x if rank == 0 else torch.empty_like(x)
    other.fill_(rank + 7)
    dist.broadcast(other, 0, group=group)
    assert int((other != 7).sum()) == 0
    # One rank comes with another tensor, then all do again what they did.
    for number in range(40, 52):
        for k, x in enumerate(buckets):
            other = torch.empty(sizes[k], device="cuda") if number % n == rank else x
            reduced(other, number, later=number % 3 == 0)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    for x in buckets:
        x.fill_(1)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        for x in buckets[:2]:
            dist.all_reduce(x, group=group)
    for replays in range(1, 4):
        graph.replay()
        reduced(buckets[2], replays, later=True)
        assert all(int((x != float(n**replays)).sum()) == 0 for x in buckets[:2])
    # Nobody keeps the memory; what comes to its place is known for something else.
    del buckets, x, other, graph
    torch.cuda.empty_cache()
    for number in range(1, 5):
        last = torch.empty(sizes[2], device="cuda")
        reduced(last, number, later=True)
        reduced(last, number, later=False)
        del last
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group(group)


def memory_that_is_given_back(rank, n):
    """Allocations are freed and made anew; what was freed is unmapped, and CUDA has it again."""
    group = dist.new_group()
    free = []
    for number in range(30):
        x = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        # The second call registers, the third maps and says so, the fourth knows it of all; a rank
        # that is ahead of the others needs more.
        for _ in range(6):
            x.fill_(number)
            dist.all_reduce(x, group=group)
            assert int((x != number * n % 256).sum()) == 0
        registered = group._device.comm._state.cuda.auto_register
        assert registered.mapped_address(x.data_ptr(), x.nbytes) != 0
        del x
        dist.barrier()
        torch.cuda.empty_cache()
        dist.barrier()
        free.append(torch.cuda.mem_get_info()[0])
        registered._polls = -1  # search now
    assert len(registered._mapped) <= 3 * (n - 1)
    assert free[0] - free[-1] < 10 * (64 << 20)
    dist.destroy_process_group(group)


def a_message_between_calls(rank, n):
    """Rank 0's call returns before another has come, which waits for what rank 0 does then."""
    group = dist.new_group()
    news, x = torch.zeros(1), torch.empty(5_000_000, device="cuda")  # more than by LL128
    # The ranks of a group meet in its first call on the GPU: no barrier is one where they share it.
    dist.all_reduce(x[:1], group=group)
    for number in range(1, 12):
        x.fill_(number)
        torch.cuda.synchronize()
        if rank:
            dist.recv(news, rank - 1)
        dist.all_reduce(x, group=group)
        if rank < n - 1:
            dist.send(news, rank + 1)
        assert int((x != number * n).sum()) == 0
    registered = group._device.comm._state.cuda.auto_register
    assert registered.mapped_address(x.data_ptr(), x.nbytes) != 0
    dist.barrier()
    dist.destroy_process_group(group)


def a_rank_that_does_not_come(rank, n):
    # Long enough for four ranks that make their group beside thirty other tests.
    group = dist.new_group(timeout=timedelta(seconds=5))
    x = _on(rank, (1000,), 1.0)
    dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r" (Timed out|closed|timeout) "):
            for _ in range(2):
                dist.all_reduce(x, group=group)
                torch.cuda.synchronize()
        with pytest.raises(RuntimeError, match=" closed "):
            dist.all_reduce(x, group=group)
    dist.barrier()
    dist.destroy_process_group(group)


def another_device_is_refused(rank, n):
    x = torch.ones(2, device=torch.device("cuda", (rank + 1) % n))
    dist.all_reduce(_on(rank, (2,), 1.0))
    with pytest.raises(ValueError, match="one device"):
        dist.all_reduce(x)
    dist.barrier()
