"""The report of a kernel that failed, as one of the library's errors."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ringcoll.errors import AbortedError, ClosedError, DeadlineError, Error
from ringcoll.executors.mismatch import SENDERS_WAIT, different_calls, different_ends, late_call

_REPORT = struct.Struct("<IIQIIII")  # Report of kernels/program.cuh
_EXPIRED, MISMATCH, _ABORTED, _PEER_FAILED, _EPOCH_WRAPPED, LEFT = range(1, 7)
RELAYED = _ABORTED, _PEER_FAILED
"""Kinds of reports whose cause is the host or a peer."""
HELLO = 0xFFFFFFFF
_SOURCE = 0x80000000
_PAIR, _PAIR_SENDS, _PAIR_ENTRY = 0x40000000, 1, 2

ABORT = 24
"""Offset of the word by which the host aborts kernels."""
LEFT_RANKS = 32
"""Offset of a word for each rank: 1 + the last call that it entered, once it has left."""
LEFT_PAIR = 0xFFFFFFFF
"""The word of a rank that has left and has entered all calls that this one has."""


@dataclass(frozen=True, slots=True)
class Report:
    """A kernel's report."""

    kind: int  # why the kernel failed; 0: it did not
    peer: int  # the rank for which it waited, or the number of the source or signal
    epoch: int  # the call's number
    step: int
    launch: int  # the peer's number of its different call
    own: int = 0  # this rank's number of the call; 0 where it is not known
    peers: tuple[int, ...] = ()

    @property
    def of_pair(self) -> bool:
        """Whether the kernel ran sends and receives."""
        return self.step != HELLO and bool(self.step & _PAIR)

    @property
    def other_end(self) -> str:
        """What the peer of a send or receive has not called."""
        return "recv from" if self.step & _PAIR_SENDS else "send to"

    @property
    def source(self) -> int | None:
        """The number of the missing source or signal in its step; None: ``peer`` is a rank."""
        counted = self.step != HELLO and not self.of_pair and self.peer & _SOURCE
        return self.peer & ~_SOURCE if counted else None


def read(memory: memoryview) -> Report | None:
    """The report; None if no kernel has failed."""
    if not memory[0]:  # kinds are small, and stored last
        return None
    kind, peer, epoch, step, launch, _, own = _REPORT.unpack_from(memory)
    return Report(kind, peer, epoch, step, launch, own)


def with_peers(report: Report, senders: Callable[[int, int], Sequence[int]]) -> Report:
    """A report with ranks where the kernel gave numbers: (step, number) -> those that send it."""
    if report.source is None:
        return report
    return replace(report, peers=tuple(senders(report.step, report.source)))


def error_of(
    report: Report, rank: int, last: str, timeout: float, text_of: Callable[[int, int], str]
) -> Error:
    """The error to raise; ``text_of`` returns the text of a call by (rank, launch)."""
    if report.of_pair:
        return _error_of_pair(report, rank, timeout, text_of)
    where = f"call {report.epoch} on rank {rank}"
    # The last enqueued call need not be the one that failed.
    mine = text_of(rank, report.own) if report.own else last
    if report.kind == MISMATCH:
        theirs = report.peer, text_of(report.peer, report.launch)
        return different_calls(where, [(rank, mine), theirs], symmetric=True)
    if report.kind == _EPOCH_WRAPPED:
        return ClosedError(f"{where}: the communicator has made 2**32 calls; make a new one")
    if report.step == HELLO:
        waited = f"rank {report.peer} to enter it"
        if report.kind == _EXPIRED:
            entered = "which has not entered it"
            return DeadlineError(late_call(where, timeout, f"rank {report.peer}", entered, mine))
    elif report.source is not None:
        peers = " or ".join(f"rank {peer}" for peer in report.peers)
        waited = f"{peers or f'source {report.source}'} at step {report.step}"
    else:
        waited = f"rank {report.peer} at step {report.step}"
    if report.kind == _EXPIRED:
        return DeadlineError(f"{where}: waited {timeout:g} s for {waited}; {mine}")
    if report.kind == _ABORTED:
        return AbortedError(f"{where}: aborted while it waited for {waited}; {mine}")
    return AbortedError(f"{where}: another rank's call has failed, and this one with it; {mine}")


def _error_of_pair(
    report: Report, rank: int, timeout: float, text_of: Callable[[int, int], str]
) -> Error:
    """The error of a send or receive."""
    peer, sends = report.peer, report.step & _PAIR_SENDS
    verb, to, other = ("send", "to", "recv") if sends else ("recv", "from", "send")
    mine = text_of(rank, report.own)
    what = f"call {report.epoch} of this pair" + (f", {mine}" if mine else "")
    where = f"{verb} {to} rank {peer} on rank {rank} ({what})"
    if report.kind == MISMATCH:
        theirs = text_of(peer, report.launch)
        return different_ends(rank, peer, report.epoch, mine, theirs, sends=bool(sends))
    if report.kind == _EPOCH_WRAPPED:
        return ClosedError(f"{where}: the pair has made 2**32 calls; make a new communicator")
    before = "the one before" if sends and report.step & _PAIR_ENTRY else "it"
    waited = f"rank {peer} made no {other} that matches {before}, or stopped inside it"
    if report.kind == _EXPIRED:
        remedy = SENDERS_WAIT if sends else ""
        return DeadlineError(f"{where}: waited {timeout:g} s; {waited}{remedy}")
    if report.kind == _ABORTED:
        return AbortedError(f"{where}: aborted; {waited}")
    return AbortedError(f"{where}: another rank's call has failed, and this one with it")
