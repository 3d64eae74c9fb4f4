"""Asynchronous errors: what kernels report to the host after a call has returned.

A kernel that aborts writes a report into host-mapped memory. The next call reads one word of it; a
watchdog thread checks ten times a second, logs the error and ends kernels that wait for ranks that
are dead, have left or make a control call.
"""

from __future__ import annotations

import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from ringcoll import log
from ringcoll.arguments.calls import Call
from ringcoll.cuda.device import runtime
from ringcoll.cuda.memory import HostMapped
from ringcoll.encode import BlockProgram, Program
from ringcoll.errors import DeadlineError, Error, MismatchError, RankLostError
from ringcoll.executors.cuda.cuda_call import AnyCudaCall
from ringcoll.executors.cuda.hellos import Hellos
from ringcoll.executors.cuda.ll import batches
from ringcoll.executors.cuda.ll_layout import LLLayout
from ringcoll.executors.cuda.reports import (
    LEFT,
    LEFT_PAIR,
    LEFT_RANKS,
    MISMATCH,
    RELAYED,
    Report,
    error_of,
    read,
    with_peers,
)
from ringcoll.executors.mismatch import different_calls
from ringcoll.executors.shared_state import RECORDS, SharedState
from ringcoll.fabric import Fabric
from ringcoll.tuner.choice import Choice

if TYPE_CHECKING:
    from ringcoll.executors.cuda.executor import CudaExecutor

_log = log.logger()

_EVERY = 0.1
"""Seconds between checks; a kernel that waits for a dead rank aborts within twice that."""

TOLD = DeadlineError, MismatchError, RankLostError
"""What a watchdog tells the peers, whose kernels have ended with this rank's, and a rank those that
share its launch: its own thread may do other things for long, and theirs would say only that
another rank has failed."""

_UNTIL_DECLARED = 0.3
"""Seconds for a rank whose kernel has failed to declare why: its watchdog does so by then."""


