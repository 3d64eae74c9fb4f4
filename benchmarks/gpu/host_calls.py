"""The host's time until a call returns, by what is passed and by its options.

::

    python -m benchmarks.gpu.host_calls [--ranks N] [--one-gpu] [--seconds 45]
        [--commit HASH] [--out FOLDER]

One process a GPU; calls are eager, of 256 bytes of float32 or of 20 MiB, whose memory is looked up
by protocol Simple, and all_reduce is in place. The kinds take turns in
blocks of 100 calls, which the ranks begin together; a figure is the median of the blocks' means,
and the slowest rank counts. An empty kernel and a slice alone, which call nothing, stand beside.
Each kind is called once before it is timed, and every element is compared. ``new counts`` are
blocks of calls on slices of plain memory whose numbers of elements are all new, ``counts prepared``
of those that have come so often that calls of their own are prepared for them, ``new timeouts`` of
calls whose ``timeout=`` is. A GPU that ranks share runs one of them at a time: give ``--one-gpu``
some minutes by ``--seconds``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from benchmarks.gpu.command import begin, slowest
from benchmarks.gpu.processes import Link
from benchmarks.gpu.timer import host_us

__all__ = ["Kind", "main", "table"]

COUNT, LARGE = 64, 5 << 20
"""Elements of a call, 256 bytes, and of a large one, 20 MiB."""
VIEWS = 60
BLOCKS = 7
SETTLE = 3.0
"""Seconds in which kernels are compiled that the first calls did not wait for."""
NEW, STRIDE, TURNS = 50, 4096, 4
"""Counts of a block that no call had before, elements from one slice to the next, and blocks."""
POISON = -7


@dataclass(frozen=True, slots=True)
class Kind:
    """A call that is timed.

    Attributes:
        call: makes it.
        sent: holds the rank plus 1 before the call that is checked; None: nothing is sent.
        received: is compared after it.
        wanted: numbers of :attr:`received`, or one for all of its elements.
        calls: that together fill :attr:`received`.
        nbytes: of a call.

    """

    call: Callable[[], object]
    sent: Any = None
    received: Any = None
    wanted: Any = 0
    calls: int = 1
    nbytes: int = 4 * COUNT


def kinds(comm: Any) -> dict[str, Kind]:
    """Everything that is timed, on memory of its own."""
    import cupy
    import torch

    import ringcoll

    n, total = comm.nranks, comm.nranks * (comm.nranks + 1) // 2
    after, before = (comm.rank + 1) % n, (comm.rank - 1) % n
    kept, tensor = comm.empty(COUNT, "float32"), comm.empty(COUNT, "float32", like="torch")
    parts = comm.empty(VIEWS * COUNT + 8, "float32")
    plain, large = cupy.zeros(COUNT, "float32"), cupy.zeros(VIEWS * COUNT + 8, "float32")
    wide, single = cupy.zeros(n * COUNT, "float32"), cupy.zeros(COUNT, "float32")
    other = cupy.zeros(n * COUNT, "float32")
    torch_plain = torch.zeros(COUNT, device="cuda")
    torch_large = torch.zeros(VIEWS * COUNT, device="cuda")
    edges = [slice(COUNT * k, COUNT * (k + 1)) for k in range(VIEWS)]
    views, tensors = [large[edge] for edge in edges], [torch_large[edge] for edge in edges]
    whole, inner = slice(0, VIEWS * COUNT), slice(4, COUNT + 4)
    shared, own = comm.empty(LARGE, "float32"), cupy.zeros(LARGE, "float32")
    torch_own = torch.zeros(LARGE, device="cuda")
    every = cupy.repeat(cupy.arange(1, n + 1, dtype="float32"), COUNT)
    current, side = cupy.cuda.get_current_stream(), cupy.cuda.Stream(non_blocking=True)
    empty = cupy.RawKernel('extern "C" __global__ void empty() {}', "empty")
    in_turn, torch_in_turn, simple_in_turn = cycle(views), cycle(tensors), cycle(views)

    def reduced(call: Callable[[], object], array: Any, calls: int = 1) -> Kind:
        return Kind(call, array, array, total, calls)

    def long(array: Any, call: Callable[[], object]) -> Kind:
        return Kind(call, array, array, total, nbytes=4 * LARGE)

    def in_views(call: Callable[[], object], array: Any) -> Kind:
        return reduced(call, array, VIEWS)

    def waited() -> None:
        comm.all_reduce(kept, async_op=True).wait()

    def grouped() -> None:
        with ringcoll.group():
            comm.send(plain, after)
            comm.recv(single, before)

    return {
        "empty kernel": Kind(lambda: empty((1,), (32,), ())),
        "x[:] alone, CuPy": Kind(lambda: kept[:]),
        "x[:] alone, torch": Kind(lambda: tensor[:]),
        "same array, CuPy": reduced(lambda: comm.all_reduce(kept), kept),
        "same array, torch": reduced(lambda: comm.all_reduce(tensor), tensor),
        "x[:], CuPy, symmetric": reduced(lambda: comm.all_reduce(kept[:]), kept),
        "x[:], CuPy, plain": reduced(lambda: comm.all_reduce(plain[:]), plain),
        "x[4:68], CuPy, symmetric": reduced(lambda: comm.all_reduce(parts[inner]), parts[inner]),
        "x[4:68], CuPy, plain": reduced(lambda: comm.all_reduce(large[inner]), large[inner]),
        "x[:], torch, symmetric": reduced(lambda: comm.all_reduce(tensor[:]), tensor),
        "x[:], torch, plain": reduced(lambda: comm.all_reduce(torch_plain[:]), torch_plain),
        "60 views in turn, CuPy": in_views(lambda: comm.all_reduce(next(in_turn)), large[whole]),
        "60 views in turn, torch": in_views(
            lambda: comm.all_reduce(next(torch_in_turn)), torch_large
        ),
        "60 views in turn, Simple": in_views(
            lambda: comm.all_reduce(next(simple_in_turn), protocol="Simple"), large[whole]
        ),
        "x[4:68], symmetric, Simple": reduced(
            lambda: comm.all_reduce(parts[inner], protocol="Simple"), parts[inner]
        ),
        "stream= the current one": reduced(lambda: comm.all_reduce(kept, stream=current), kept),
        "stream= another": reduced(lambda: comm.all_reduce(kept, stream=side), kept),
        "max_sms=4": reduced(lambda: comm.all_reduce(kept, max_sms=4), kept),
        "async_op=True and wait": reduced(waited, kept),
        "all_gather": Kind(lambda: comm.all_gather(plain, wide), plain, wide, every),
        "all_gather_v": Kind(
            lambda: comm.all_gather_v(plain, wide, [COUNT] * n), plain, wide, every
        ),
        "all_to_all_v": Kind(
            lambda: comm.all_to_all_v(wide, [COUNT] * n, other, [COUNT] * n), wide, other, every
        ),
        "sendrecv": Kind(
            lambda: comm.sendrecv(plain, after, single, before), plain, single, before + 1
        ),
        "a group of send and recv": Kind(grouped, plain, single, before + 1),
        "barrier": Kind(comm.barrier),
        "20 MiB, CuPy, symmetric": long(shared, lambda: comm.all_reduce(shared)),
        "20 MiB, CuPy, plain": long(own, lambda: comm.all_reduce(own)),
        "20 MiB, torch, plain": long(torch_own, lambda: comm.all_reduce(torch_own)),
    }


def wrong_of(kind: Kind, rank: int, settle: Callable[[], object]) -> int:
    """Wrong elements of the first calls of a kind; what was sent is zero again afterwards."""
    if kind.received is not None:
        kind.received[:] = -1
        kind.sent[:] = rank + 1
    settle()
    for _ in range(kind.calls):
        kind.call()
    settle()
    if kind.received is None:
        return 0
    wrong = int((kind.received != kind.wanted).sum())
    kind.sent[:] = 0  # sums in place would overflow
    return wrong


def new_counts(comm: Any, settle: Callable[[], object]) -> Iterator[tuple[str, float, int]]:
    """Each kind of call, microseconds of one of a new count, and wrong elements.

    The first block is not timed.
    """
    import cupy

    import ringcoll
    from ringcoll.executors.cuda.recounted import REPEATS

    n, me = comm.nranks, comm.rank
    after, before, total = (me + 1) % n, (me - 1) % n, n * (n + 1) // 2
    sent = cupy.full(n * STRIDE, me + 1, "float32")
    got = cupy.empty((TURNS * NEW, STRIDE * n), "float32")
    large, sums = cupy.full(LARGE, me + 1, "float32"), cupy.empty(LARGE, "float32")
    flat = got.reshape(-1)

    def row(k: int, count: int) -> Any:
        return flat[k * STRIDE * n : k * STRIDE * n + count]

    def exchange(k: int) -> None:
        counts, theirs = [500 + k + p for p in range(n)], [500 + k + me] * n
        comm.all_to_all_v(sent[: sum(counts)], counts, row(k, sum(theirs)), theirs)

    def gather(k: int) -> None:
        counts = [500 + k + p for p in range(n)]
        comm.all_gather_v(sent[: counts[me]], row(k, sum(counts)), counts)

    def grouped(k: int) -> None:
        with ringcoll.group():
            comm.send(sent[: 1000 + k], after)
            comm.recv(row(k, 1000 + k), before)

    def wanted_of(k: int, length: Callable[[int, int], int]) -> Any:
        return cupy.repeat(cupy.arange(1, n + 1), [length(k, p) for p in range(n)])

    kinds: dict[str, tuple[Callable[[int], object], Callable[[int], Any]]] = {
        "all_reduce": (
            lambda k: comm.all_reduce(sent[: 1000 + k], row(k, 1000 + k)),
            lambda k: cupy.full(1000 + k, total),
        ),
        "all_gather_v": (gather, lambda k: wanted_of(k, lambda k, p: 500 + k + p)),
        "all_to_all_v": (exchange, lambda k: wanted_of(k, lambda k, _p: 500 + k + me)),
        "sendrecv": (
            lambda k: comm.sendrecv(sent[: 1000 + k], after, row(k, 1000 + k), before),
            lambda k: cupy.full(1000 + k, before + 1),
        ),
        "a group of send and recv": (grouped, lambda k: cupy.full(1000 + k, before + 1)),
    }
    for name, (call, right) in kinds.items():
        got.fill(POISON)
        us = _microseconds(call, settle)
        wanted = cupy.full_like(got, POISON)
        for k in range(TURNS * NEW):
            values = right(k)
            wanted[k, : values.size] = values
        yield f"{name}, new counts", us, int((got != wanted).sum())
        got.fill(POISON)
        # One of these turns prepares calls of their own: of a group the first, else the last.
        us = max([_microseconds(call, settle) for _ in range(REPEATS)])
        yield f"{name}, counts prepared", us, int((got != wanted).sum())
    sums.fill(POISON)
    counts = [LARGE - 64 * (TURNS * NEW - k) for k in range(TURNS * NEW)]
    us = _microseconds(lambda k: comm.all_reduce(large[: counts[k]], sums[: counts[k]]), settle)
    wrong = int((sums[: counts[-1]] != total).sum()) + int((sums[counts[-1] :] != POISON).sum())
    yield "20 MiB, new counts", us, wrong
    got.fill(POISON)
    us = _microseconds(
        lambda k: comm.all_reduce(sent[:COUNT], flat[:COUNT], timeout=20 + k / 1000), settle
    )
    yield "new timeouts", us, int((flat[:COUNT] != total).sum())


def _microseconds(call: Callable[[int], object], settle: Callable[[], object]) -> float:
    """Of a call, by its number; the median of the blocks but for the first."""
    spent = []
    for turn in range(TURNS):
        settle()
        began = time.perf_counter()
        for k in range(turn * NEW, (turn + 1) * NEW):
            call(k)
        spent.append((time.perf_counter() - began) / NEW * 1e6)
    settle()
    return statistics.median(spent[1:])


def work(link: Link, one_gpu: bool = False) -> None:
    """What one rank measures; a message a kind."""
    import cupy
    import torch

    import ringcoll

    ordinal = 0 if one_gpu else link.rank
    cupy.cuda.Device(ordinal).use()
    torch.cuda.set_device(ordinal)
    comm: Any = ringcoll.init(link, device="cuda", timeout=20.0)

    def settle() -> None:
        cupy.cuda.runtime.deviceSynchronize()
        comm.barrier()
        comm.synchronize()

    timed = kinds(comm)
    wrong = {name: wrong_of(kind, link.rank, settle) for name, kind in timed.items()}
    time.sleep(SETTLE)
    found = host_us({name: kind.call for name, kind in timed.items()}, settle, blocks=BLOCKS)
    for name, us in found.items():
        link.send({"name": name, "bytes": timed[name].nbytes, "us": us, "wrong": wrong[name]})
    for name, us, unequal in new_counts(comm, settle):
        link.send({"name": name, "bytes": None, "us": us, "wrong": unequal})
    comm.close()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a kind."""
    return "\n".join(f"{row['name']:<28}{row['us']:>9.2f} us" for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit status is 1 if a part failed or an element is wrong."""
    parser = argparse.ArgumentParser(description="The host's time of calls on GPUs.")
    run = begin(parser, argv, "host_calls", torch=True, shares=True)
    run.measure("ranks", work, (run.one_gpu,), lambda of: run.report.add(slowest(of, "us")))
    return run.end(table(run.report.rows))


if __name__ == "__main__":
    raise SystemExit(main())
