"""What training is made of: DDP, FSDP2, device meshes, functional collectives, torch.compile."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


def _model(width=32):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 2)
    )


def _data(rank):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))


def _trained(model, batches, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        sum(model(batch).square().mean() for batch in batches).backward()
        optimizer.step()
    return model


def _alone(n):
    """The parameters after the same steps on all ranks' data in one process."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (sum(model(_data(rank)).square().mean() for rank in range(n)) / n).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def _equal_everywhere(tensors, n):
    for tensor in tensors:
        parts = [torch.zeros_like(tensor) for _ in range(n)]
        dist.all_gather(parts, tensor.detach())
        assert all(torch.equal(parts[0], part) for part in parts)


def _check_ddp(rank, n, **how):
    model = DistributedDataParallel(_model(), **how)
    _trained(model, [_data(rank)])
    _equal_everywhere(model.parameters(), n)
    for mine, alone in zip(model.parameters(), _alone(n), strict=True):
        torch.testing.assert_close(mine.detach(), alone)


def ddp(rank, n):
    _check_ddp(rank, n)


def ddp_in_small_buckets(rank, n):
    _check_ddp(rank, n, bucket_cap_mb=1e-4)


def ddp_other_ways(rank, n):
    _check_ddp(rank, n, static_graph=True)
    _check_ddp(rank, n, find_unused_parameters=True, gradient_as_bucket_view=True)


def ddp_with_uneven_inputs(rank, n):
    for unused in (False, True):  # DDP's Python makes a call of its own for unused parameters
        model = DistributedDataParallel(_model(), find_unused_parameters=unused)
        with model.join():
            _trained(model, [_data(rank)], steps=1 + rank)
        _equal_everywhere(model.parameters(), n)


def ddp_counts_the_ranks_that_are_left(rank, n):
    """torch hands the call that counts them on to C++ and forgets it, and waits there for it."""
    for divided_by_all in (False, True):
        model = DistributedDataParallel(torch.nn.Linear(2, 2, bias=False))
        with model.join(divide_by_initial_world_size=divided_by_all):
            for step in range(2 + rank):
                model(torch.ones(1, 2)).sum().backward()
                left = sum(2 + other > step for other in range(n))
                wanted = left / n if divided_by_all else 1.0
                assert model.module.weight.grad.flatten().tolist() == pytest.approx([wanted] * 4)
                model.zero_grad()


def ddp_communication_hook(rank, n):
    model = DistributedDataParallel(_model())

    def hook(_state, bucket):
        work = dist.all_reduce(bucket.buffer().div_(n), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    _trained(model, [_data(rank)])
    for mine, alone in zip(model.parameters(), _alone(n), strict=True):
        torch.testing.assert_close(mine.detach(), alone)


def no_sync(rank, n):
    model = DistributedDataParallel(_model())
    with model.no_sync():
        model(_data(rank)).sum().backward()
    model(_data(rank + n)).sum().backward()
    _equal_everywhere([p.grad for p in model.parameters()], n)


def _check_sharded(rank, n, *, allocate=False, mesh=None):
    model = _model()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
        if allocate:
            layer.set_allocate_memory_from_process_group_for_comm(True)
    _trained(model, [_data(rank)])
    for mine, alone in zip(model.parameters(), _alone(n), strict=True):
        torch.testing.assert_close(mine.full_tensor().detach(), alone)


def fsdp2(rank, n):
    """Trap 10: its all_gather is in place."""
    _check_sharded(rank, n, mesh=init_device_mesh("cpu", (n,)))


def fsdp2_on_memory_of_the_group(rank, n):
    group = dist.group.WORLD
    made = []
    allocate = group._backend._allocate

    def noted(*what):
        tensor = allocate(*what)
        made.append(tensor.data_ptr())
        return tensor

    try:
        group._backend._allocate = noted
        _check_sharded(rank, n, allocate=True, mesh=init_device_mesh("cpu", (n,)))
    finally:
        group._backend._allocate = allocate
    assert made
    symmetric = group._host.comm._state.symmetric
    assert all(symmetric.lookup(pointer, 1) is not None for pointer in made)
    assert len(set(made)) < len(made), "a block that was left is handed out again"


def hybrid_sharding(rank, n):
    mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("replicate", "shard"))
    _check_sharded(rank, n, mesh=mesh)


