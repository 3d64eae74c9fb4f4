"""What has gone wrong on a rank, as its kernels have left it and the host can say it."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from ringcoll.cuda.device import runtime
from ringcoll.cuda.memory import HostMapped
from ringcoll.errors import Error
from ringcoll.executors.cuda.cuda_call import CudaCall
from ringcoll.executors.cuda.hellos import Hellos
from ringcoll.executors.cuda.reports import (
    MISMATCH,
    RELAYED,
    Report,
    error_of,
    read,
    with_peers,
)
from ringcoll.executors.cuda.senders import awaited_ranks
from ringcoll.executors.shared_state import RECORDS, SharedState
from ringcoll.fabric import Fabric

__all__ = ["AsyncErrors"]


class AsyncErrors:
    """Of one rank.

    Args:
        fabric: the ranks on this host.
        report: what kernels write when they give up.
        hellos: what the ranks have said to this one; closed with this.
        shared_state: where ranks read what calls the others make.

    """

    def __init__(
        self, fabric: Fabric, report: HostMapped, hellos: Hellos, shared_state: SharedState
    ) -> None:
        self._fabric, self._rank = fabric, fabric.rank
        self._report, self._hellos, self._board = report, hellos, shared_state
        self._prepared: dict[int, CudaCall] = {}  # by slot of its record
        self._partial = False  # whether calls were made that end before their hellos are compared
        self._mismatch: Report | None = None
        self.last: CudaCall | None = None
        self.pair_timeout = 0.0

    def prepared(self, ready: CudaCall) -> None:
        """Remember a call that may be launched."""
        self._prepared[ready.slot] = ready
        self._partial = self._partial or not ready.choice.total

    def check(self) -> None:
        """Raise what a kernel has found wrong."""
        error = self.failure()
        if error is not None:
            raise error

    def failure(self) -> Error | None:
        """What a kernel of this rank has found wrong; None if nothing."""
        report = read(self._report.host)
        if report is None:
            return None
        if report.kind in RELAYED:
            try:
                self._fabric.check_peers(
                    None
                )  # a rank that died or aborted is the cause, and says more
            except Error as news:
                return news
        if report.kind != MISMATCH and self._mismatch is None:
            # Ranks may wait for each other because they make different calls.
            with suppress(runtime().CUDARuntimeError):
                self._mismatch = self._hellos.find_mismatch()
        return self._error(self._mismatch or report)

    def compare_last(self) -> None:
        """Raise what a kernel has found wrong, or what none has compared."""
        self.check()
        if self._partial:
            self._mismatch = self._hellos.find_mismatch()
            if self._mismatch is not None:
                raise self._error(self._mismatch)

    def _error(self, report: Report) -> Error:
        last = self.last
        terms = "no call" if last is None else last.call.tagged(last.terms)
        timeout = 0.0 if last is None else last.timeout
        timeout = self.pair_timeout if report.of_pair else timeout
        failed = self._prepared.get(report.own % RECORDS)
        if failed is not None and failed.number == report.own:
            report = with_peers(
                report, partial(awaited_ranks, failed.choice, failed.call, self._rank)
            )
        return error_of(report, self._rank, terms, timeout, self._board.recorded)

    def close(self) -> None:
        """Let go of what the kernels have said; idempotent."""
        self.last = None
        self._prepared.clear()
        self._hellos.close()
