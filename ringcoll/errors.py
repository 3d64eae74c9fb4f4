"""The one tree of errors, cut by whose fault it is.

::

    Error
    ├── UsageError                 the caller's fault: nothing has moved yet
    │   ├── ArgumentError          … a value (also a ValueError)
    │   ├── ArgumentTypeError      … a type (also a TypeError)
    │   └── ClosedError            the communicator is closed, broken or was forked
    ├── MismatchError              the ranks disagree: both sides are shown
    ├── PlanError                  the plan's fault: rank, block, step, seen, wanted
    │   ├── IllegalStep            a malformed step: duplicate destinations, unknown chunk
    │   ├── Deadlock               a wait that no signal will ever answer
    │   ├── UnawaitedSignal        a signal that nobody takes
    │   ├── Race                   two accesses to one chunk in no order
    │   ├── EntryViolation         a rank's buffer touched before it entered the call
    │   ├── ExitViolation          a rank's buffer touched after it returned
    │   ├── WrongResult            a chunk that does not hold what the collective promises
    │   └── LaunchRefused          a plan that this launch cannot carry
    ├── MachineError               the machine's fault: MPI, shared memory, devices
    │   ├── OutOfMemory            need and available are named (also a MemoryError)
    │   └── LauncherError          the launcher and the world it made do not match
    ├── DeadlineError              who waited for whom, in which call (also a TimeoutError)
    └── RankLostError              a rank died, or raised and left
        └── AbortedError           a rank called abort() or left its ``with`` block by an error

Every message names the rank, the call, the argument where there is one, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable


class Error(Exception):
    """Anything that ringcoll raises on purpose."""


class UsageError(Error):
    """The caller's fault; refused before anything moved."""


class ArgumentError(UsageError, ValueError):
    """An argument has a value that the call cannot take."""


class ArgumentTypeError(UsageError, TypeError):
    """An argument has a type that the call cannot take."""


class ClosedError(UsageError):
    """The communicator can carry no more calls: closed, broken, or inherited by a fork."""


class MismatchError(Error):
    """The ranks made calls that do not belong together."""


class PlanError(Error):
    """A plan, or a lowered plan, that must not run."""


class IllegalStep(PlanError):
    """A step that has no meaning, such as one with the same destination twice."""


class Deadlock(PlanError):
    """A wait that no signal will answer."""


class UnawaitedSignal(PlanError):
    """A signal that is posted and never taken."""


class Race(PlanError):
    """Two accesses to the same memory, at least one a write, in no order."""


class EntryViolation(PlanError):
    """An access to a rank's buffer that may come before the rank has entered the call."""


class ExitViolation(PlanError):
    """An access to a rank's buffer that may come after the rank has returned."""


class WrongResult(PlanError):
    """A chunk that does not hold what the collective's postcondition asks for."""


class LaunchRefused(PlanError):
    """A plan that the chosen launch cannot carry; the message names the way out."""


class MachineError(Error):
    """The machine or its software cannot do what was asked."""


class OutOfMemory(MachineError, MemoryError):
    """Not enough memory; the message names the need and what is available."""


class LauncherError(MachineError):
    """The launcher and the MPI library do not match, or a rank is missing."""


class DeadlineError(Error, TimeoutError):
    """A wait outlived its deadline."""


class RankLostError(Error):
    """A rank died or left while others still need it."""

    left: int | None = None
    """The rank, where it has left in order without having made the call."""


class AbortedError(RankLostError):
    """A rank aborted the communicator."""


def message_of(error: BaseException) -> str:
    """What an error says; "" where its own ``__str__`` raises, which would replace the error."""
    try:
        return str(error)
    except Exception:
        return ""


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The end of a message about a word that is none of the names; "" where no name is near."""
    near = nearest(word, names)
    return "" if near is None else f"; did you mean {near}?"


def not_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], remedy: str) -> str:
    """The words of an array with gaps or in another order; ``remedy`` is what to pass."""
    return f"of shape {shape} with strides {strides} is not contiguous in C order; pass {remedy}"


def nearest(word: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name that is most like a word; None where none is as near as ``cutoff``, of 0 to 1."""
    from difflib import get_close_matches  # not at every rank's start: errors are rare

    return next(iter(get_close_matches(word, list(names), n=1, cutoff=cutoff)), None)
