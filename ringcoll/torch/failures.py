"""ringcoll's errors as a training script under torch expects them.

Mistakes in arguments stay what they are (a ValueError or a TypeError). Everything after which the
ranks are out of step becomes torch's DistBackendError, a RuntimeError, in words by which torch's
own launchers and tests recognise a timeout or a lost peer.
"""

from __future__ import annotations

from typing import NoReturn

import torch.distributed as dist

from ringcoll.errors import (
    ClosedError,
    DeadlineError,
    Error,
    MachineError,
    PlanError,
    RankLostError,
    UsageError,
)

__all__ = ["closed", "in_torch", "instead", "poisons", "prefixed"]


def poisons(error: BaseException) -> bool:
    """Whether the ranks may be out of step after it."""
    return isinstance(error, ClosedError) or not isinstance(
        error, (UsageError, PlanError, MachineError)
    )


def in_torch(error: BaseException) -> BaseException:
    """The error to raise in its place; itself where torch has no other name for it."""
    if isinstance(error, (dist.DistBackendError, UsageError)) and not isinstance(
        error, ClosedError
    ):
        return error
    if isinstance(error, DeadlineError):
        return _failure(f"Timed out : {error}")
    if isinstance(error, (RankLostError, ClosedError)):
        return _failure(f"Connection closed : {error}")
    if isinstance(error, Exception):
        return _failure(f"{type(error).__name__}: {error}")
    return error


def prefixed(error: BaseException, who: str) -> BaseException:
    """The same error of ringcoll's, behind words that say whose ranks it counts.

    Some come by more than once on their way to the caller, and get the words once.

    Args:
        error: any.
        who: those words; empty: they need none.

    """
    if not who or not isinstance(error, Error) or who in str(error):
        return error
    said = type(error)(f"{who}: {error}")
    said.__cause__ = error
    return said


def instead(raised: BaseException, error: BaseException) -> NoReturn:
    """Raise one error for another, which is its cause unless they are one."""
    if raised is error:
        raise raised
    raise raised from error


def closed(why: str) -> BaseException:
    """The error of a call on a group that takes no more."""
    return _failure(f"Connection closed : {why}")


def _failure(words: str) -> BaseException:
    error: BaseException = dist.DistBackendError(f"ringcoll: {words}")
    return error
