"""What the commands share that time GPU ranks: options, the record, a row of all ranks, the end."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.processes import run_ranks
from benchmarks.gpu.report import Report
from benchmarks.needs import require
from benchmarks.record import add_out
from ringcoll.bench.environment import machine

__all__ = ["Run", "begin", "slowest"]


class Run:
    """One run of a command: its options, its ranks and its record.

    Attributes:
        options: from the command line.
        ranks: how many.
        one_gpu: whether they share the first GPU.
        report: the record.

    """

    def __init__(self, options: argparse.Namespace, ranks: int, name: str) -> None:
        self.options, self.ranks = options, ranks
        device = getattr(options, "device", "cuda")
        kind = "gpu" if device == "cuda" else device
        self._forked = device == "cpu"
        self.one_gpu: bool = getattr(options, "one_gpu", False)
        file = f"{kind}_{name}_{ranks}{'_on_one_gpu' if self.one_gpu else ''}.json"
        path: Path | None = options.out and options.out / file
        self.report = Report(path, name)
        if self.one_gpu:
            self.report.note("one_gpu", True)
        self.report.note("machine", machine(ranks, threads=False, device=device))
        if options.commit:
            self.report.note("commit", options.commit)

    def measure(
        self,
        part: str,
        work: Callable[..., None],
        args: tuple[Any, ...],
        keep: Callable[[list[dict[str, Any]]], None],
    ) -> None:
        """Run ``work(link, *args)`` on all ranks; ``keep`` takes a message of every rank."""
        seconds, forked = self.options.seconds, self._forked
        error = run_ranks(work, self.ranks, args, seconds, keep, forked=forked)
        self.report.fail(part, error)

    def end(self, table: str) -> int:
        """Print the record's path and the table; the exit status of the command."""
        if self.report.path is not None:
            print(self.report.path)
        print(table or "nothing was timed")
        wrong = sum(row["wrong"] for row in self.report.rows)
        print(f"wrong elements: {wrong}")
        return 1 if self.report.errors or wrong else 0


def begin(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    name: str,
    *,
    torch: bool = False,
    shares: bool = False,
) -> Run:
    """Parse the command line; end the program where the machine lacks what the command needs.

    Args:
        parser: with the command's own options; where ``--device`` is one, CPU ranks need no GPU.
        argv: the command line.
        name: the command's module.
        torch: it needs torch.
        shares: its ranks may share a GPU, as they do with ``--one-gpu``.

    """
    if shares:
        parser.add_argument(
            "--one-gpu",
            action="store_true",
            help="all ranks share the first GPU, which runs one at a time: figures of the host "
            "alone mean something",
        )
    parser.add_argument("--ranks", type=int, default=0, help="0: all GPUs")
    parser.add_argument("--seconds", type=float, default=45.0, help="after which ranks are ended")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git")
    add_out(parser)
    options = parser.parse_args(argv)
    on_gpus = getattr(options, "device", "cuda") == "cuda"
    shared = shares and options.one_gpu
    ranks = options.ranks or (2 if shared else 0)
    there = require(parser, gpus=(1 if shared else ranks or 1) if on_gpus else 0, torch=torch)
    return Run(options, ranks or there or 2, name)


def slowest(messages: Sequence[Mapping[str, Any]], *figures: str) -> dict[str, Any]:
    """A row of a message of every rank: the largest of each figure, and all wrong elements."""
    largest = {key: round(max(message[key] for message in messages), 2) for key in figures}
    wrong = sum(message["wrong"] for message in messages)
    return {**messages[0], **largest, "wrong": wrong, "ranks": len(messages)}
