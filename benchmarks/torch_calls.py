"""What a call of torch.distributed costs on the host, by ringcoll and by torch's own backend.

::

    python -m benchmarks.torch_calls [--ranks N] [--bytes 4096] [--device cuda|cpu]
        [--out FOLDER]

On GPUs the host returns when a call is enqueued; on the CPU the time is that of the call. Beside
both backends stand a Python group that does nothing, ``idle``, which is the least that torch costs
any, and ``communicator``, the methods of a ringcoll communicator on the same tensor; on GPUs, where
``python -m ringcoll.torch.bridge`` has compiled it, also a group with the bridge. On GPUs there are
also an all_to_all_single whose splits, and a batch of a send and a receive whose sizes, no call had
before. All take turns in blocks, in the same processes; the figure is the median of the blocks'
means. It prints one JSON line, and writes the figures to ``--out`` as torch_calls.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

import ringcoll
from benchmarks.gpu.buckets import group_without_communication
from benchmarks.needs import require
from benchmarks.record import add_out, save

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing
except ImportError:  # which benchmarks.needs reports before anything of it is used
    torch = dist = None

BLOCKS, CALLS = 21, 200


def ranks_figures(
    rank: int, nranks: int, nbytes: int, device: str, unique_id: str, store: str
) -> None:
    """One rank: times the calls; rank 0 leaves the figures beside the store."""
    from ringcoll.torch import bridge
    from ringcoll.torch_entry import register

    register()
    where = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(where)
    else:
        torch.set_num_threads(1)
    peer = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(peer, init_method=f"file://{store}", rank=rank, world_size=nranks)
    with mock.patch.object(bridge, "compiled", lambda: None):
        groups = {peer: dist.group.WORLD, "ringcoll": dist.new_group(backend="ringcoll")}
    groups["idle"] = group_without_communication(rank, nranks, where, bridged=False)
    if device == "cuda" and bridge.compiled() is not None:
        groups["ringcoll, bridge"] = dist.new_group(backend="ringcoll")
    comm = ringcoll.init(id=unique_id, rank=rank, nranks=nranks, device=device)
    x = torch.zeros(nbytes // 4, device=where)
    calls: dict[str, Callable[[], object]] = {
        f"{name} {kind}": partial(call, x, group)
        for name, group in groups.items()
        for kind, call in _KINDS.items()
    }
    if device == "cuda":
        buffers = torch.zeros(1 << 20, device=where), torch.empty(1 << 20, device=where)
        for name, group in groups.items():
            if name != "idle":
                for kind, exchange in _NEW_KINDS.items():
                    new = partial(exchange, *buffers, count(_LEAST), group)
                    calls[f"{name} {kind}"] = new
    calls["communicator all_reduce"] = lambda: comm.all_reduce(x)
    calls["communicator all_reduce async and wait"] = lambda: comm.all_reduce(
        x, async_op=True
    ).wait()
    found: dict[str, list[float]] = {key: [] for key in calls}
    for block in range(BLOCKS + 2):
        for key, call in calls.items():
            _settle(where)
            began = time.perf_counter()
            for _ in range(CALLS):
                call()
            spent = (time.perf_counter() - began) / CALLS * 1e6
            _settle(where)
            if block >= 2:
                found[key].append(spent)
    if rank == 0:
        rows = {key: round(statistics.median(spent), 2) for key, spent in found.items()}
        with open(f"{store}.json", "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump(rows, file)
    comm.close()
    dist.destroy_process_group()


def _blocking(x: Any, group: Any) -> None:
    dist.all_reduce(x, group=group)


def _asynchronous(x: Any, group: Any) -> None:
    dist.all_reduce(x, group=group, async_op=True).wait()


_KINDS = {"all_reduce": _blocking, "all_reduce async and wait": _asynchronous}


def _exchange(sent: Any, received: Any, counts: Iterator[int], group: Any) -> None:
    ranks, rows = dist.get_world_size(group), next(counts)
    splits, total = [rows] * ranks, rows * ranks
    dist.all_to_all_single(received[:total], sent[:total], splits, splits, group=group)


def _pass_on(sent: Any, received: Any, counts: Iterator[int], group: Any) -> None:
    ranks, rank, rows = dist.get_world_size(group), dist.get_rank(group), next(counts)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    posts = [
        dist.P2POp(dist.isend, sent[:rows], after, group),
        dist.P2POp(dist.irecv, received[:rows], before, group),
    ]
    for work in dist.batch_isend_irecv(posts):
        work.wait()


_LEAST = 1000
_NEW_KINDS = {"all_to_all_single, new splits": _exchange, "send and receive, new sizes": _pass_on}


def _settle(where: Any) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def main(argv: Sequence[str] | None = None) -> None:
    """Start the ranks, print their figures, and record them in ``--out``."""
    parser = argparse.ArgumentParser(description="Host time of torch.distributed's calls.")
    parser.add_argument("--ranks", type=int, default=0, help="0: all GPUs, or 2 on the CPU")
    parser.add_argument("--bytes", type=int, default=4096, dest="nbytes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--commit", help="what is measured, where there is no git")
    add_out(parser)
    given = parser.parse_args(argv)
    wanted = (given.ranks or 1) if given.device == "cuda" else 0
    there = require(parser, gpus=wanted, torch=True, instead="; --device cpu times CPU ranks")
    nranks = given.ranks or there or 2
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        arguments = (nranks, given.nbytes, given.device, ringcoll.unique_id(), store)
        torch.multiprocessing.spawn(ranks_figures, arguments, nranks)
        with open(f"{store}.json", encoding="utf-8") as file:  # noqa: PTH123
            rows = json.load(file)
    content: dict[str, Any] = {
        "ranks": nranks,
        "bytes": given.nbytes,
        "device": given.device,
        "us a call": rows,
    }
    print(json.dumps(content))
    content["torch"] = torch.__version__
    if given.device == "cuda":
        content["gpus"] = [torch.cuda.get_device_name(rank) for rank in range(nranks)]
    if given.commit:
        content["commit"] = given.commit
    save(given.out, "torch_calls", content, ranks=nranks, device=given.device)


if __name__ == "__main__":
    main()
