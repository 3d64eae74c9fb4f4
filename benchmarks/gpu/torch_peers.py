"""NCCL and torch's symmetric memory, timed by the same clock as ringcoll."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.gpu.timer import Rendezvous, Timer, calls_of

__all__ = ["Torch"]

MIB = 1 << 20


class Torch:
    """Times NCCL and torch's symmetric memory; ``dtype`` is the name of a type of torch.

    NCCL's arrays begin ``first`` elements behind the beginning of an allocation.
    """

    def __init__(self, rendezvous: Rendezvous, timer: Timer, dtype: str, first: int) -> None:
        import cupy
        import torch
        import torch.distributed as dist

        self.rank, self.nranks, self.timer = rendezvous.rank, rendezvous.nranks, timer
        self.torch, self.dist = torch, dist
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.first = first
        torch.cuda.set_device(rendezvous.rank)
        started = time.perf_counter()
        dist.init_process_group(
            "nccl",
            store=dist.PrefixStore("peers", rendezvous.store),
            rank=rendezvous.rank,
            world_size=rendezvous.nranks,
            timeout=datetime.timedelta(seconds=60),
        )
        dist.all_reduce(torch.zeros(8, device="cuda"))
        torch.cuda.synchronize()
        self.init_seconds = time.perf_counter() - started
        self.stream = torch.cuda.Stream()
        self.shown = cupy.cuda.ExternalStream(self.stream.cuda_stream, rendezvous.rank)

    def row(self, lib: str, name: str, nbytes: int, call: Callable[[], object]) -> dict[str, Any]:
        """One graph's time."""
        torch = self.torch
        said = {"lib": lib, "collective": name, "bytes": nbytes}
        said |= {"dtype": str(self.dtype).removeprefix("torch."), "in_place": name == "all_reduce"}
        try:
            with torch.cuda.stream(self.stream):
                for _ in range(3):
                    call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            calls = calls_of(nbytes)
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                for _ in range(calls):
                    call()

            def replay() -> None:
                with torch.cuda.stream(self.stream):
                    graph.replay()

            said["us"] = round(self.timer.median(replay, calls, self.shown), 2)
            with torch.cuda.stream(self.stream):
                return {**said, **self.timer.eager(call, calls, self.shown)}
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            return {**said, "us": None, "why": str(error).splitlines()[0][:200]}

    def nccl(
        self, name: str, nbytes: int, make: Callable[[int], Any] | None = None
    ) -> dict[str, Any]:
        """NCCL's own algorithm; ``make`` allocates, for its symmetric windows."""
        torch, dist, n = self.torch, self.dist, self.nranks

        def plain(count: int) -> Any:
            return torch.zeros(count, dtype=self.dtype, device="cuda")

        def allocate(count: int) -> Any:
            return (make or plain)(count + self.first)[self.first :]

        wide = name in ("all_gather", "reduce_scatter", "all_to_all")
        count = nbytes // self.dtype.itemsize // (n if wide else 1)
        one, every = allocate(count), allocate(count * n if wide else count)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(one),
            "all_gather": lambda: dist.all_gather_into_tensor(every, one),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(one, every),
            "broadcast": lambda: dist.broadcast(one, 0),
            "reduce": lambda: dist.reduce(one, 0),
            "all_to_all": lambda: dist.all_to_all_single(every, other),
        }
        other = allocate(count * n) if name == "all_to_all" else None
        lib = "nccl" if make is None else "nccl symmetric"
        return {**self.row(lib, name, nbytes, calls[name]), "first": self.first}

    def symmetric_windows(self) -> Callable[[int], Any] | None:
        """An allocator whose memory NCCL knows as symmetric windows; None if torch has none."""
        torch, dist = self.torch, self.dist
        try:
            backend = dist.group.WORLD._get_backend(torch.device("cuda"))
            pool = torch.cuda.MemPool(backend.mem_allocator)

            def allocate(count: int) -> Any:
                with torch.cuda.use_mem_pool(pool):
                    tensor = torch.zeros(count, dtype=self.dtype, device="cuda")
                with contextlib.suppress(RuntimeError):
                    backend.deregister_mem_pool(pool)
                backend.register_mem_pool(pool, symm=True)
                return tensor

            allocate(1024)
            return allocate
        except (RuntimeError, AttributeError, TypeError) as error:
            # In one piece: every rank prints it.
            print(f"no symmetric windows of NCCL: {error}\n", end="", flush=True)
            return None

    def symm_mem(self, nbytes: int) -> Iterator[dict[str, Any]]:
        """Kernels of torch itself."""
        torch, dist = self.torch, self.dist
        import torch.distributed._symmetric_memory as symm

        group = dist.group.WORLD.group_name
        x = symm.empty(nbytes // self.dtype.itemsize, dtype=self.dtype, device=torch.device("cuda"))
        symm.rendezvous(x, dist.group.WORLD)
        x.zero_()
        ops = torch.ops.symm_mem
        if nbytes <= MIB:
            yield self.row(
                "torch one-shot",
                "all_reduce",
                nbytes,
                lambda: ops.one_shot_all_reduce(x, "sum", group),
            )
        yield self.row(
            "torch two-shot",
            "all_reduce",
            nbytes,
            lambda: ops.two_shot_all_reduce_(x, "sum", group),
        )
