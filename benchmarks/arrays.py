"""What the array that is passed costs: kept or made for the call, symmetric or plain memory.

::

    python -m benchmarks.arrays [--ranks N] [--out FOLDER]

Two tables of eager calls on GPUs. The first is the host's time until a call of 256 bytes returns,
with the array object of the call before and with one made for the call. The second is the GPU's
time of a call by size, with symmetric memory and with plain memory of torch, which earlier calls
have used. NCCL and an empty kernel take turns with ringcoll in the same processes; a figure is the
median of the blocks' means. Every element is checked. Other benchmarks hold one array object and
symmetric memory fixed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.gpu.timer import host_us
from benchmarks.needs import require
from benchmarks.record import add_out, save

BLOCKS, CALLS, WARM = 15, 100, 6
SIZES = (64 << 10, 1 << 20, 8 << 20, 16 << 20, 64 << 20, 512 << 20)
NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SMALL = 256
Calls = dict[str, Callable[[], object]]


def ranks_figures(rank: int, nranks: int, folder: str) -> None:
    """One rank: time the calls; rank 0 leaves the figures in the folder."""
    import torch
    import torch.distributed as dist

    import ringcoll

    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", nranks)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=nranks)

    class Bootstrap:
        """The ranks meet by NCCL's group."""

        def __init__(self) -> None:
            self.rank, self.nranks, self.group = rank, nranks, dist.new_group(backend="gloo")

        def allgather(self, payload: bytes) -> list[bytes]:
            """Every rank's bytes: their lengths first, as tensors."""
            size = torch.tensor([len(payload)])
            sizes = [torch.zeros_like(size) for _ in range(nranks)]
            dist.all_gather(sizes, size, group=self.group)
            parts = [torch.empty(max(map(int, sizes)), dtype=torch.uint8) for _ in sizes]
            own = torch.zeros_like(parts[rank])
            own[: len(payload)] = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[
                : len(payload)
            ]
            dist.all_gather(parts, own, group=self.group)
            return [bytes(part[: int(n)].tolist()) for part, n in zip(parts, sizes, strict=True)]

    comm = ringcoll.init(Bootstrap())
    found: dict[str, Any] = {"host us": _host(comm), "device us": []}
    for name, nbytes in product(NAMES, SIZES):
        found["device us"].append(_device(comm, name, nbytes))
    if rank == 0:
        (Path(folder) / "figures.json").write_text(json.dumps(found), encoding="utf-8")
    comm.close()
    dist.destroy_process_group()