class AsyncErrors:
    """The asynchronous errors of one rank; closing them closes ``hellos``."""

    __slots__ = ("__dict__", "_found", "last")  # that torch's bridge reads

    def __init__(
        self, fabric: Fabric, report: HostMapped, hellos: Hellos, shared_state: SharedState
    ) -> None:
        self._fabric, self._rank = fabric, fabric.rank
        self._report, self._hellos, self._shared_state = report, hellos, shared_state
        self._prepared: dict[int, AnyCudaCall] = {}  # by slot of its record
        self._partial = False  # whether calls were made that end before their hellos are compared
        self._mismatch: Report | None = None
        self._left: dict[int, int] = {}  # ranks that had left: the last call that each entered
        self._words: dict[int, int] = {}  # what kernels know of them
        self._found: Error | None = None  # by the watchdog
        self._searched = False  # whether the cause of a relayed failure was waited for
        self.last: AnyCudaCall | None = None
        self._pair_timeouts: dict[int, float] = {}  # by slot of a message's record

    def prepared(self, call: AnyCudaCall) -> None:
        """Remember a call that may be launched."""
        self._prepared[call.slot] = call
        self._partial = self._partial or not call.total

    def launched_message(self, number: int, timeout: float) -> None:
        """Remember the timeout of a message by the number of its record."""
        self._pair_timeouts[number % RECORDS] = timeout

    def check(self) -> None:
        """Raise the error that a kernel has reported."""
        error = self.failure()
        if error is not None:
            raise error

    def failure(self) -> Error | None:
        """The error that a kernel of this rank has reported, or None."""
        host = self._report.host
        if not host or not host[0]:  # freed, or nothing is reported: saves a call
            return self._found
        report = read(host)
        if report is None or self._found is not None:
            return self._found
        cause = self._cause(report)
        if cause is not None:
            return cause
        if report.kind != MISMATCH and self._mismatch is None:
            # Ranks may wait for each other because they make different calls.
            with suppress(runtime().CUDARuntimeError):
                self._mismatch = self._hellos.find_mismatch()
        until = time.monotonic() + _UNTIL_DECLARED
        while report.kind in RELAYED and self._mismatch is None and not self._searched:
            time.sleep(0.005)
            cause = self._cause(report)
            if cause is not None:
                return cause
            self._searched = time.monotonic() > until
        return self._error(self._mismatch or report)

    def _cause(self, report: Report) -> Error | None:
        """A rank that has left, died or aborted, if that has ended the kernel."""
        lost = self._departed(report)
        if lost is not None:
            return self._departure(report, lost)
        if report.kind in RELAYED:
            try:
                self._fabric.check_peers(None)  # its error names the rank that died or aborted
            except Error as cause:
                return cause
        return None

    # -- ranks that have left or are in a control call ---------------------------------------

    def watch_departures(self, ended: Callable[[], bool]) -> None:
        """Let kernels know which ranks have left, and after which call.

        Of a rank that may go on in a new thread they know only while this rank has calls that it
        has not made, or for sends and receives, calls that have not ended.
        """
        left = self._fabric.left()
        if not left and not self._words:
            return
        newest = self._hellos.newest()  # read after they had left: no more can come
        # Asked again: a new thread that has taken a rank over since may have made the next call.
        gone = self._fabric.left()
        words = {}
        for rank, for_good in left.items():
            if rank not in gone:
                continue
            last = self._left[rank] = newest[rank][0]
            if for_good or last < newest[self._rank][0]:
                words[rank] = 1 + last
            elif not ended():
                words[rank] = LEFT_PAIR
        for rank in self._words.keys() | words:
            struct.pack_into("<I", self._report.host, LEFT_RANKS + 4 * rank, words.get(rank, 0))
        self._words = words

    def _departed(self, report: Report) -> int | None:
        """The rank that has left without making the call of a report."""
        if report.kind == LEFT or (report.of_pair and report.kind in RELAYED):
            return report.peer if report.peer in self._left else None
        if report.kind not in RELAYED:
            return None
        left = self._fabric.left()
        return next((r for r in left if self._left.get(r, report.epoch) < report.epoch), None)

    def _departure(self, report: Report, rank: int) -> RankLostError:
        mine = self._shared_state.recorded(self._rank, report.own)
        missed = f"call {report.epoch}, {mine}"
        if report.of_pair:
            missed = f"its {report.other_end} rank {self._rank}, {mine}"
        after = f"after call {self._left[rank]}, without making {missed}"
        return RankLostError(f"{self._fabric.departure(rank)} {after}")

    def control_mismatch(self, pending: AnyCudaCall | None) -> Error | None:
        """Find ranks that wait in a control call for this one, which has made another call.

        The host numbers calls when it enqueues them, kernels when they run: where both agree, no
        call is under way that the host does not know of, such as one of a replayed graph.

        Args:
            pending: this rank's call that waits for a launch, if any.

        """
        if self._found is not None or not self._fabric.ahead():
            return self._found
        newest = self._hellos.newest()
        mine = newest[self._rank][0] + (pending is not None)
        others = {  # looked at again: this rank has made its call before it was not there
            rank: call
            for rank, (call, before) in self._fabric.ahead().items()
            if before == newest[rank][0] and before < mine
        }
        if not others or mine != self._fabric.entered:
            return None
        self._fabric.check_failures()  # what a rank calls after a failure is no mismatch
        calls = []
        for rank, (entered, number) in enumerate(newest):
            if rank == self._rank and pending is not None:
                text = pending.call.tagged(pending.signature_text)
            elif entered >= mine:
                text = self._shared_state.recorded(rank, number)
            else:
                text = others.get(rank, "has not entered it yet")
            calls.append((rank, text))
        self._found = different_calls(f"call {mine} on rank {self._rank}", calls)
        self._fabric.abort(str(self._found), error=MismatchError)
        return self._found

    def watch_mismatch(self) -> Error | None:
        """A mismatch that no kernel has compared, by the hellos of an earlier poll; waits for none.

        A rooted call that ranks make differently is told so while they wait in sends and receives,
        which compare none. Reading the hellos before each of these took 60 to 100 µs.
        """
        if self._found is None and self._partial:
            mismatch = self._hellos.poll()
            if mismatch is not None:
                self._mismatch, self._found = mismatch, self._error(mismatch)
                self._fabric.abort(str(self._found), error=MismatchError)
        return self._found

    def compare_last(self) -> None:
        """Raise a reported error, or a mismatch of hellos that no kernel has compared."""
        self.check()
        if self._partial:
            self._mismatch = self._hellos.find_mismatch()
            if self._mismatch is not None:
                raise self._error(self._mismatch)

    def _error(self, report: Report) -> Error:
        last = self.last
        text = "no call" if last is None else last.call.tagged(last.signature_text)
        timeout = 0.0 if last is None else last.timeout
        failed = self._prepared.get(report.own % RECORDS)
        if failed is not None and failed.number == report.own:
            timeout = failed.timeout
            report = with_peers(
                report, partial(awaited_ranks, failed.choice, failed.call, self._rank)
            )
        if report.of_pair:
            timeout = self._pair_timeouts.get(report.own % RECORDS, timeout)
        return error_of(report, self._rank, text, timeout, self._shared_state.recorded)

    def close(self) -> None:
        """Release the hellos; idempotent."""
        self.last = None
        self._prepared.clear()
        self._hellos.close()


