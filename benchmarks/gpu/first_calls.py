"""What first calls take: their kernels are compiled, or loaded from the cache or the package.

::

    python -m benchmarks.gpu.first_calls [--ranks N] [--kernels cold warm package]
        [--one-gpu] [--seconds 45] [--commit HASH] [--out FOLDER]

One process a GPU makes 44 calls, each for the first time: 11 kinds in four sizes, of float32 in
plain memory. ``cold`` has an empty cache and ``warm`` the cache that the cold one left; both ignore
the kernels of the package. ``package`` has an empty cache and the kernels of ``ringcoll/compiled``,
which ``python -m ringcoll kernels sm_90 --ranks 2 --out ringcoll/compiled`` writes into a checkout.
``ms`` is the time from the call to the end of its kernel, ``host_ms`` that until it returns; the
slowest rank counts. Every element of every call is compared.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.command import Run, begin, slowest
from benchmarks.gpu.processes import Link
from benchmarks.gpu.report import size_text

__all__ = ["KINDS", "calls_of", "given", "main", "table", "wanted"]

SIZES = (256, 64 << 10, 1 << 20, 64 << 20)
"""Bytes of a call's larger array."""
SETTLE = 2.0
"""Seconds in which kernels are compiled that the first calls did not wait for."""
KERNELS = ("cold", "warm", "package")
KINDS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "scan",
    "sendrecv",
    "all_gather_v",
)
NARROW_SENDS = ("all_gather", "all_gather_v", "gather")
NARROW_RECVS = ("reduce_scatter", "scatter")
IN_PLACE = ("all_reduce", "broadcast")


def calls_of(comm: Any, a: Any, b: Any, part: int) -> dict[str, Callable[[], object]]:
    """A call of every kind; a segment has ``part`` elements, ``a`` is sent and ``b`` received."""
    n, root = comm.nranks, comm.rank == 0
    whole = part * n
    after, before = (comm.rank + 1) % n, (comm.rank - 1) % n
    return {
        "all_reduce": lambda: comm.all_reduce(a[:whole]),
        "reduce": lambda: comm.reduce(a[:whole], b[:whole] if root else None, root=0),
        "broadcast": lambda: comm.broadcast(a[:whole], root=0),
        "all_gather": lambda: comm.all_gather(a[:part], b[:whole]),
        "reduce_scatter": lambda: comm.reduce_scatter(a[:whole], b[:part]),
        "all_to_all": lambda: comm.all_to_all(a[:whole], b[:whole]),
        "gather": lambda: comm.gather(a[:part], b[:whole] if root else None, root=0),
        "scatter": lambda: comm.scatter(a[:whole] if root else None, b[:part], root=0),
        "scan": lambda: comm.scan(a[:whole], b[:whole]),
        "sendrecv": lambda: comm.sendrecv(a[:whole], after, b[:whole], before),
        "all_gather_v": lambda: comm.all_gather_v(a[:part], b[:whole], [part] * n),
    }


