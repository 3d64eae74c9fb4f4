"""Time other libraries' collectives: NCCL, NCCL on symmetric windows, torch's symmetric memory.

::

    python -m benchmarks.gpu.peers --out FILE [--ranks 2,4] [--parts nccl,window,symmetric]

bfloat16, one process a GPU, CUDA graphs of 50 calls, the slowest rank, the median of 20 replays.
What fails is written down and costs only itself. Multicast is neither used nor switched on or off.
"""

from __future__ import annotations

import argparse
import datetime
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.processes import Link, run_ranks
from benchmarks.gpu.report import Report, Row, median_us, print_table

__all__ = ["main"]

CALLS = 50
REPLAYS = 20
WARM = 3
GATE_CYCLES = 300_000
"""About 150 us: ranks are held together while their hosts enqueue the graph."""

SIZES = (256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
OTHER_SIZES = (4 << 10, 64 << 10, 1 << 20)
MOST = max(SIZES) // 2
"""Elements of the largest message."""

Case = tuple[dict[str, Any], Callable[[], None], Callable[[], bool]]
"""What the row says, what enqueues a call, and whether one call on fresh inputs is right."""


class Rank:
    """One process: its device, its stream, and inputs that all ranks can draw."""

    def __init__(self, link: Link, port: int, seed: int) -> None:
        self.link, self.seed = link, seed
        self.rank, self.nranks = link.rank, link.nranks
        self.device = torch.device("cuda", link.rank)
        torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=link.rank,
            world_size=link.nranks,
            device_id=self.device,
            timeout=datetime.timedelta(seconds=60),
        )
        self.stream = torch.cuda.Stream()
        self._one = torch.ones(1, device=self.device)
        self.fence()
        torch.cuda.synchronize()

    def fence(self) -> None:
        """Enqueue something that no rank's stream passes before all are there."""
        dist.all_reduce(self._one.fill_(1.0))

    def draw(self, rank: int, count: int) -> Any:
        """What a rank contributes: new numbers for every count, the same wherever it is drawn."""
        generator = torch.Generator().manual_seed(self.seed + 1000 * count + rank)
        return torch.randn(count, generator=generator).bfloat16()

    def total(self, count: int) -> Any:
        """The sum of all contributions, in float64."""
        return sum(self.draw(rank, count).double() for rank in range(self.nranks))

    def timed(self, enqueue: Callable[[], None]) -> list[float]:
        """Seconds of each replay of a graph of ``CALLS`` calls.

        Sums in place grow beyond all bounds meanwhile; adding infinities takes no longer.
        """
        with torch.cuda.stream(self.stream):
            for _ in range(WARM):
                enqueue()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # The process group's watchdog thread asks after events while this captures.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                enqueue()
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        seconds = []
        with torch.cuda.stream(self.stream):
            for _ in range(WARM + REPLAYS):
                self.link.barrier()
                self.fence()
                torch.cuda._sleep(GATE_CYCLES)
                start.record()
                graph.replay()
                stop.record()
                stop.synchronize()
                seconds.append(start.elapsed_time(stop) * 1e-3)
        return seconds[WARM:]


def near(got: Any, wanted: Any) -> bool:
    """Whether a bfloat16 result is near the float64 one; NaN is not."""
    error = (got.double().cpu() - wanted).norm() / wanted.norm()
    return bool(error < 1e-2)


def all_reduce_cases(
    rank: Rank,
    name: str,
    buffer: Any,
    call: Callable[[Any], Any],
) -> Iterator[Case]:
    """All sizes of one kind of all_reduce, whose result is what ``call`` returns."""
    for nbytes in SIZES:
        count = nbytes // 2
        view = buffer[:count]

        def enqueue(view: Any = view) -> None:
            call(view)

        def right(view: Any = view, count: int = count) -> bool:
            view.copy_(rank.draw(rank.rank, count))
            return near(call(view), rank.total(count))

        yield {"name": name, "collective": "all_reduce", "bytes": nbytes}, enqueue, right


def _in_place(view: Any) -> Any:
    dist.all_reduce(view)
    return view


def nccl(rank: Rank) -> Iterator[Case]:
    """NCCL as it chooses by itself."""
    buffer = torch.empty(MOST, dtype=torch.bfloat16, device=rank.device)
    yield from all_reduce_cases(rank, "nccl", buffer, _in_place)
    for nbytes in OTHER_SIZES:
        yield from _others(rank, nbytes)


