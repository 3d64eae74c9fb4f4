"""Ranks that leave at random moments of a program: the others learn who, and go on without them.

``python -m tests.processes.programs.leavings COUNT SEED --modes threads,processes --out FOLDER``
draws so many cases of each mode and prints a line of JSON. The ranks of a case are threads of a
fork of this process, or forks; by "mpiexec" and on two "nodes" mpiexec starts them: ``one MODE
NUMBER`` is one rank of a case. After an error the others shrink, repeatedly while that raises
RankLostError too, and go on where they were.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import re
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import ringcoll
from benchmarks.record import add_out, save
from ringcoll.bootstrap.sockets import HostBootstrap
from tests.processes.programs import launched
from tests.processes.programs.setting import own_rank
from tests.processes.programs.verdict import say

TIMEOUT = 8.0  # seconds
LIMIT = 8 * TIMEOUT  # seconds, after which a case hangs
STEPS = 12  # calls of a program
TRIES = 6  # of shrink()
THREAD_WAYS = ("return", "raise", "exit", "close", "block")
PROCESS_WAYS = (*THREAD_WAYS, "kill", "kill later")
FORKED, LAUNCHED = ("threads", "processes"), ("mpiexec", "nodes")


class Unhandled(Exception):
    """What a rank raises on purpose."""


@dataclass(frozen=True)
class Case:
    """Who leaves, how and before which step; ``steps`` are the calls that all make."""

    mode: str
    number: int
    nranks: int
    steps: list[tuple[str, int]]
    leavers: dict[int, tuple[str, int, float]]

    @property
    def stay(self) -> list[int]:
        """The ranks that stay."""
        return [rank for rank in range(self.nranks) if rank not in self.leavers]

    @staticmethod
    def draw(mode: str, number: int) -> Case:
        mixed = random.Random(f"{mode} {number}")
        nranks = mixed.randint(2, 5)
        steps = [(mixed.choice(list(CALLS)), mixed.choice((3, 500, 100_000))) for _ in range(STEPS)]
        # A thread that has made no call of its rank is nobody's.
        ways, least = (THREAD_WAYS, 1) if mode == "threads" else (PROCESS_WAYS, 0)
        lost = mixed.sample(range(nranks), mixed.randint(1, min(3, nranks - 1)))
        first, leavers = mixed.randrange(STEPS), {}
        for rank in lost:
            way = mixed.choice(ways)
            moment = first if mixed.random() < 0.5 else mixed.randrange(STEPS)
            moment = max(moment, 0 if way == "block" else least)
            leavers[rank] = way, moment, mixed.random() ** 3 * 0.02
        return Case(mode, number, nranks, steps, leavers)


def grouped(comm: Any, x: Any) -> None:
    with ringcoll.group():
        comm.all_reduce(x)
        comm.barrier()


def asynchronous(comm: Any, x: Any) -> None:
    works = [comm.all_reduce(x, async_op=True), comm.barrier(async_op=True)]
    for work in works:
        work.wait()


def child(comm: Any, x: Any) -> None:
    part = comm.split(0, key=-comm.rank)
    try:
        part.all_reduce(x)
    finally:
        part.close()


def halves(comm: Any, x: Any) -> None:
    part = comm.split(comm.rank % 2)
    try:
        part.all_reduce(x)
    finally:
        part.close()


def ring(comm: Any, x: Any) -> None:
    comm.sendrecv(x, (comm.rank + 1) % comm.nranks, x.copy(), (comm.rank - 1) % comm.nranks)


CALLS: dict[str, Callable[[Any, Any], object]] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "broadcast": lambda comm, x: comm.broadcast(x, root=comm.nranks - 1),
    "reduce": lambda comm, x: comm.reduce(x),
    "barrier": lambda comm, _: comm.barrier(),
    "empty": lambda comm, x: comm.empty(x.size),
    "group": grouped,
    "async": asynchronous,
    "split": child,
    "halves": halves,
    "ring": ring,
}


@dataclass
class Rank:
    """One rank's life."""

    case: Case
    comm: Any
    errors: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0
    last: str = ""

    def __post_init__(self) -> None:
        self.own = self.comm.rank
        self.members = list(range(self.comm.nranks))
        self.left = self.case.nranks - len(self.case.leavers)

    def live(self) -> dict[str, Any]:
        """Make all calls, with those that are left, and end alone with the ranks that stay."""
        total = 0.0
        while self.step < STEPS or self.comm.nranks > self.left:
            self.perhaps_leave()
            name, count = self.case.steps[self.step] if self.step < STEPS else ("barrier", 3)
            self.attempt(name, CALLS[name], count)
            self.step += 1
        x = np.full(4, self.own + 1.0)
        self.comm.all_reduce(x)
        total = float(x[0])
        self.comm.close()
        return {"errors": self.errors, "members": self.members, "sum": total}

    def perhaps_leave(self) -> None:
        if self.own not in self.case.leavers:
            return
        way, at, delay = self.case.leavers[self.own]
        if self.step < at:
            return
        if way == "kill later" and self.step == at:
            # In the middle of this call or of a later one.
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
            return
        time.sleep(delay / 4)
        leave("kill" if way == "kill later" else way, self.comm)

    def attempt(self, name: str, call: Callable[[Any, Any], object], count: int) -> None:
        """Make a call; after an error, those that are left agree where to go on."""
        self.last, started = name, time.monotonic()
        try:
            call(self.comm, np.ones(count))
            return
        except ringcoll.Error as error:
            self.note(name, error, started)
        for number in range(TRIES):
            self.last, started = f"shrink {number}", time.monotonic()
            try:
                comm = self.comm.shrink()
            except ringcoll.RankLostError as error:
                self.note("shrink", error, started)
                continue
            self.comm, started = comm, time.monotonic()
            about = np.array([self.own, self.step])
            every = np.zeros((comm.nranks, 2), int)
            try:
                self.last = "agreeing"
                comm.all_gather(about, every)
            except ringcoll.RankLostError as error:
                self.members = []  # unknown
                self.note("agreeing", error, started)
                continue
            self.members, self.step = every[:, 0].tolist(), int(every[:, 1].max())
            return
        raise AssertionError(f"{TRIES} times no communicator: {self.errors}")

    def note(self, name: str, error: BaseException, started: float) -> None:
        took = round(time.monotonic() - started, 3)
        text = f"{type(error).__name__}: {error}"
        self.errors.append({"call": name, "error": text, "took": took, "members": self.members})