def allocated_tensors(rank, n):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.supports_tensor_alloc(torch.device("cpu"))
    first = backend.allocate_tensor(98_765, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (first.numel(), first.dtype) == (98_765, torch.bfloat16)
    part = first[10:20]
    place = first.data_ptr()
    del first
    other = backend.allocate_tensor(98_765, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert other.data_ptr() != place, "a view still uses it"
    other.fill_(rank)
    dist.all_reduce(other)
    assert other[-1] == 6
    del part
    again = backend.allocate_tensor(98_765, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert again.data_ptr() == place


def meshes_and_dtensors(rank, n):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(32.0).view(8, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert torch.equal(sharded.full_tensor(), whole)
    assert torch.equal(sharded.redistribute(mesh, [Replicate(), Shard(0)]).full_tensor(), whole)
    product = sharded @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate(), Shard(0)])
    assert isinstance(product, DTensor)
    torch.testing.assert_close(product.full_tensor(), whole @ whole.t())
    x = torch.full((1,), float(rank))
    dist.all_reduce(x, group=mesh["tp"].get_group())
    assert x.item() == (1 if rank < 2 else 5)


def functional_collectives(rank, n):
    group = dist.group.WORLD
    x = torch.full((4,), float(rank))
    assert functional.all_reduce(x, "sum", group).tolist() == [6.0] * 4
    assert functional.broadcast(x, 2, group).tolist() == [2.0] * 4
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(x, n, group.group_name)
    assert torch.ops._c10d_functional.wait_tensor(gathered)[::4].tolist() == [0, 1, 2, 3]
    reduced = torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", n, group.group_name)
    assert torch.ops._c10d_functional.wait_tensor(reduced).tolist() == [6.0]
    sizes = [rank + 1] * n, [q + 1 for q in range(n)]
    sent = torch.full((sum(sizes[1]),), float(rank))
    swapped = functional.all_to_all_single(sent, *sizes, group)
    assert swapped.tolist() == [float(q) for q in range(n) for _ in range(rank + 1)]
    several = functional.all_reduce_coalesced([x, x + 1], "sum", group)
    assert [part[0].item() for part in several] == [6, 10]


def compiled(rank, n):
    group = dist.group.WORLD

    @torch.compile(fullgraph=True, backend="aot_eager")
    def work(x):
        y = functional.all_reduce(x * 2, "sum", group)
        dist.all_reduce(y)
        return y + 1

    assert work(torch.full((3,), float(rank))).tolist() == [49.0] * 3


def data_loaders_that_fork(rank, n):
    class Rows(Dataset):  # type: ignore[misc]
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.full((2,), float(index)), os.getpid()

    dist.all_reduce(torch.ones(2), async_op=True).wait()  # there is a worker thread to lose
    for _ in range(2):
        loader = DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork")
        rows = list(loader)
        assert os.getpid() not in {int(pid) for _, pids in rows for pid in pids}
        x = torch.cat([batch for batch, _ in rows]).sum(0)
        dist.all_reduce(x)
        assert x.tolist() == [4.0 * 28] * 2


def a_forked_child_is_told(rank, n):
    group = dist.group.WORLD
    here, there = os.pipe()
    child = os.fork()
    if not child:
        calls = (
            lambda: dist.all_reduce(torch.ones(1)),
            lambda: dist.isend(torch.ones(1), (rank + 1) % n),
            lambda: dist.barrier(),
        )
        said = [_refusal(call) for call in calls]
        group.shutdown()
        os.write(there, " ".join(said).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(here, 1000) == b"fork fork fork"
    dist.barrier()


def _refusal(call):
    try:
        call()
    except RuntimeError as error:
        return "fork" if "fork" in str(error) else str(error)
    return "nothing"


def what_is_not_supported_says_so(rank, n):
    """Trap 14."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
        with pytest.raises(ValueError, match="GLOO"):  # which alone may do it
            dist.monitored_barrier()
    else:
        dist.monitored_barrier()
    estimator = dist.distributed_c10d._time_estimator(device=torch.device("cpu"))
    with pytest.raises(NotImplementedError):
        estimator.__enter__()
    assert not dist.group.WORLD._get_backend(torch.device("cpu")).supports_splitting
    # torch asks that of the backend only once a GPU is bound to the group.
    with pytest.raises(RuntimeError, match=r"not safe to split|does not support splitting"):
        dist.split_group(split_ranks=[[0, 1], [2, 3]])
    dist.barrier()
