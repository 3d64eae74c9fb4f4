"""Whether a barrier opens a group's GPU ranks, as NCCL's does: what each rank says, what follows.

All ranks take part in a barrier, so those who come next may be some of them only. But a barrier
must not give a process a GPU that it does not use, nor bind a rank to another than its tensors'. So
a rank has a device if the barrier or the group names one, or torch has memory on exactly one. All
say theirs behind the barrier, and draw one conclusion, since all have heard the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch

from ringcoll.cuda.device import available, devices
from ringcoll.fabric.identity import identity

__all__ = ["SETTLED", "Verdict", "conclude", "device_of", "place"]

SETTLED = "settled"
"""Said by a rank whose group's GPU ranks are open, or that can never be one of them."""

_LATER = "later"


class Verdict(Enum):
    """What the ranks conclude."""

    OPEN = "open now"
    LATER = "ask again at the next barrier"
    SETTLED = "never ask again"


def device_of(named: Sequence[int], bound: Any) -> int | None:
    """The GPU of this rank; None where that is not known.

    Args:
        named: what the barrier says, torch's ``device_ids``.
        bound: what the group was made with, torch's ``device_id``, or None.

    """
    if named:
        return named[0]
    if bound is not None:
        index: int | None = bound.index
        return index
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    # Not the current one, which is 0 in a process that names a device with each tensor; nor where
    # it has a context, which it may also have where its peers' memory lies.
    reserved = torch.cuda.memory_reserved
    found = [ordinal for ordinal in range(torch.cuda.device_count()) if reserved(ordinal)]
    return found[0] if len(found) == 1 else None


def place(ordinal: int | None) -> str:
    """What a rank says of its device: where it is, the same in every process."""
    if not torch.cuda.is_available():
        return SETTLED
    if ordinal is None:
        return _LATER
    found = devices()
    if available() is not None or not 0 <= ordinal < len(found):
        return SETTLED
    return f"{identity()['boot']} {found[ordinal].pci}"


def conclude(said: Sequence[str]) -> Verdict:
    """The verdict of all ranks, from what each has said."""
    if SETTLED in said:
        return Verdict.SETTLED
    if _LATER in said:
        return Verdict.LATER
    return Verdict.OPEN if len({*said}) == len(said) else Verdict.SETTLED