def leave(way: str, comm: Any) -> None:
    """End this rank."""
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "raise":
        raise Unhandled
    elif way == "block":
        with comm:
            raise Unhandled
    elif way == "close":
        comm.close()
    sys.exit(0)  # a thread returns by it, too


def named_lost(case: Case, call: str, members: list[int], rank: int) -> set[int]:
    """The numbers by which an error of a call may name ranks that have left.

    A call that makes a part of the communicator uses it too, where ranks have other numbers.
    """
    lost = {at for at, member in enumerate(members) if member in case.leavers}
    parts = {
        "split": {len(members) - 1 - at for at in lost},
        "halves": {at // 2 for at in lost if rank in members[at % 2 :: 2]},
    }
    return lost | parts.get(call, set())


def wrong(case: Case, found: dict[int, dict[str, Any]]) -> list[str]:
    """What is wrong with the reports of the ranks that stayed."""
    problems, stay = [], case.stay
    for rank in range(case.nranks):
        report = found.get(rank, {"failed": "no report"})
        if "failed" in report and rank in {*stay, *found}:
            problems.append(f"rank {rank}: {report['failed']}")
        if rank not in stay or "failed" in report:
            continue
        if report["members"] != stay or report["sum"] != sum(rank + 1.0 for rank in stay):
            problems.append(f"rank {rank} ends with {report['members']}, sum {report['sum']}")
        for error in report["errors"]:
            named = {int(number) for number in re.findall(r"rank (\d+)", error["error"])}
            members = error["members"]
            lost = named_lost(case, error["call"], members, rank)
            # Of the second of two asynchronous calls: ClosedError, which names the first's.
            kinds = ("RankLostError", "AbortedError", "DeadlineError", "ClosedError")
            if (members and not named & lost) or not error["error"].startswith(kinds):
                problems.append(f"rank {rank} of {members}, {error['call']}: {error['error']}")
            if error["took"] > TIMEOUT + 1:
                problems.append(f"rank {rank}, {error['call']}, {error['took']} s")
    return problems


# -- running a case ------------------------------------------------------------------------------


def piped(pipe: int) -> Callable[..., object]:
    """What sends a report through a pipe."""
    return lambda **words: os.write(pipe, json.dumps(words).encode() + b"\n")


def threads_of(case: Case, pipe: int) -> None:
    """The case in this process."""
    threading.excepthook = lambda _: None
    comms = ringcoll.init_all(case.nranks, device="cpu", timeout=TIMEOUT)

    def work(rank: int) -> None:
        report(piped(pipe), rank, Rank(case, comms[rank]))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(case.nranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def report(send: Callable[..., object], rank: int, life: Rank) -> None:
    """Live, and send what came of it; what ends the rank on purpose goes on."""
    found: dict[str, Any]
    try:
        found = life.live()
    except Unhandled:
        raise
    except Exception as error:
        found = {"failed": f"{life.last}, step {life.step}: {type(error).__name__}: {error}"}
        found["failed"] += f" after {life.errors}"
    send(rank=rank, **found)


def gathered(case: Case, reading: int, late: float) -> dict[int, dict[str, Any]]:
    """The reports of the ranks, until all that stay have sent theirs, or until a time."""
    text = b""
    found: dict[int, dict[str, Any]] = {}
    while not {*case.stay} <= found.keys():
        left = max(0.0, late - time.monotonic())
        part = os.read(reading, 1 << 16) if select.select([reading], [], [], left)[0] else b""
        if not part:
            break
        text += part
        found = launched.reports_of(text.decode())
    return found


def forked(case: Case, log: str) -> dict[int, dict[str, Any]]:
    """A case whose ranks are this process's forks, or threads of one."""
    reading, writing = os.pipe()
    job = f"ringcoll-test-{os.getpid()}-{os.urandom(8).hex()}"
    children = []
    for rank in range(1 if case.mode == "threads" else case.nranks):
        children.append(os.fork())
        if children[-1]:
            continue
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 2)
        faulthandler.dump_traceback_later(LIMIT - 2)
        if case.mode == "threads":
            threads_of(case, writing)
        else:
            bootstrap = HostBootstrap(job, rank, case.nranks, TIMEOUT)
            comm = ringcoll.init(bootstrap, device="cpu", timeout=TIMEOUT)
            report(piped(writing), rank, Rank(case, comm))
        sys.exit(0)
    os.close(writing)
    found = gathered(case, reading, time.monotonic() + LIMIT)
    os.close(reading)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return found


def over_mpi(case: Case, log: str) -> dict[int, dict[str, Any]]:
    """A case whose ranks mpiexec starts."""
    words = [str(Path(__file__)), "one", case.mode, str(case.number)]
    with Path(log).open("ab") as file:
        return launched.launched(case.nranks, words, case.stay, LIMIT, file)


def one(mode: str, number: int) -> None:
    """This process as a rank of a case."""
    case, rank = Case.draw(mode, number), own_rank()
    faulthandler.dump_traceback_later(LIMIT - 2)
    node = f"host {rank % 2}" if mode == "nodes" else None
    comm = ringcoll.init(device="cpu", timeout=TIMEOUT, node=node)
    report(launched.report, rank, Rank(case, comm))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, help="cases of each mode")
    parser.add_argument("seed", type=int, help="number of the first case")
    parser.add_argument("rest", nargs="*", help="words that mark the process")
    parser.add_argument("--modes", default=",".join(FORKED), help=", ".join(FORKED + LAUNCHED))
    parser.add_argument("--log", default=os.devnull, help="what the ranks write to stderr")
    parser.add_argument("--name", default="leavings", help="of the record")
    add_out(parser)
    args = parser.parse_args()
    with ringcoll.init(device="cpu") as comm:  # what that imports no child need import
        for call in (CALLS["all_reduce"], CALLS["group"]):
            call(comm, np.ones(3))
    modes = {}
    for mode in args.modes.split(","):
        run = forked if mode in FORKED else over_mpi
        failures, kinds, took = [], Counter[str](), [0.0]
        for number in range(args.seed, args.seed + args.count):
            case = Case.draw(mode, number)
            found = run(case, args.log)
            problems = wrong(case, found)
            failures += [f"{mode} {number} {case.leavers}: {problems}"] if problems else []
            for error in (error for one in found.values() for error in one.get("errors", ())):
                kinds[error["error"].partition(":")[0]] += 1
                took.append(error["took"])
            if problems:
                print(failures[-1], file=sys.stderr, flush=True)
        took.sort()
        modes[mode] = {
            "cases": args.count,
            "first": args.seed,
            "failures": failures,
            "errors": dict(kinds),
            "seconds": {"median": took[len(took) // 2], "longest": took[-1]},
        }
    about = {"timeout": TIMEOUT, "load": [round(load, 1) for load in os.getloadavg()]}
    say(0, **about, modes=modes)
    save(args.out, args.name, {**about, "modes": modes}, ranks=5)


if __name__ == "__main__":
    if sys.argv[1] == "one":
        one(sys.argv[2], int(sys.argv[3]))
    else:
        main()
