"""One process a rank, talking to the parent in JSON: the parent keeps every row that came through.

A rank that fails or a part that takes too long costs what is missing, never what was measured.
"""

from __future__ import annotations

import json
import multiprocessing
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["Link", "run_ranks"]

Message = dict[str, Any]


class Link:
    """A rank's way to the parent and to the other ranks.

    Attributes:
        rank: this rank.
        nranks: how many there are.

    """

    def __init__(self, rank: int, nranks: int, pipe: Connection, barrier: Any) -> None:
        self.rank, self.nranks = rank, nranks
        self._pipe, self._barrier = pipe, barrier

    def barrier(self) -> None:
        """Wait until all ranks are here, a minute at most."""
        self._barrier.wait(60)

    def broken(self) -> bool:
        """Whether another rank has failed."""
        return bool(self._barrier.broken)

    def exchange(self, value: str) -> list[str]:
        """Give a string, get those of all ranks."""
        self._pipe.send_bytes(json.dumps({"exchange": value}).encode())
        return list(json.loads(self._pipe.recv_bytes()))

    def allgather(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes in rank order: a link is a bootstrap of ``ringcoll.init``."""
        return [bytes.fromhex(text) for text in self.exchange(payload.hex())]

    def send(self, message: Message) -> None:
        """Give the parent a part of the result."""
        self._pipe.send_bytes(json.dumps(message).encode())


def _rank(
    work: Callable[..., None],
    rank: int,
    nranks: int,
    pipe: Connection,
    barrier: Any,
    args: Any,
    inherited: Sequence[Connection],
) -> None:
    for end in inherited:  # the parent's: with a copy of one a rank would not see the parent die
        end.close()
    link = Link(rank, nranks, pipe, barrier)
    try:
        work(link, *args)
        link.send({"done": True})
    except Exception:
        barrier.abort()
        link.send({"error": f"rank {rank}: {traceback.format_exc(limit=-4)}"})


def run_ranks(
    work: Callable[..., None],
    nranks: int,
    args: tuple[Any, ...],
    seconds: float,
    on_messages: Callable[[list[Message]], None],
    *,
    forked: bool = False,
) -> str | None:
    """Run ``work(link, *args)`` in one process a rank.

    Args:
        work: a function of a module; all ranks send the same messages in the same order.
        nranks: how many ranks.
        args: what they get, the same for all.
        seconds: after which they are killed.
        on_messages: takes one message of every rank, by rank.
        forked: from this process, which must not have used a GPU, nor computed on several threads:
            ranks need not load again what it has, of which torch takes seconds.

    Returns:
        What went wrong, or None.

    """
    context: Any = multiprocessing.get_context("fork" if forked else "spawn")
    barrier = context.Barrier(nranks)
    deadline = time.monotonic() + seconds
    pipes: list[Connection] = []
    processes: list[Any] = []
    try:
        for rank in range(nranks):
            ours, theirs = context.Pipe()
            inherited = [*pipes, ours] if forked else []
            given = work, rank, nranks, theirs, barrier, args, inherited
            process = context.Process(target=_rank, args=given, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        return _serve(pipes, deadline, on_messages)
    finally:
        patience = time.monotonic() + 3
        for process in processes:
            process.join(max(0.0, patience - time.monotonic()))
            if process.is_alive():
                process.kill()
        for process in processes:
            process.join(3)


def _serve(
    pipes: list[Connection], deadline: float, on_messages: Callable[[list[Message]], None]
) -> str | None:
    """Take messages, one of every rank at a time, until all are done or one has failed."""
    inboxes: list[deque[Message]] = [deque() for _ in pipes]
    rank_of = {pipe: rank for rank, pipe in enumerate(pipes)}
    consequences: list[str] = []
    while True:
        ready = wait(list(rank_of), max(0.0, deadline - time.monotonic()))
        if not ready:
            silent = [rank for rank in rank_of.values() if not inboxes[rank]]
            return f"the time was over, and ranks {silent} had not reported"
        for pipe in ready:
            rank = rank_of[pipe]  # type: ignore[index]
            try:
                message = json.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, OSError):
                if inboxes[rank] and "done" in inboxes[rank][-1]:
                    del rank_of[pipe]  # type: ignore[arg-type]
                    continue  # it is ahead of the others
                return consequences[0] if consequences else f"rank {rank} died"
            if "error" not in message:
                inboxes[rank].append(message)
            elif "BrokenBarrier" not in message["error"]:
                return str(message["error"])
            else:
                # Another rank failed first, and its own report is on the way.
                consequences.append(message["error"])
                del rank_of[pipe]  # type: ignore[arg-type]
                if not rank_of:
                    return consequences[0]
        while all(inboxes):
            messages = [inbox.popleft() for inbox in inboxes]
            if "done" in messages[0]:
                return None
            if "exchange" in messages[0]:
                values = [message["exchange"] for message in messages]
                for pipe in pipes:
                    pipe.send_bytes(json.dumps(values).encode())
            else:
                on_messages(messages)
