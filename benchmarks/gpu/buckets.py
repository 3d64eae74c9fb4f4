"""The host's time of a bucket's all_reduce in torch.distributed, and of its future, as DDP asks.

::

    python -m benchmarks.gpu.buckets [--ranks N] [--device cuda|cpu] [--calls 80]
        [--seconds 45] [--commit HASH] [--out FOLDER]

One process a GPU, 256 KiB of float32. ``call`` is the time until a group's all_reduce returns its
work, ``future`` until the work has made its future. Between the calls the host does nothing
(``warm``), or runs a backward pass of a transformer layer, or writes 64 MiB, which leave its caches
cold. A Python group that does not communicate is the least that torch costs any Python group, and
torch's ``fake`` group, which does not either, the least that it costs one in C++. torch's own
backend is called by itself and through its group. Where ``python -m ringcoll.torch.bridge`` has
compiled it, the Python group and, on GPUs, ringcoll's are timed by the bridge too. Figures are
medians, ``_p5`` the 5th percentile; the slowest rank counts. Every element of an all_reduce before
each of the measurements is compared.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

from benchmarks.gpu.command import begin, slowest
from benchmarks.gpu.processes import Link

__all__ = ["group_without_communication", "main", "table", "work"]

COUNT = 64 << 10
"""Elements of a bucket."""
IDLE = "Python, no communication"
FAKE = "C++, no communication"
FIGURES = ("call_us", "call_us_p5", "future_us", "future_us_p5")
Ways = tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]
"""The all_reduce of a list of tensors, and the future of its work."""


def group_without_communication(rank: int, nranks: int, where: Any, *, bridged: bool) -> Any:
    """A group of Python whose all_reduce leaves the tensor as it is."""
    import torch
    import torch.distributed as dist

    from ringcoll.torch import bridge

    class Done(dist.Work):  # type: ignore[misc]
        """Work that has ended."""

        def __init__(self, tensor: Any) -> None:
            super().__init__()
            self.tensor = tensor

        def wait(self, timeout: timedelta | None = None) -> bool:
            """Return at once."""
            return True

        def get_future(self) -> Any:
            """A future that has its result."""
            device = self.tensor.device
            future = torch.futures.Future(devices=[device] if device.type == "cuda" else [])
            future.set_result([self.tensor])
            return future

    class Idle(dist.ProcessGroup):  # type: ignore[misc]
        """The group."""

        _device = None  # of whose calls none is like an earlier one

        def __init__(self) -> None:
            start = bridge.start if bridged else dist.ProcessGroup.__init__
            start(self, rank, nranks)
            self.side = torch.cuda.Stream(where) if where.type == "cuda" else None

        def start_sum(self, *_bucket: Any) -> tuple[int, ...]:
            """Nothing, on a stream of its own."""
            side = self.side
            return () if side is None else (side.stream_id, side.device_index, side.device_type)

        def check_started(self) -> None:
            """Nothing can have failed."""

        def allreduce(self, tensors: Any, options: Any) -> Any:
            """Nothing."""
            return Done(tensors[0])

        broadcast = allreduce  # which DDP asks for when it has rebuilt its buckets

    return Idle()


def times(
    ways: Ways,
    bucket: Any,
    options: Any,
    between: Callable[[], object],
    settle: Callable[[], Any],
    calls: int,
) -> dict[str, float]:
    """Microseconds of the calls and of their futures."""
    all_reduce, get_future = ways
    spent: tuple[list[int], list[int]] = ([], [])
    for k in range(calls):
        between()
        if k % 8 == 0:
            settle()
        began = time.perf_counter_ns()
        work = all_reduce([bucket], options)
        returned = time.perf_counter_ns()
        future = get_future(work)
        ended = time.perf_counter_ns()
        if k >= calls // 4:
            spent[0].append(returned - began)
            spent[1].append(ended - returned)
        work.wait()
        del future
    settle()
    ordered = [sorted(of) for of in spent]
    found = [of[len(of) // part] / 1e3 for of in ordered for part in (2, 20)]
    return dict(zip(FIGURES, found, strict=True))


def work(link: Link, store: str, device: str, calls: int) -> None:
    """What one rank measures; a message a group and what the host does between the calls."""
    import torch
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # its group
    from torch.distributed import AllreduceOptions

    from ringcoll.torch import bridge
    from ringcoll.torch_entry import register

    register()
    rank, n = link.rank, link.nranks
    where = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    peer = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(peer, store=dist.FileStore(store, n), rank=rank, world_size=n)

    def settle() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def of_group(group: Any) -> Ways:
        # As DDP calls it: by way of C++, which finds the method of a Python group.
        return partial(dist.ProcessGroup.allreduce, group), dist.Work.get_future

    backend = dist.group.WORLD._get_backend(torch.device(device))
    bucket = torch.zeros(COUNT, device=where)
    options = AllreduceOptions()
    options.asyncOp = True
    with mock.patch.object(bridge, "compiled", lambda: None):  # torch's own way
        ours = dist.new_group(backend="ringcoll")
    groups: dict[str, Ways] = {
        IDLE: of_group(group_without_communication(rank, n, where, bridged=False)),
        FAKE: of_group(dist.new_group(backend="fake")),
        f"{peer}, backend alone": (backend.allreduce, lambda work: work.get_future()),
        f"{peer}, group": of_group(dist.group.WORLD),
        "ringcoll, group": of_group(ours),
    }
    if bridge.compiled() is not None:
        idle = group_without_communication(rank, n, where, bridged=True)
        groups[f"{IDLE}, bridge"] = of_group(idle)
        if device == "cuda":
            groups["ringcoll, bridge"] = of_group(dist.new_group(backend="ringcoll"))
    layer = torch.nn.TransformerEncoderLayer(256, 4, batch_first=True).to(where)
    x = torch.randn(2, 64, 256, device=where)
    large = torch.zeros(64 << 20, dtype=torch.uint8)
    between: dict[str, Callable[[], object]] = {
        "warm": lambda: None,
        "after a backward pass": lambda: layer(x).sum().backward(),
        "after 64 MiB were written": lambda: large.add_(1),
    }
    for name, ways in groups.items():
        wanted = rank + 1 if name.startswith((IDLE, FAKE)) else n * (n + 1) // 2
        for state, each in between.items():
            bucket.fill_(rank + 1)
            ways[0]([bucket], options).wait()
            wrong = int((bucket != wanted).sum())
            bucket.zero_()
            found = times(ways, bucket, options, each, settle, calls)
            link.send({"name": name, "state": state, "bytes": 4 * COUNT, "wrong": wrong, **found})
    link.barrier()
    dist.destroy_process_group()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a group and what the host does between the calls; 5th percentiles in parentheses."""
    lines = []
    for row in rows:
        cells = (f"{row[f]:9.1f} ({row[f'{f}_p5']:6.1f})" for f in ("call_us", "future_us"))
        call, future = cells
        lines.append(f"{row['name']:<34}{row['state']:<27}call{call} us  future{future} us")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit status is 1 if a part failed or an element is wrong."""
    parser = argparse.ArgumentParser(description="The host's time of a bucket's all_reduce.")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: 2 ranks by default"
    )
    parser.add_argument("--calls", type=int, default=80, help="the first quarter warms up")
    run = begin(parser, argv, "buckets", torch=True)
    with tempfile.TemporaryDirectory() as folder:
        args = f"{folder}/store", run.options.device, run.options.calls
        run.measure("ranks", work, args, lambda of: run.report.add(slowest(of, *FIGURES)))
    return run.end(table(run.report.rows))


if __name__ == "__main__":
    raise SystemExit(main())
