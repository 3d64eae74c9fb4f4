"""One rank of torch.distributed under mpiexec, on a node that it names itself.

``nodes_program.py NODES DEVICE FOLDER``: the node of each rank, and "cpu" or "cuda".
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ringcoll.torch import hooks
from ringcoll.torch_entry import register


def collectives(rank: int, n: int, where: torch.device) -> None:
    x = torch.full((100_000,), float(rank), device=where)
    dist.all_reduce(x)
    assert x.tolist() == [n * (n - 1) / 2] * len(x)
    later = dist.all_reduce(x, async_op=True)
    later.wait()
    assert x[-1].item() == n * n * (n - 1) / 2
    parts = torch.zeros(3 * n, device=where)
    dist.all_gather_into_tensor(parts, torch.full((3,), float(rank), device=where))
    assert parts.tolist() == [float(peer) for peer in range(n) for _ in range(3)]
    dist.broadcast(x, n - 1)
    dist.barrier()


def groups(rank: int, n: int, where: torch.device) -> None:
    """Inside a node, across nodes, and in another order than MPI's."""
    for members in ([0, 1], [n - 1, 0], list(range(n))[::-1]):
        group = dist.new_group(members)
        if rank in members:
            x = torch.full((50,), float(rank), device=where)
            dist.all_reduce(x, group=group)
            assert x[0].item() == sum(members)
            y = torch.full((4,), float(rank), device=where)
            dist.broadcast(y, members[0], group=group)
            assert y.tolist() == [members[0]] * 4
            dist.destroy_process_group(group)


def messages(rank: int, n: int, where: torch.device) -> None:
    right, left = (rank + 1) % n, (rank - 1) % n
    x, y = torch.full((9,), float(rank), device=where), torch.zeros(9, device=where)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)]
    )
    for work in works:
        work.wait()
    assert y.tolist() == [float(left)] * 9


def two_alone(rank: int, n: int, where: torch.device) -> None:
    """The first and the last rank, in a group whose others make no call; MPI runs already."""
    group = dist.new_group()
    x = torch.full((9,), float(rank), device=where)
    if rank == 0:
        dist.send(x, n - 1, group=group)
    elif rank == n - 1:
        dist.recv(x, 0, group=group)
        assert x.tolist() == [0.0] * 9
    dist.barrier()
    dist.destroy_process_group(group)


def training(rank: int, n: int, where: torch.device) -> None:
    for hook in (None, hooks.all_reduce):
        torch.manual_seed(0)
        model = torch.nn.Linear(300, 30).to(where)
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        if hook is not None:
            parallel.register_comm_hook(None, hook)
        inputs = torch.randn(n, 8, 300, generator=torch.Generator().manual_seed(1)).to(where)
        parallel(inputs[rank]).square().mean().backward()
        mine = model.weight.grad.clone()
        model.zero_grad()
        sum(model(part).square().mean() / n for part in inputs).backward()
        torch.testing.assert_close(mine, model.weight.grad)


def main() -> None:
    nodes, device, folder = sys.argv[1].split(","), sys.argv[2], Path(sys.argv[3])
    rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    os.environ["RINGCOLL_NODE"] = nodes[rank]
    register()
    torch.set_num_threads(1)
    where = torch.device("cpu")
    if device == "cuda":
        where = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(where)
    dist.init_process_group(
        "ringcoll",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=len(nodes),
        timeout=timedelta(seconds=60),
    )
    for part in (collectives, groups, two_alone, messages, training):
        part(rank, len(nodes), where)
    group = dist.group.WORLD
    comm = (group._host if device == "cpu" else group._device).comm
    said = {"rank": rank, "node": comm.node, "nnodes": comm.nnodes}
    dist.barrier()
    dist.destroy_process_group()
    os.write(1, (json.dumps(said) + "\n").encode())


if __name__ == "__main__":
    main()