def given(rank: int, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What a rank sends: small whole numbers, whose sums are exact."""
    return (np.arange(count) % 13 + 16 * rank).astype(np.float32)


def wanted(name: str, rank: int, nranks: int, part: int) -> Any:
    """What a rank must receive; None where it receives nothing."""
    sent = [given(peer, part * nranks) for peer in range(nranks)]
    own = slice(rank * part, (rank + 1) * part)
    if name in ("reduce", "gather") and rank:
        return None
    if name in NARROW_SENDS:
        return np.concatenate([numbers[:part] for numbers in sent])
    if name == "all_to_all":
        return np.concatenate([numbers[own] for numbers in sent])
    if name in ("broadcast", "scatter"):
        return sent[0][own] if name == "scatter" else sent[0]
    if name == "sendrecv":
        return sent[(rank - 1) % nranks]
    total = np.sum(sent[: rank + 1] if name == "scan" else sent, axis=0)
    return total[own] if name == "reduce_scatter" else total


def wrong_of(name: str, rank: int, nranks: int, part: int, a: Any, b: Any) -> int:
    """Wrong elements of a call, and elements of ``b`` beyond it that are not poison any more."""
    got, right = (a if name in IN_PLACE else b), wanted(name, rank, nranks, part)
    size = 0 if right is None else right.size
    unequal = 0 if right is None else int((got[:size] != right).sum())
    return unequal + (0 if name in IN_PLACE else int((b[size:] != -1).sum()))


def work(link: Link, cache: str, package: bool, settle: float, one_gpu: bool = False) -> None:
    """What one rank measures; a message a call."""
    os.environ["RINGCOLL_CACHE_DIR"] = cache
    os.environ.pop("RINGCOLL_KERNEL_WAIT", None)
    import cupy

    import ringcoll
    from ringcoll.executors.cuda import shipped

    if not package:
        shipped.FOLDER = Path(cache) / "no package"
    rank, n = link.rank, link.nranks
    cupy.cuda.Device(0 if one_gpu else rank).use()
    link.barrier()
    began = time.perf_counter()
    comm: Any = ringcoll.init(link, device="cuda", timeout=30.0)
    link.send({"init_s": round(time.perf_counter() - began, 3)})
    a, b = (cupy.zeros(SIZES[-1] // 4, "float32") for _ in range(2))
    numbers, poison = given(rank, a.size), np.full(b.size, -1, np.float32)
    comm.barrier()
    comm.synchronize()
    for nbytes in SIZES:
        part = nbytes // 4 // n
        for name, call in calls_of(comm, a, b, part).items():
            a.set(numbers)  # copies of the host need no kernel of CuPy
            b.set(poison)
            cupy.cuda.runtime.deviceSynchronize()
            link.barrier()
            began = time.perf_counter()
            call()
            returned = time.perf_counter() - began
            comm.synchronize()
            ended = time.perf_counter() - began
            wrong = wrong_of(name, rank, n, part, a.get(), b.get())
            found = {"name": name, "bytes": nbytes, "wrong": wrong}
            link.send({**found, "ms": ended * 1e3, "host_ms": returned * 1e3})
    time.sleep(settle)
    comm.close()


def source(text: str) -> str:
    """A source of kernels; the package must have some."""
    from ringcoll.executors.cuda.shipped import FOLDER

    if text == "package" and not list(FOLDER.glob("sm_*.json")):
        command = f"python -m ringcoll kernels sm_90 --ranks 2 --out {FOLDER}"
        raise argparse.ArgumentTypeError(
            f"{FOLDER} holds no kernels; compile those of your GPU: {command}"
        )
    return text


def measure(run: Run, kernels: str, cache: str, settle: float, *, kept: bool = True) -> None:
    """Make the first calls with new processes; what fills a cache alone is not kept."""

    def keep(messages: list[dict[str, Any]]) -> None:
        if "init_s" in messages[0]:
            inits = run.report.extra.get("init_s", {})
            slow = max(message["init_s"] for message in messages)
            run.report.note("init_s", {**inits, kernels: slow} if kept else inits)
        elif kept:
            run.report.add({"kernels": kernels, **slowest(messages, "ms", "host_ms")})

    run.measure(kernels, work, (cache, kernels == "package", settle, run.one_gpu), keep)


def table(rows: Sequence[dict[str, Any]], inits: dict[str, float]) -> str:
    """A line for each source of the kernels: the calls' sum, and the slowest of them."""
    lines = []
    for kernels in dict.fromkeys(row["kernels"] for row in rows):
        of = [row for row in rows if row["kernels"] == kernels]
        seconds = sum(row["ms"] for row in of) / 1e3
        slow = sorted(of, key=lambda row: -float(row["ms"]))[:3]
        names = ", ".join(f"{r['name']} {size_text(r['bytes'])} {r['ms']:.0f} ms" for r in slow)
        took = f"init {inits[kernels]:.2f} s, {len(of)} first calls {seconds:.2f} s"
        lines.append(f"{kernels:<8} {took}; slowest {names}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit status is 1 if a part failed or an element is wrong."""
    parser = argparse.ArgumentParser(description="What first calls take on GPUs.")
    parser.add_argument(
        "--kernels",
        nargs="+",
        type=source,
        choices=KERNELS,
        default=("cold", "warm"),
        help="where they come from (default: cold warm)",
    )
    run = begin(parser, argv, "first_calls", shares=True)
    wanted_kernels = run.options.kernels
    with tempfile.TemporaryDirectory(prefix="ringcoll-kernels-") as cache:
        if {"cold", "warm"} & set(wanted_kernels):
            settle = SETTLE if "warm" in wanted_kernels else 0.0
            measure(run, "cold", cache, settle, kept="cold" in wanted_kernels)
        if "warm" in wanted_kernels:
            measure(run, "warm", cache, 0.0)
    if "package" in wanted_kernels:
        with tempfile.TemporaryDirectory(prefix="ringcoll-kernels-") as cache:
            measure(run, "package", cache, 0.0)
    return run.end(table(run.report.rows, run.report.extra.get("init_s", {})))


if __name__ == "__main__":
    raise SystemExit(main())
