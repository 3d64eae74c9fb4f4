"""ringcoll's errors as a training script under torch expects them.

Errors of arguments stay a ValueError or a TypeError. Errors that leave the ranks out of step become
torch's DistBackendError, a RuntimeError, with the phrases by which torch's launchers and tests
recognise a timeout or a lost peer.
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

__all__ = ["as_torch_error", "closed", "desynchronizes", "prefixed", "raise_from"]


def desynchronizes(error: BaseException) -> bool:
    """Whether an error may leave the ranks out of step."""
    return isinstance(error, ClosedError) or not isinstance(
        error, (UsageError, PlanError, MachineError)
    )


def as_torch_error(error: BaseException) -> BaseException:
    """The error of torch for one of ringcoll's; an error that torch expects stays as it is."""
    if isinstance(error, (dist.DistBackendError, UsageError)) and not isinstance(
        error, ClosedError
    ):
        return error
    if isinstance(error, DeadlineError):
        return _failure(f"Timed out : {error} (a group's timeout is init_process_group's)")
    if isinstance(error, (RankLostError, ClosedError)):
        return _failure(f"Connection closed : {error}")
    if isinstance(error, Exception):
        return _failure(f"{type(error).__name__}: {error}")
    return error


def prefixed(error: BaseException, who: str) -> BaseException:
    """An error of ringcoll's with a prefix that says which ranks its numbers count.

    An error that has the prefix ``who`` already, or an empty one, stays as it is.
    """
    if not who or not isinstance(error, Error) or who in str(error):
        return error
    prefixed_error = type(error)(f"{who}: {error}")
    prefixed_error.__cause__ = error
    return prefixed_error


def raise_from(raised: BaseException, error: BaseException) -> NoReturn:
    """Raise ``raised`` from ``error``, which may be the same."""
    if raised is error:
        raise raised
    raise raised from error


def closed(why: str) -> BaseException:
    """The error of a call on a closed group."""
    return _failure(f"Connection closed : {why}")


def _failure(words: str) -> BaseException:
    error: BaseException = dist.DistBackendError(f"ringcoll: {words}")
    return error
