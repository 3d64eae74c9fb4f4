"""Ends of a rank during ``init``, before, between and after all of its exchanges.

``python -m tests.processes.programs.dying COUNT SEED [DEVICE] --modes id,host --out FOLDER`` draws
so many cases at random for each way to begin, and prints a line of JSON. The ranks are forks of
this process, so that a case costs no start of an interpreter; on GPUs ("cuda") each begins CUDA for
itself, and has more time. Over MPI ("mpi": its world is given, "init over mpi": ``init``
initializes it) mpiexec starts them: ``one MODE HOW LOST EVENT`` is one rank of one case.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import resource
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import ringcoll
from benchmarks.record import add_out, save
from ringcoll.bootstrap import mpi
from ringcoll.bootstrap.relayed import RelayedBootstrap
from ringcoll.bootstrap.sockets import HostBootstrap
from ringcoll.fabric.process import ProcessFabric
from tests.adapters.ports import free_port
from tests.processes.programs import launched as launched_ranks
from tests.processes.programs.setting import own_rank
from tests.processes.programs.verdict import say

WAYS = ("kill", "raise", "exit", "memory", "nofile")
FORKED, OVER_MPI = ("id", "host"), ("mpi", "init over mpi")
NRANKS = 3
DEVICE = "cuda" if "cuda" in sys.argv else "cpu"
TIMEOUT = 2.0 if DEVICE == "cpu" else 20.0  # seconds
LIMIT = 15 * TIMEOUT  # seconds, after which a rank hangs


class Events:
    """Counts the moments of an ``init``, and ends this rank at one of them."""

    def __init__(self, last: int = -1, how: str = "") -> None:
        self.count, self._last, self._how = 0, last, how

    def happen(self) -> None:
        self.count += 1
        if self.count - 1 == self._last:
            end(self._how)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """An event before and after the beginning and each exchange, of bootstrap and fabric."""
        places: list[tuple[Any, str]] = [
            (RelayedBootstrap, "_join"),
            (RelayedBootstrap, "exchange"),
            (ProcessFabric, "allgather"),
            *((mpi, name) for name in ("load_mpi", "_send", "_received")),
        ]
        kept = [getattr(home, name) for home, name in places]

        def around(method: Callable[..., Any]) -> Callable[..., Any]:
            def watched(*args: Any, **how: Any) -> Any:
                self.happen()
                result = method(*args, **how)
                self.happen()
                return result

            return watched

        for (home, name), method in zip(places, kept, strict=True):
            setattr(home, name, around(method))
        try:
            self.happen()
            yield
        finally:
            for (home, name), method in zip(places, kept, strict=True):
                setattr(home, name, method)


def end(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "raise":
        raise RuntimeError("no such thing")
    elif how == "memory":
        raise MemoryError("no room")
    elif how == "exit":
        sys.exit(0)
    else:
        held = max(int(file.name) for file in Path("/proc/self/fd").iterdir()) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (held - 1, held))


def begun(make: Callable[[], dict[str, Any]], events: Events) -> dict[str, Any]:
    """One init, and the first call; what came of it."""
    started, error = time.monotonic(), ""
    try:
        with events.watching():
            comm = ringcoll.init(device=DEVICE, timeout=TIMEOUT, **make())
        comm.barrier()
        comm.close()
    except Exception as caught:
        own = "" if isinstance(caught, ringcoll.Error) else "foreign "
        error = f"{own}{type(caught).__name__}: {caught}"
    took = round(time.monotonic() - started, 3)
    return {"error": error, "took": took, "events": events.count}


def worlds(mode: str) -> list[Callable[[], dict[str, Any]]]:
    """What each rank passes to ``init``, made in its own process."""
    ranks = range(NRANKS)
    if mode == "id":
        made = f"127.0.0.1:{free_port()}:{os.urandom(16).hex()}"
        return [partial(dict, id=made, rank=rank, nranks=NRANKS) for rank in ranks]
    job = f"ringcoll-test-{os.getpid()}-{os.urandom(8).hex()}"

    def make(rank: int) -> dict[str, Any]:
        return {"bootstrap": HostBootstrap(job, rank, NRANKS, TIMEOUT)}

    return [partial(make, rank) for rank in ranks]


def child(make: Callable[[], dict[str, Any]], pipe: int, events: Events) -> NoReturn:
    """A rank: it sends what it has seen; one that has raised on purpose lives on."""
    with contextlib.suppress(SystemExit):
        found = begun(make, events)
        os.write(pipe, json.dumps(found).encode())
        if found["error"].startswith("foreign"):
            time.sleep(LIMIT)
    os._exit(0)


def case(mode: str, how: str, lost: int, event: int) -> dict[int, dict[str, Any]]:
    """What the other ranks report where one of them ends at an event."""
    pipes, children = {}, []
    for rank, make in enumerate(worlds(mode)):
        pipes[rank], writing = os.pipe()
        children.append(os.fork())
        if not children[-1]:
            child(make, writing, Events(event, how) if rank == lost else Events())
        os.close(writing)
    found = {}
    late = time.monotonic() + LIMIT
    for rank, reading in pipes.items():
        wait = 0.0 if rank == lost else max(0.0, late - time.monotonic())
        ready = select.select([reading], [], [], wait)[0]
        text = os.read(reading, 1 << 16) if ready else b""
        if rank != lost:
            found[rank] = json.loads(text) if text else {"error": "hangs", "took": LIMIT}
    for pid, reading in zip(children, pipes.values(), strict=True):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
    return found


def over_mpi(mode: str, how: str, lost: int, event: int) -> dict[int, dict[str, Any]]:
    """The same of ranks that mpiexec starts."""
    words = [str(Path(__file__)), "one", mode, how, str(lost), str(event)]
    wanted = {*range(NRANKS)} - {lost}
    found = launched_ranks.launched(NRANKS, words, wanted, LIMIT)
    return {rank: found.get(rank, {"error": "hangs", "took": LIMIT}) for rank in wanted}


def wrong(mode: str, how: str, lost: int, found: dict[int, dict[str, Any]]) -> list[str]:
    """The reports that are no error of this library which names the rank, or are late.

    A rank that comes late finds that one which serves it has ended, and may name that one, whose
    own report names the first. Who waits in MPI_Init cannot know for whom.
    """
    late = [
        f"rank {rank} after {report['took']} s: {report['error']}"
        for rank, report in found.items()
        if report["took"] > TIMEOUT + 1
    ]
    if how == "nofile" and not any(report["error"] for report in found.values()):
        return late  # it needed no more descriptors
    texts = {rank: report["error"] for rank, report in found.items()}
    legal = ("RankLostError: ", "AbortedError: ", "DeadlineError: ", "MachineError: ")
    first = [rank for rank, text in texts.items() if f"rank {lost}" in text]
    names = [f"rank {rank}" for rank in (lost, *first)]
    return late + [
        f"rank {rank}: {text or 'no error'}"
        for rank, text in texts.items()
        if not text.startswith(legal)
        or not (
            any(name in text for name in names if name != f"rank {rank}")
            or (mode == "init over mpi" and " s in MPI_Init: " in text)
        )
    ]


def campaign(mode: str, count: int, seed: int, at_once: int) -> dict[str, Any]:
    """So many cases of one way to begin, some of them at once."""
    ends = over_mpi if mode in OVER_MPI else case
    moments = max(report["events"] for report in ends(mode, "kill", -1, -1).values())
    mixed = random.Random(seed)
    took, failures, kinds = [], [], Counter[str]()
    cases = [
        (mode, WAYS[number % len(WAYS)], mixed.randrange(NRANKS), mixed.randrange(moments))
        for number in range(count)
    ]
    # By processes of one thread each: a case forks its ranks.
    with multiprocessing.get_context("fork").Pool(at_once) as pool:
        reports = pool.starmap(ends, cases, chunksize=1)
    for (_, how, lost, event), found in zip(cases, reports, strict=True):
        took += [report["took"] for report in found.values()]
        kinds.update(report["error"].partition(":")[0] or "no error" for report in found.values())
        bad = wrong(mode, how, lost, found)
        failures += [f"{mode}: rank {lost} ends by {how} at event {event}: {bad}"] if bad else []
    took.sort()
    figures = {"median": took[len(took) // 2], "longest": took[-1]}
    return {
        "cases": count,
        "events": moments,
        "failures": failures,
        "seconds": figures,
        "errors": dict(kinds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, help="cases of each way to begin")
    parser.add_argument("seed", type=int)
    parser.add_argument("rest", nargs="*", help="the device, and words that mark the process")
    parser.add_argument("--modes", default=",".join(FORKED), help=", ".join(FORKED + OVER_MPI))
    parser.add_argument("--at-once", type=int, default=1, help="cases at a time (%(default)s)")
    parser.add_argument("--name", default="deaths_in_init", help="of the record")
    add_out(parser)
    args = parser.parse_args()
    with ringcoll.init(device="cpu") as comm:  # what that imports no child need import
        comm.barrier()
    modes = args.modes.split(",")
    found = {mode: campaign(mode, args.count, args.seed, args.at_once) for mode in modes}
    about = {"timeout": TIMEOUT, "ways": WAYS, "load": [round(n, 1) for n in os.getloadavg()]}
    say(0, **about, modes=found)
    save(args.out, args.name, {**about, "modes": found}, ranks=NRANKS, device=DEVICE)


def one(mode: str, how: str, lost: int, event: int) -> None:
    """This process as one rank of a case over MPI, as on several hosts."""
    rank, given = own_rank(), {}
    ringcoll.spawn(lambda comm: comm.barrier(), 2, device="cpu")  # imports what init needs
    del os.environ["MPI_LOCALNRANKS"]
    if mode == "mpi":
        from mpi4py import MPI

        given = {"bootstrap": MPI.COMM_WORLD}
        MPI.COMM_WORLD.Barrier()
    found = begun(lambda: given, Events(event, how) if rank == lost else Events())
    launched_ranks.report(rank=rank, **found)


if __name__ == "__main__":
    if sys.argv[1] == "one":
        one(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