def awaited_ranks(choice: Choice, call: Call, rank: int, step: int, number: int) -> list[int]:
    """The ranks for which a kernel may have waited; several where a launch carries two programs.

    None where blocks of one rank wait for each other: the cause is elsewhere.

    Args:
        number: of the signal that the step awaits (Simple) or of the source that it reads (LL).

    """
    if choice.launch.in_band:
        return sorted({*_ll_senders(choice, call, rank, step, number)} - {rank})
    found: set[int] = set()
    for variant in choice.variants:
        blocks = variant.program.blocks
        for block in variant.program.of(rank):
            awaited = _awaited(block, step)
            if number < len(awaited):
                found.add(blocks[awaited[number]].rank)
    return sorted(found - {rank})


def _awaited(block: BlockProgram, step: int) -> list[int]:
    """The blocks whose signals a step awaits, in order; the last step awaits the exit signals."""
    if step == len(block.rows) + 1:
        return list(dict.fromkeys(block.exit_waits))
    if step >= len(block.rows):
        return []
    row = block.rows[step]
    return list(dict.fromkeys((*row.waits, *row.awaits)))


def _ll_senders(choice: Choice, call: Call, rank: int, step: int, number: int) -> Iterator[int]:
    """The ranks that write the lines of a batch's source, or send its factor."""
    program: Program = choice.program
    ll_layout = LLLayout(call.dtype, choice.launch.lanes)
    found = batches(program, rank, ll_layout, scales=call.op is not None and call.op.scales)
    if step >= len(found) or not found[step].srcs:
        return
    place, source = divmod(number, len(found[step].srcs))
    first = sum(batch.rows for batch in found[:step])
    (block,) = program.of(rank)
    for row in block.rows[first + place : first + place + 1]:
        if found[step].owned and row.labels.owners[source] >= 0:
            yield row.labels.owners[source]
        for other in program.programs:
            if any(row.srcs[source] in theirs.dsts for theirs in other.rows):
                yield other.block.rank


class Watchdog:
    """A thread that logs the first error, and ends this rank's kernels that wait in vain.

    They wait for a rank that is dead, has left, or is in a control call.
    """

    def __init__(self, fabric: Fabric, executor: CudaExecutor) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=_check_often,
            args=(fabric, weakref.ref(executor), self._stopped),
            name=f"ringcoll watch {fabric.rank}",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _check_often(
    fabric: Fabric, executor: weakref.ref[CudaExecutor], stopped: threading.Event
) -> None:
    while not stopped.wait(_EVERY):
        known = executor()
        if known is None:
            return
        try:
            fabric.check()
            error: Error | None = known.watch()
        except Error as cause:
            error = cause
        except runtime().CUDARuntimeError:  # the device fails, as the next call finds
            error = None
        if error is not None:
            _log.error("rank %d: %s", fabric.rank, error)
            if type(error) in TOLD:
                fabric.abort(str(error), error=type(error))
            known.give_up(error)
            return
        del known
