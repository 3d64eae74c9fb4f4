"""Waits of calls that run together: of one rank, or of several on one thread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from ringcoll.communicator.cpu.posted import PASSED
from ringcoll.communicator.cpu.progress import Progress
from ringcoll.errors import DeadlineError
from ringcoll.executors.contract import Executor, PairExecutor
from ringcoll.fabric import Fabric

_POLL_SECONDS, _CHECK_SECONDS = 5e-5, 0.02  # between polls of flags, and checks for lost ranks


class Waiting(Protocol):
    """What the waits of a rank check."""

    @property
    def fabric(self) -> Fabric:
        """The ranks."""

    @property
    def executor(self) -> Executor:
        """The executor of collectives."""

    @property
    def pairs(self) -> PairExecutor:
        """The executor of sends and receives."""

    @property
    def progress(self) -> Progress | None:
        """Its messages, of a CPU rank."""


def wait_for(states: Sequence[Waiting], ready: Callable[[], bool], timeout: float) -> None:
    """Wait for other ranks' signals: for one rank by its fabric, for several by polling."""

    def watched() -> bool:
        if ready():
            return True
        for state in states:
            state.fabric.progress()
            active = state.executor.running
            if active is not None:
                state.executor.compare(active)
            state.pairs.compare_running()
        return False

    def describe() -> str:
        lines = []
        for state in states:
            if state.executor.running is not None:
                lines.append(state.executor.late(state.executor.running, timeout))
            lines += [state.pairs.late(active) for active in state.pairs.running]
            if state.progress is not None:
                pairs = state.progress.pairs
                lines += [pairs.late(half) for half in pairs.running if half.timeout <= timeout]
        return "\n".join(lines)

    deadline = time.monotonic() + timeout
    # A late message raises its own DeadlineError at its next step.
    due = min((s.progress.due for s in states if s.progress is not None), default=math.inf)
    if len(states) == 1:
        (state,) = states
        try:
            state.fabric.wait(
                watched,
                deadline=min(deadline, due),
                describe=lambda: PASSED if due < deadline else describe(),
                peers=lambda: _absent(state),
            )
        except DeadlineError as error:
            if str(error) != PASSED:
                raise
        return
    check_at = 0.0
    while not watched():
        now = time.monotonic()
        for state in states:
            state.fabric.check()
            if now >= check_at:
                state.fabric.check_peers(partial(_absent, state))
        check_at = now + _CHECK_SECONDS if now >= check_at else check_at
        if now > due:
            return
        if now > deadline:
            raise DeadlineError(describe())
        time.sleep(_POLL_SECONDS)


def _absent(state: Waiting) -> list[int]:
    """The ranks that have not entered a call under way: it cannot end if one of them has left."""
    active, halves = state.executor.running, state.pairs.running
    missing = {rank for half in halves for rank in state.pairs.absent(half)}
    missing.update(() if state.progress is None else state.progress.absent())
    return sorted(missing.union(state.executor.absent(active) if active else ()))
