"""One of the processes that train a small model, with DDP's own way and with hooks."""

import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ringcoll
from ringcoll.torch import hooks
from ringcoll.torch_entry import register

STEPS = 4
FOLDER, DEVICE = Path(sys.argv[1]), sys.argv[2]


def train(comm, hook, seen, group=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 300),
        torch.nn.ReLU(),
        torch.nn.Linear(300, 300),
        torch.nn.Linear(300, 1),
    ).to(DEVICE)
    # Small buckets: several of them, which DDP makes anew after the first step.
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.1)
    if seen is not None:

        def noting(state, bucket):
            future, buffer = hook(state, bucket), bucket.buffer()
            reached = state._state.symmetric.lookup(buffer.data_ptr(), buffer.nbytes) is not None
            seen.append((bucket.index(), buffer.numel(), reached))
            return future

        ddp.register_comm_hook(comm, noting)
    elif hook is not None:
        ddp.register_comm_hook(group or comm, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    generator = torch.Generator().manual_seed(comm.rank)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(16, 20, generator=generator).to(DEVICE)
        loss = (ddp(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().numpy().tobytes())
    return losses, found.hexdigest()


def refused(comm):
    """A hook that fails on the worker's thread ends in an error, not in a crash."""
    model = torch.nn.Linear(2, 1)  # on the CPU: only there is a worker
    ddp = DistributedDataParallel(model)

    def failing(_state, bucket):
        def fail():
            raise ringcoll.MachineError("on purpose")

        return hooks._on_worker(comm, bucket.buffer(), fail)

    ddp.register_comm_hook(None, failing)
    try:
        ddp(torch.ones(1, 2)).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def main():
    comm = ringcoll.init(device=DEVICE, timeout=60)
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(comm.device)
    dist.init_process_group(
        "nccl" if DEVICE == "cuda" else "gloo",
        init_method=f"file://{FOLDER}/store",
        rank=comm.rank,
        world_size=comm.nranks,
    )
    said, digests = {}, []
    seen: list[tuple[int, int, bool]] = []
    for name, hook in (("own", None), ("plain", hooks.all_reduce), ("bf16", hooks.bf16_compress)):
        said[name], digest = train(comm, hook, seen if name == "plain" else None)
        digests.append(digest)
    register()
    group = dist.new_group(backend="ringcoll")
    said["group"], digest = train(comm, hooks.all_reduce, None, group)
    said["digests"] = [*digests, digest]
    said["rebuilt"] = seen[: len(seen) // STEPS] != seen[-len(seen) // STEPS :]
    said["reached"] = sorted({reached for _, _, reached in seen})
    said["refused"] = refused(comm) if DEVICE == "cpu" else ""
    (FOLDER / f"{comm.rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()
    comm.close()


main()
