"""What a failed call makes of its error: which one is raised, which one the other ranks hear."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from ringcoll.errors import (
    AbortedError,
    ClosedError,
    DeadlineError,
    Error,
    MachineError,
    MismatchError,
    OutOfMemory,
    RankLostError,
    message_of,
)

if TYPE_CHECKING:
    from ringcoll.communicator.rank_errors import RankErrors

_P = ParamSpec("_P")
_R = TypeVar("_R")

_FRAMES = 200  # that logging and an abort may take, beyond the recursion limit
_REACHED = "_ringcoll_limit"  # of a RecursionError: the limit, which is raised before it is told


def reason_of(error: BaseException) -> str:
    """Why a rank aborts; without the name of a class that the other ranks raise, too."""
    if type(error) in (AbortedError, DeadlineError, MismatchError, RankLostError):
        return str(error)
    return error_text(error)


def exhausted(error: BaseException, where: str) -> BaseException:
    """What a call raises for want of memory or of Python's frames; other errors as they are."""
    if isinstance(error, RecursionError):
        limit = vars(error).get(_REACHED, sys.getrecursionlimit())
        return MachineError(
            f"{where}: Python's recursion limit of {limit} was reached inside the call; call it "
            f"with fewer frames on the stack, or raise sys.setrecursionlimit"
        )
    if isinstance(error, MemoryError) and not isinstance(error, Error):
        said = message_of(error)
        return OutOfMemory(f"{where}: an allocation failed inside the call: {said}; free memory")
    return error


def settle(
    states: Sequence[RankErrors], error: BaseException, *, begun: bool = False
) -> BaseException:
    """Record that a call of these ranks has failed; the error to raise for it."""
    known = exhausted(error, str(states[0]))
    for state in states:
        if known is error or begun or state.has_begun():
            state.fail(known, begun=begun)
    return known


def more_frames(error: BaseException) -> int:
    """At the recursion limit, raise it, for logging and an abort; the limit to be set again."""
    limit = sys.getrecursionlimit()
    if isinstance(error, RecursionError):
        vars(error).setdefault(_REACHED, limit)
        sys.setrecursionlimit(limit + _FRAMES)
    return limit


def explained(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Where a call ends for want of memory or of frames, let it raise an error of ours.

    It is a method of what has a rank's ``_state``.
    """

    @functools.wraps(call)
    def explained(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return call(*args, **kwargs)
        except (MemoryError, RecursionError) as error:
            if isinstance(error, Error):
                raise
            limit = more_frames(error)
            try:
                known = settle([args[0]._state], error)  # type: ignore[attr-defined]
            finally:
                sys.setrecursionlimit(limit)
            raise known from error

    return explained


def error_text(error: BaseException) -> str:
    """Class and message of an error."""
    said = message_of(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def broken_by(state: RankErrors, error: BaseException) -> ClosedError:
    """What calls raise after ``error`` has broken the communicator."""
    return ClosedError(
        f"{state}: the communicator is broken by an earlier error, {error_text(error)}; "
        f"shrink() it or make a new one"
    )