def _others(rank: Rank, nbytes: int) -> Iterator[Case]:
    """The collectives beside all_reduce; ``bytes`` counts the larger of input and output."""
    share = nbytes // 2 // rank.nranks
    count = share * rank.nranks
    whole = torch.empty(count, dtype=torch.bfloat16, device=rank.device)
    other = torch.empty_like(whole)
    part = torch.empty(share, dtype=torch.bfloat16, device=rank.device)
    mine = slice(rank.rank * share, (rank.rank + 1) * share)

    def gathered() -> bool:
        part.copy_(rank.draw(rank.rank, share))
        whole.fill_(float("nan"))
        dist.all_gather_into_tensor(whole, part)
        every = [rank.draw(peer, share) for peer in range(rank.nranks)]
        return bool(torch.equal(whole.cpu(), torch.cat(every)))

    def scattered() -> bool:
        whole.copy_(rank.draw(rank.rank, count))
        part.fill_(float("nan"))
        dist.reduce_scatter_tensor(part, whole)
        return near(part, rank.total(count)[mine])

    def spread() -> bool:
        whole.fill_(float("nan"))
        if rank.rank == 0:
            whole.copy_(rank.draw(0, count))
        dist.broadcast(whole, 0)
        return bool(torch.equal(whole.cpu(), rank.draw(0, count)))

    def exchanged() -> bool:
        whole.copy_(rank.draw(rank.rank, count))
        other.fill_(float("nan"))
        dist.all_to_all_single(other, whole)
        every = [rank.draw(peer, count)[mine] for peer in range(rank.nranks)]
        return bool(torch.equal(other.cpu(), torch.cat(every)))

    head = {"name": "nccl", "bytes": nbytes}
    cases: list[tuple[str, Callable[[], Any], Callable[[], bool]]] = [
        ("all_gather", lambda: dist.all_gather_into_tensor(whole, part), gathered),
        ("reduce_scatter", lambda: dist.reduce_scatter_tensor(part, whole), scattered),
        ("broadcast", lambda: dist.broadcast(whole, 0), spread),
        ("all_to_all", lambda: dist.all_to_all_single(other, whole), exchanged),
    ]
    for collective, call, right in cases:
        yield {**head, "collective": collective}, call, right


def window(rank: Rank) -> Iterator[Case]:
    """NCCL on memory of its own allocator, registered as a symmetric window."""
    backend = dist.group.WORLD._get_backend(rank.device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        buffer = torch.empty(MOST, dtype=torch.bfloat16, device=rank.device)
    backend.register_mem_pool(pool, symm=True)
    yield from all_reduce_cases(rank, "nccl window", buffer, _in_place)
    del pool


def symmetric(rank: Rank) -> Iterator[Case]:
    """Torch's own kernels on its symmetric memory."""
    import torch.distributed._symmetric_memory as symm_mem

    group = dist.group.WORLD.group_name
    buffer = symm_mem.empty(MOST, dtype=torch.bfloat16, device=rank.device)
    symm_mem.rendezvous(buffer, group=group)

    def one_shot(view: Any) -> Any:
        return torch.ops.symm_mem.one_shot_all_reduce(view, "sum", group)

    def two_shot(view: Any) -> Any:
        return torch.ops.symm_mem.two_shot_all_reduce_(view, "sum", group)

    yield from all_reduce_cases(rank, "torch one_shot", buffer, one_shot)
    yield from all_reduce_cases(rank, "torch two_shot", buffer, two_shot)


PARTS = {"nccl": nccl, "window": window, "symmetric": symmetric}


def rank_work(link: Link, part: str, port: int, seed: int) -> None:
    """What each process runs: a row of every case, with a reason in place of what failed."""
    rank = Rank(link, port, seed)
    for head, enqueue, right in PARTS[part](rank):
        found: dict[str, Any] = {"times": [], "wrong": 0, "error": None}
        try:
            with torch.cuda.stream(rank.stream):
                found["wrong"] = int(not right())
            torch.cuda.synchronize()
            found["times"] = rank.timed(enqueue)
        except Exception as error:
            if link.broken():
                raise
            found["error"] = f"{type(error).__name__}: {error}"
        link.send({**head, **found})


def merged(nranks: int, messages: Sequence[Row]) -> Row:
    """The row of a case from what every rank found."""
    first = messages[0]
    errors = [message["error"] for message in messages if message["error"]]
    figures = {"us": None} if errors else median_us([m["times"] for m in messages], CALLS)
    return {
        "name": first["name"],
        "collective": first["collective"],
        "dtype": "bfloat16",
        "bytes": first["bytes"],
        "ranks": nranks,
        **figures,
        "wrong": sum(message["wrong"] for message in messages),
        "error": errors[0] if errors else None,
    }


def free_port() -> int:
    """A port of the loopback that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="Time other libraries' collectives.")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--ranks", default="", help="as in 2,4; default: all GPUs")
    parser.add_argument("--parts", default=",".join(PARTS), help="default: all of them")
    parser.add_argument("--seconds", type=float, default=60, help="for each part")
    options = parser.parse_args(argv)

    report = Report(options.out, "peers")
    gpus = torch.cuda.device_count()
    if torch.cuda.is_available():
        report.note("nccl", list(torch.cuda.nccl.version()))
    # One host: what NCCL says at its start may go over the loopback.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    seed = int.from_bytes(os.urandom(3), "little")
    report.note("seed", seed)
    for nranks in [int(word) for word in (options.ranks or str(gpus)).split(",")]:
        for part in options.parts.split(","):
            if not 2 <= nranks <= gpus or part not in PARTS:
                reason = f"cannot be run on {nranks} of {gpus} GPUs; parts are {list(PARTS)}"
                report.fail(f"{part}, {nranks} ranks", reason)
                continue

            def keep(messages: list[Row], nranks: int = nranks) -> None:
                report.add(merged(nranks, messages))

            work = (part, free_port(), seed)
            reason_or_none = run_ranks(rank_work, nranks, work, options.seconds, keep)
            report.fail(f"{part}, {nranks} ranks", reason_or_none)
    print_table(report.rows)
    return 1 if report.errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
