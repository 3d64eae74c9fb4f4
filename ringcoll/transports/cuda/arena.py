"""The memory in which the kernels of a communicator's ranks meet: made, and tried, at its init."""

from __future__ import annotations

from ringcoll.fabric.base import Fabric
from ringcoll.transports.cuda.pairs import check_pairs
from ringcoll.transports.cuda.peers import PeerMemory, allocate_shared

__all__ = ["make_arena"]


def make_arena(fabric: Fabric, ordinal: int, nbytes: int, *, what: str, tried: bool) -> PeerMemory:
    """Zeroed memory on every rank's device that all ranks reach; collective.

    Nobody may have a kernel that uses it before all ranks have returned: the pairs are tried in its
    first bytes, which are zero again before any rank returns.

    Args:
        fabric: what the ranks share.
        ordinal: this rank's device.
        nbytes: of each rank's part.
        what: it is for, for messages; the same text on every rank.
        tried: that every pair of these devices works is known already.

    Raises:
        OutOfMemory: need and available are named; on every rank.
        MachineError: a device cannot reach another, or what it writes there is lost; on every rank.

    """
    memory = allocate_shared(fabric, ordinal, nbytes, what=what)
    if not tried:
        try:
            check_pairs(fabric, memory, ordinal, what=what)
        except BaseException:
            memory.close()
            raise
    return memory
