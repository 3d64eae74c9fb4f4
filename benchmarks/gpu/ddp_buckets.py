"""What a bucket costs the host where torch asks for it: in the backward pass of DDP.

::

    python -m benchmarks.gpu.ddp_buckets [--ranks N] [--device cuda|cpu] [--steps 60]
        [--seconds 45] [--commit HASH] [--out FOLDER]

One process a GPU. A model of 24 layers, each a bucket of 256 KiB of float32, is trained by DDP in a
replica for each group; the replicas take their steps in turns, each time in an order of its own.
The host's time of a backward pass, less that of the same model without DDP in that turn, over the
buckets, is what one costs: DDP's own part, the call of the group, the future of its work,
and waiting for that at the end. A Python group that does nothing is the least that a Python group
costs; where ``python -m ringcoll.torch.bridge`` has compiled it, the Python group and, on GPUs,
ringcoll's are timed by the bridge too. Figures are medians, ``_p5`` is the difference of the 5th
percentiles; the slowest rank counts. After the steps all gradients are compared with those by
torch's own backend.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

from benchmarks.gpu.buckets import IDLE, group_without_communication
from benchmarks.gpu.command import begin, slowest
from benchmarks.gpu.processes import Link

__all__ = ["main", "table", "work"]

WIDTH, LAYERS = 256, 24
"""A layer has one weight, of WIDTH x WIDTH elements."""
MIB = WIDTH * WIDTH * 4 / (1 << 20)
WARM = 12
"""Steps before those that count: DDP has rebuilt its buckets then, and times no more steps."""
BARE = "no DDP"
FIGURES = ("bucket_us", "bucket_us_p5")


def model(where: Any) -> Any:
    """The layers, with the same weights on every rank."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    parts = [
        part
        for _ in range(LAYERS)
        for part in (
            nn.LayerNorm(WIDTH, elementwise_affine=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.GELU(),
        )
    ]
    return nn.Sequential(*parts).to(where)


def groups_of(link: Link, where: Any, peer: Any) -> dict[str, Any]:
    """The groups that are compared, by name."""
    import torch.distributed as dist

    from ringcoll.torch import bridge

    rank, n = link.rank, link.nranks
    with mock.patch.object(bridge, "compiled", lambda: None):  # torch's own way
        ours = dist.new_group(backend="ringcoll")
    groups = {
        IDLE: group_without_communication(rank, n, where, bridged=False),
        f"{dist.get_backend(peer)}, group": peer,
        "ringcoll, group": ours,
    }
    if bridge.compiled() is not None:
        groups[f"{IDLE}, bridge"] = group_without_communication(rank, n, where, bridged=True)
        if where.type == "cuda":
            groups["ringcoll, bridge"] = dist.new_group(backend="ringcoll")
    return groups


def times(
    replicas: Mapping[str, Any], where: Any, link: Link, steps: int
) -> dict[str, list[float]]:
    """Seconds of the host in each backward pass that counts, by replica."""
    import torch

    # CPU ranks wait for each other in the pass, which is to be no lateness from before it.
    settle = torch.cuda.synchronize if where.type == "cuda" else link.barrier
    found: dict[str, list[float]] = {name: [] for name in replicas}
    for step in range(WARM + steps):
        for name, replica in random.Random(step).sample([*replicas.items()], len(replicas)):
            replica.zero_grad()
            x = torch.full((8, WIDTH), link.rank + step % 7 + 1.0, device=where)
            x[:, ::3] = 0.5
            loss = replica(x).square().sum()
            settle()
            began = time.perf_counter()
            loss.backward()
            if step >= WARM:
                found[name].append(time.perf_counter() - began)
    return found


def work(link: Link, store: str, device: str, steps: int) -> None:
    """What one rank measures; a message a group."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from ringcoll.torch_entry import register

    register()
    where = torch.device(device, link.rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(link.rank)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device == "cuda" else "gloo"
    store_of = dist.FileStore(store, link.nranks)
    dist.init_process_group(backend, store=store_of, rank=link.rank, world_size=link.nranks)
    groups = groups_of(link, where, dist.group.WORLD)
    replicas = {
        name: DistributedDataParallel(
            model(where),
            process_group=group,
            bucket_cap_mb=MIB,
            gradient_as_bucket_view=True,
            init_sync=False,  # all have the same weights, and groups that do nothing none of others
        )
        for name, group in groups.items()
    }
    replicas[BARE] = model(where)
    found = times(replicas, where, link, steps)
    gradients = {
        name: torch.cat([weight.grad.flatten() for weight in replica.parameters()])
        for name, replica in replicas.items()
    }
    right = gradients[f"{backend}, group"]
    near = {"rtol": 1e-4, "atol": 1e-6 * float(right.abs().max())}  # sums of another order
    for name in groups:
        sizes = replicas[name]._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")
        spent = [ours - bare for ours, bare in zip(found[name], found[BARE], strict=True)]
        early, bare = (sorted(found[each])[steps // 20] for each in (name, BARE))
        wrong = int((~torch.isclose(gradients[name], right, **near)).sum())
        link.send(
            {
                "name": name,
                "bytes": 4 * WIDTH * WIDTH,
                "buckets": len(sizes),
                "wrong": 0 if name.startswith(IDLE) else wrong,
                "bucket_us": statistics.median(spent) / len(sizes) * 1e6,
                "bucket_us_p5": (early - bare) / len(sizes) * 1e6,
            }
        )
    link.barrier()
    dist.destroy_process_group()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a group; 5th percentiles in parentheses."""
    return "\n".join(
        f"{row['name']:<34}{row['bucket_us']:9.1f} ({row['bucket_us_p5']:6.1f}) us a bucket"
        for row in rows
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit status is 1 if a part failed or an element is wrong."""
    parser = argparse.ArgumentParser(description="The host's time of a bucket in DDP.")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: 2 ranks by default"
    )
    parser.add_argument("--steps", type=int, default=60, help="that count (%(default)s)")
    run = begin(parser, argv, "ddp_buckets", torch=True)
    with tempfile.TemporaryDirectory() as folder:
        args = f"{folder}/store", run.options.device, run.options.steps
        run.measure("ranks", work, args, lambda of: run.report.add(slowest(of, *FIGURES)))
    return run.end(table(run.report.rows))


if __name__ == "__main__":
    raise SystemExit(main())
