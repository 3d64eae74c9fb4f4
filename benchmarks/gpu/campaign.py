"""A campaign of random calls, each result of which is compared with plain numpy.

::

    python -m benchmarks.gpu.campaign [--ranks N] [--calls 1000] [--seed S] [--seconds 60]
        [--device cuda|cpu] [--most BYTES] [--first NUMBER] [--kernel-wait 0.05]
        [--commit HASH] [--out FOLDER]

One process a GPU. All ranks draw the same calls: collective, dtype, operator, size, memory and
place of the buffers, in place or not, options, alone or in a group, one of two communicators,
eager, asynchronous, or captured in a CUDA graph and replayed. Before each call its inputs are new
random numbers and its outputs poison; after it every byte of its buffers, with guards around them,
is compared. An option that all ranks refuse is counted. The first wrong or failing call ends the
campaign, and is named with the command that makes it again. No call begins after ``--seconds``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu.campaign_arrays import Held, Machine, held, kinds_of
from benchmarks.gpu.campaign_calls import Call, Side, arguments, slot
from benchmarks.gpu.campaign_draw import REPLAYS, Setup, Trial, draw
from benchmarks.gpu.campaign_numbers import Array, images
from benchmarks.gpu.command import begin, slowest
from benchmarks.gpu.processes import Link, run_ranks
from ringcoll.errors import ArgumentError, LaunchRefused

__all__ = ["Failed", "main", "play", "table", "work"]

GRACE = 60.0
"""Seconds for the start of the ranks and for the last call, after which they are ended."""
TIMEOUT = 20.0
MOST = {"cuda": 64 << 20, "cpu": 4 << 20}
"""Bytes of the largest buffer, by device."""
WAYS = ("eager", "async", "graph")


class Failed(Exception):
    """A call that is wrong or fails, with everything that makes it again."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a step on this rank.

    Attributes:
        results: buffers that were compared.
        wrong: elements that differ.
        text: the first of them in words; "" if there are none.
        refused: why the call cannot be made; "" if it was.

    """

    results: int = 0
    wrong: int = 0
    text: str = ""
    refused: str = ""


Buffers = list[tuple[Call, dict[Side, Held]]]


def views_of(own: Buffers, rank: int) -> list[tuple[list[Any], dict[str, Any]]]:
    """The arguments of every call, with views that are made now."""
    found = []
    for call, sides in own:
        views = {side: buffer.view(call.dtype) for side, buffer in sides.items()}
        part = None
        if call.aliased(rank):
            (buffer,) = sides.values()
            part = buffer.view(call.dtype, slot(call, rank))
        found.append(arguments(call, rank, views, part))
    return found


def make(machine: Machine, trial: Trial, given: list[tuple[list[Any], dict[str, Any]]]) -> None:
    """Make the calls of a step once, as a group where they are several."""
    import ringcoll

    how: dict[str, Any] = {"stream": machine.stream} if trial.stream == "named" else {}
    if trial.way == "async":
        how["async_op"] = True
    with ringcoll.group() if len(trial.calls) > 1 else contextlib.nullcontext():
        for call, (positional, named) in zip(trial.calls, given, strict=True):
            method = getattr(machine.comms[call.second], call.collective)
            pending = method(*positional, **named, **how)
            if trial.way == "async":
                pending.wait()


def fill(own: Buffers, rank: int, turn: int) -> list[tuple[Call, Side, Held, Array]]:
    """Write what all buffers hold before a turn; what they must hold after it."""
    wanted = []
    for call, sides in own:
        for side, (before, after) in images(call, rank, turn).items():
            sides[side].fill(before)
            wanted.append((call, side, sides[side], after))
    return wanted


def compare(call: Call, side: Side, buffer: Held, after: Array) -> tuple[int, str]:
    """How many elements differ, those of the guards too, and the first of them in words."""
    item = call.numpy.itemsize
    seen, right = (each.reshape(-1, item) for each in (buffer.read(), buffer.image(after)))
    if np.array_equal(seen, right):
        return 0, ""
    differ = (seen != right).any(1)
    wrong, at = int(differ.sum()), int(differ.argmax())
    values = [each[at].view(call.numpy)[0] for each in (seen, right)]
    where = f"element {at - buffer.start // item} of {buffer.nbytes // item} of {side}buf"
    where += f" of {call.collective} {call.key}"
    return wrong, f"{wrong} wrong, {where} first: {values[0]} for {values[1]}"


def turns(machine: Machine, trial: Trial, own: Buffers, rank: int) -> Iterator[Callable[[], None]]:
    """What makes the calls of a step, turn after turn, on buffers that are filled."""
    given = views_of(own, rank)

    def once() -> None:
        make(machine, trial, given if trial.kept else views_of(own, rank))

    for _ in range(trial.turns):
        yield once
    if trial.way == "graph":
        from ringcoll.bench.gpu import captured

        graph = captured(machine.stream, partial(make, machine, trial, given), 1)
        for _ in range(REPLAYS):
            yield partial(graph.launch, machine.stream)


def run(machine: Machine, trial: Trial, rank: int) -> Verdict:
    """All turns of a step, up to one that is refused.

    A rank makes them all where one is wrong: the others could not be told, and would wait for it.
    """
    own: Buffers = [(call, held(machine, call, rank)) for call in trial.calls]
    results = unequal = 0
    said = refused = ""
    current = trial.stream == "current"
    with machine.on_stream() if current else contextlib.nullcontext():
        try:
            for turn, once in enumerate(turns(machine, trial, own, rank)):
                wanted = fill(own, rank, turn)
                machine.settle()
                once()
                machine.settle()
                for call, side, buffer, after in wanted:
                    wrong, text = compare(call, side, buffer, after)
                    results, unequal = results + 1, unequal + wrong
                    if wrong and not said:
                        said = f"rank {rank}, turn {turn}: {text}"
        except (LaunchRefused, ArgumentError) as error:
            if not any(call.options for call in trial.calls):
                raise
            refused = str(error)
    return Verdict(results, unequal, said, refused)


def again(setup: Setup, number: int) -> str:
    """The command that makes a call alone."""
    return (
        f"python -m benchmarks.gpu.campaign --ranks {setup.nranks} --device {setup.device} "
        f"--seed {setup.seed} --most {setup.most} --first {number} --calls 1"
    )


def play(link: Link, machine: Machine, setup: Setup) -> dict[str, Counter[str]]:
    """Make the calls of a campaign, and count them by collective.

    Raises:
        Failed: a call failed on this rank, or was wrong or refused on some rank.

    """
    rows: dict[str, Counter[str]] = {}
    began = time.monotonic()
    for number in range(setup.first, setup.first + setup.calls):
        trial = draw(setup, number)
        named = f"call {number} of seed {setup.seed}: {trial}\n{again(setup, number)}"
        try:
            verdict = run(machine, trial, link.rank)
        except Exception as error:
            raise Failed(f"rank {link.rank}: {type(error).__name__}: {error}\n{named}") from error
        late = time.monotonic() - began > setup.seconds
        shared = json.dumps([verdict.text, verdict.refused, late])
        found = [json.loads(text) for text in link.exchange(shared)]
        texts, refusals, lates = zip(*found, strict=True)
        row = rows.setdefault(trial.name, Counter(dict.fromkeys(("refused", "wrong", *WAYS), 0)))
        row["calls"] += 1
        row["results"] += verdict.results
        row["wrong"] += verdict.wrong
        row["refused"] += bool(verdict.refused)
        row[trial.way] += not verdict.refused
        if any(refusals) and not all(refusals):
            raise Failed(f"refused by some ranks alone: {refusals}\n{named}")
        if any(texts):
            tell(link, rows)
            link.exchange("")  # rows are kept before a rank's error ends the run
            raise Failed("\n".join([*filter(None, texts), named]))
        if any(lates):
            break
    tell(link, rows)
    return rows


def tell(link: Link, rows: dict[str, Counter[str]]) -> None:
    """Give the parent a row a collective."""
    for name in sorted(rows):
        link.send({"name": name, **rows[name]})


def work(link: Link, setup: Setup) -> None:
    """What one rank does; a message a collective."""
    import ringcoll

    stream = tensors = None
    how: dict[str, Any] = {}
    kinds = kinds_of(setup.device)
    if setup.device == "cuda":
        import cupy

        cupy.cuda.Device(link.rank).use()
        stream = cupy.cuda.Stream(non_blocking=True)
        how = {"kernel_wait": setup.kernel_wait}
        if len(kinds) > 1:
            import torch

            torch.cuda.set_device(link.rank)
            tensors = torch.cuda.ExternalStream(stream.ptr)
    comm: Any = ringcoll.init(link, device=setup.device, timeout=TIMEOUT, **how)
    second = comm.split(0)
    machine = Machine((comm, second), setup.most, stream, tensors)
    play(link, machine, replace(setup, kinds=kinds))
    second.close()
    comm.close()


def table(rows: Sequence[dict[str, Any]], setup: Setup) -> str:
    """A line a collective, and how many calls there were."""
    columns = ("calls", "results", "refused", *WAYS, "wrong")
    lines = [f"{'':<18}" + "".join(f"{column:>9}" for column in columns)]
    for row in rows:
        lines.append(f"{row['name']:<18}" + "".join(f"{row[column]:>9}" for column in columns))
    ran = sum(row["calls"] for row in rows)
    return "\n".join([*lines, f"seed {setup.seed}: {ran} of {setup.calls} calls"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit status is 1 if a call failed or an element is wrong."""
    parser = argparse.ArgumentParser(description="Random calls, each compared with numpy.")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: 2 ranks by default"
    )
    parser.add_argument("--calls", type=int, default=1000, help="how many at most")
    parser.add_argument("--seed", type=int, help="of all calls; a new one by default")
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--most", type=int, help="bytes of the largest buffer")
    parser.add_argument(
        "--kernel-wait",
        type=float,
        default=0.05,
        help="seconds that a first call waits for its own kernel; then a generic one runs it",
    )
    words = sys.argv[1:] if argv is None else argv
    # A minute by default: the last one given counts.
    run = begin(parser, ["--seconds", "60", *words], "campaign")
    options = run.options
    setup = Setup(
        seed=secrets.randbits(32) if options.seed is None else options.seed,
        nranks=run.ranks,
        device=options.device,
        most=options.most or MOST[options.device],
        calls=options.calls,
        first=options.first,
        seconds=options.seconds,
        kernel_wait=options.kernel_wait,
    )
    run.report.note("seed", setup.seed)
    limit = setup.seconds + GRACE
    run.report.fail(
        "ranks", run_ranks(work, run.ranks, (setup,), limit, lambda of: run.report.add(slowest(of)))
    )
    return run.end(table(run.report.rows, setup))


if __name__ == "__main__":
    raise SystemExit(main())
