"""What ringcoll needs in order to begin: a rank, their number, and one way to exchange bytes."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import Any, Protocol

from ringcoll.bootstrap.overlap import overlapping, refused_by_peer
from ringcoll.errors import (
    AbortedError,
    DeadlineError,
    Error,
    MachineError,
    MismatchError,
    OutOfMemory,
    RankLostError,
)

_KINDS: dict[str, type[Error]] = {
    kind.__name__: kind
    for kind in (
        *(AbortedError, DeadlineError, MachineError),
        *(MismatchError, OutOfMemory, RankLostError),
    )
}
_LONGEST = 2000  # characters
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Bootstrap(Protocol):
    """Any object with these three is a bootstrap."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def nranks(self) -> int:
        """How many ranks there are."""

    def allgather(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes in rank order; collective; lengths may differ."""


class SingleBootstrap:
    """The bootstrap of a process that is alone."""

    rank = 0
    nranks = 1

    def allgather(self, payload: bytes) -> list[bytes]:
        """The payload itself."""
        return [payload]


def mpi_running() -> Any | None:
    """mpi4py's MPI module if it is loaded and between Init and Finalize."""
    package = sys.modules.get("mpi4py.MPI")
    if package is None or not package.Is_initialized() or package.Is_finalized():
        return None
    return package


def whole(number: Any) -> int | None:
    """An integer of any kind, numpy's too; None for what is none, a bool among that."""
    try:
        return None if isinstance(number, bool) else index(number)
    except TypeError:
        return None


def gathered(bootstrap: Bootstrap, value: object) -> list[Any]:
    """Every rank's value, as JSON carries it; a rank's :class:`Failure` is raised. Collective."""
    found = []
    for rank, part in enumerate(bootstrap.allgather(json.dumps(value).encode())):
        try:
            found.append(json.loads(part))
        except (ValueError, RecursionError):
            raise malformed(rank, part) from None
        if type(found[-1]) is dict and "failure" in found[-1]:
            raise Failure.decode(part).error()
    return found


def exchange_values(
    bootstrap: Bootstrap, values: Sequence[object], types: Sequence[type]
) -> list[list[Any]]:
    """Every rank's values, checked to be of these types; collective."""
    found = gathered(bootstrap, values)
    for rank, received in enumerate(found):
        if type(received) is not list or [type(value) for value in received] != [*types]:
            raise malformed(rank, received)
    return found


def malformed(rank: int, received: object) -> MachineError:
    """The error about what a rank has sent."""
    shown = repr(received)
    return MachineError(
        f"init: rank {rank} sent what ringcoll does not send: {shown[:80]}; do all ranks run one "
        "version of it, and does the bootstrap carry nothing else?"
    )


def named(ranks: Sequence[int]) -> str:
    """``rank 2`` or ``ranks 1, 2``, for messages."""
    listed = ", ".join(map(str, ranks))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def this_process() -> str:
    """This process, or a thread of it that is not its first, as other ranks' errors name it."""
    process, thread = os.getpid(), threading.get_native_id()
    text = f"process {process} on host {os.uname().nodename}"
    return text if thread == process else f"{text} (thread {thread})"


def shortage(error: BaseException, rank: int | None) -> OutOfMemory | None:
    """The error to raise where this process can open no descriptor or start no thread."""
    if isinstance(error, OSError) and error.errno in _SHORTAGES:
        remedy = "raise ulimit -n" if error.errno == errno.EMFILE else "end other processes"
    elif isinstance(error, RuntimeError) and "start new thread" in str(error):
        remedy = "raise ulimit -u"
    else:
        return None
    who = "this rank" if rank is None else f"rank {rank}"
    return OutOfMemory(f"init: {who} lacks descriptors, threads or memory ({error}): {remedy}")


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that another rank must raise: the name of its class, and its text.

    ``origin`` is the process that reports it without being a rank; ``overlap``: two of its threads
    have begun at the same time, and none of what they began will meet another rank.
    """

    kind: str
    text: str
    origin: str = ""
    overlap: bool = False

    @staticmethod
    def of(error: BaseException, rank: int) -> Failure:
        """What the others raise when an error ends the ``init`` of a rank."""
        kind = type(error).__name__
        if isinstance(error, SystemExit):
            return Failure("RankLostError", f"rank {rank} has exited during init")
        if isinstance(error, (DeadlineError, MismatchError, RankLostError)):
            return Failure(
                kind if kind in _KINDS else "RankLostError", f"reported by rank {rank}: {error}"
            )
        if isinstance(error, MachineError):
            return Failure(
                kind if kind in _KINDS else "MachineError", f"rank {rank} failed: {error}"
            )
        text = f"rank {rank} aborted: {kind}: {error}"
        return Failure("AbortedError", text, overlap=overlapping())

    def encode(self) -> bytes:
        """JSON of it."""
        sent: dict[str, object] = {"failure": self.kind, "text": self.text[:_LONGEST]}
        sent |= {"origin": self.origin, "overlap": self.overlap}
        return json.dumps(sent).encode()

    @staticmethod
    def decode(payload: bytes) -> Failure:
        """Undo :meth:`encode`, of whatever bytes."""
        try:
            found = json.loads(payload)
            sent = [found["failure"], found["text"], found.get("origin", "")]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            sent = []
        if not sent or not all(isinstance(part, str) for part in sent) or sent[0] not in _KINDS:
            return Failure("MachineError", f"a rank sent a malformed error: {payload[:80]!r}")
        kind, text, origin = sent
        return Failure(kind, text[:_LONGEST], origin, found.get("overlap") is True)

    def error(self) -> Error:
        """The error to raise; other threads that come to this one's world soon raise it too."""
        if self.overlap:
            refused_by_peer(partial(_KINDS[self.kind], self.text))
        return _KINDS[self.kind](self.text)