def _host(comm: Any) -> dict[str, float]:
    import cupy
    import torch
    import torch.distributed as dist

    kept = comm.empty(SMALL // 4, "float32")
    tensor = comm.empty(SMALL // 4, "float32", like="torch")
    plain = torch.zeros(SMALL // 4, device="cuda")
    for each in (kept, tensor, plain):
        each[:] = 0
    empty = cupy.RawKernel('extern "C" __global__ void empty() {}', "empty")
    calls: Calls = {
        "an empty kernel": lambda: empty((1,), (32,), ()),
        "ringcoll, the same CuPy array": lambda: comm.all_reduce(kept),
        "ringcoll, the same torch tensor": lambda: comm.all_reduce(tensor),
        "ringcoll, x[:] of a CuPy array": lambda: comm.all_reduce(kept[:]),
        "ringcoll, x[:] of a torch tensor": lambda: comm.all_reduce(tensor[:]),
        "ringcoll, x[:] of a plain tensor": lambda: comm.all_reduce(plain[:]),
        "NCCL, the same torch tensor": lambda: dist.all_reduce(plain),
        "NCCL, x[:] of a plain tensor": lambda: dist.all_reduce(plain[:]),
    }

    def settle() -> None:
        torch.cuda.synchronize()
        dist.barrier()

    return host_us(calls, settle, blocks=BLOCKS, repeats=CALLS)


def _device(comm: Any, name: str, nbytes: int) -> dict[str, Any]:
    """One collective; ``nbytes``: of the larger buffer. all_reduce is in place."""
    import torch
    import torch.distributed as dist

    whole = nbytes // 2
    parts = (whole // comm.nranks, whole)
    sent, received = {"all_gather": parts, "reduce_scatter": parts[::-1]}.get(name, (whole, whole))

    def buffers(like: str | None) -> tuple[Any, Any]:
        """Send and receive buffer."""
        made = [
            comm.empty(count, "bfloat16", like=like)
            if like
            else torch.empty(count, dtype=torch.bfloat16, device="cuda")
            for count in (sent, received)[: 1 if name == "all_reduce" else 2]
        ]
        return made[0], made[-1]

    nccl: dict[str, Callable[[Any, Any], object]] = {
        "all_reduce": lambda send, _: dist.all_reduce(send),
        "all_gather": lambda send, recv: dist.all_gather_into_tensor(recv, send),
        "reduce_scatter": lambda send, recv: dist.reduce_scatter_tensor(recv, send),
        "all_to_all": lambda send, recv: dist.all_to_all_single(recv, send),
    }

    def ours(send: Any, recv: Any) -> object:
        return getattr(comm, name)(send, None if recv is send else recv)

    makers = {"ringcoll, symmetric": "torch", "ringcoll, plain": None, "NCCL, plain": None}
    pairs = {way: buffers(like) for way, like in makers.items()}
    makes = {way: nccl[name] if way.startswith("NCCL") else ours for way in pairs}
    ranks = torch.arange(1, comm.nranks + 1, device="cuda", dtype=torch.bfloat16)
    total = comm.nranks * (comm.nranks + 1) // 2
    wrong, repeats = 0, 20 if nbytes <= 64 << 20 else 5
    for way, (send, recv) in pairs.items():
        for _ in range(WARM):  # plain memory is staged at first
            recv.fill_(-1)
            send.fill_(comm.rank + 1)
            makes[way](send, recv)
            wanted = total if "reduce" in name else ranks.repeat_interleave(whole // comm.nranks)
            wrong += int((recv != wanted).sum())
        send.zero_()
    calls: Calls = {way: partial(makes[way], *pair) for way, pair in pairs.items()}
    found: dict[str, list[float]] = {way: [] for way in calls}
    for block in range(BLOCKS + 2):
        for way, call in calls.items():
            torch.cuda.synchronize()
            dist.barrier()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(repeats):
                call()
            last.record()
            torch.cuda.synchronize()
            if block >= 2:
                found[way].append(first.elapsed_time(last) / repeats * 1e3)
    times = {way: round(statistics.median(spent), 1) for way, spent in found.items()}
    return {"call": name, "bytes": nbytes, "wrong": wrong, **times}


def main(argv: Sequence[str] | None = None) -> None:
    """Start the ranks, print their figures, and record them in ``--out``."""
    parser = argparse.ArgumentParser(description="What the caller's array costs a call.")
    parser.add_argument("--ranks", type=int, default=0, help="0: all GPUs")
    add_out(parser)
    given = parser.parse_args(argv)
    there = require(parser, gpus=given.ranks or 1, torch=True, instead="")
    nranks = given.ranks or there or 1
    import torch

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(ranks_figures, (nranks, folder), nranks)
        found = json.loads((Path(folder) / "figures.json").read_text(encoding="utf-8"))
    for name, spent in found["host us"].items():
        print(f"{name:<34} {spent:8.2f} us of the host")
    for row in found["device us"]:
        print(row)
    gpus = [torch.cuda.get_device_name(rank) for rank in range(nranks)]
    content = {"ranks": nranks, "gpus": gpus, "torch": torch.__version__, **found}
    save(given.out, f"gpu_arrays_{nranks}", content, ranks=nranks, device="cuda")


if __name__ == "__main__":
    main()
