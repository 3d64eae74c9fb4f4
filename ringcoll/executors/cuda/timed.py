"""A prepared call of a GPU rank with another timeout, which a call may have for itself.

A program that passes what is left of its time has a new one each time. All else is the same, and of
a packed parameter one word.
"""

from __future__ import annotations

from itertools import islice

from ringcoll.executors.cuda.cuda_call import CudaCall
from ringcoll.executors.cuda.loader import Launchable
from ringcoll.executors.cuda.params import HIGH_HALF, TIMEOUT_WORD, nanoseconds, number_word
from ringcoll.executors.shared_state import RECORDS

_KEPT, _COME = 8, 16
"""Calls that are kept, and timeouts that are known to have come, for each call."""


def with_timeout(before: CudaCall, seconds: float, number: int) -> CudaCall:
    """The call with another timeout and number; it lacks its launch where that is no kernel."""
    made = CudaCall(
        before.call,
        before.choice,
        before.signature_text,
        before.signature,
        number,
        number % RECORDS,
        seconds,
        before.at.on(number),
        before.addresses,
        before.limits,
        large=before.large,
    )
    kernel = None if before.launchable is None else before.launchable.kernel
    if kernel is not None:
        parameter, grid = kernel.parameter, before.choice.grid
        words, at = parameter.words[:], number_word(before.at)
        words[TIMEOUT_WORD] = nanoseconds(seconds)
        words[at] = words[at] & HIGH_HALF | number
        made.launchable = Launchable(
            kernel.function, grid.blocks, 1, grid.threads, words, parameter.address_words
        )
    return made


def keep_timed(before: CudaCall, made: CudaCall) -> None:
    """Keep a call whose timeout has come before: most never come again."""
    seconds = made.timeout
    # Threads replace both at once: what one of them adds may be lost.
    if seconds in before.timeouts:
        kept = islice(before.timed.copy().items(), max(0, len(before.timed) - _KEPT + 1), None)
        before.timed = {**dict(kept), seconds: made}
    else:
        before.timeouts = *before.timeouts[1 - _COME :], seconds
