"""The memory in which the kernels of a communicator's ranks meet: made, and tried, at its init.

It lies on the devices, where every pair of them reaches each other and loses nothing; else, for
all ranks of the communicator, in pinned host memory.
"""

from __future__ import annotations

import logging
from typing import Literal

from ringcoll.errors import MachineError
from ringcoll.fabric.base import Fabric
from ringcoll.transports.host_memory import allocate_hosted
from ringcoll.transports.mapping import Unreached
from ringcoll.transports.peers import PeerMemory, allocate_shared, gathering
from ringcoll.transports.probe import check_pairs

__all__ = ["Transport", "make_arena"]

_log = logging.getLogger("ringcoll")

Transport = Literal["p2p", "host"]
"""How ranks of one host reach each other: device to device, or through pinned host memory."""


def make_arena(
    fabric: Fabric,
    ordinal: int,
    nbytes: int,
    *,
    what: str,
    wanted: Transport | None,
    tried: bool,
) -> tuple[PeerMemory, Transport]:
    """Zeroed memory of every rank that all ranks' devices reach, and where it is; collective.

    Nobody may have a kernel that uses it before all ranks have returned: the pairs are tried in its
    first bytes, which are zero again before any rank returns.

    Args:
        fabric: what the ranks share.
        ordinal: this rank's device.
        nbytes: of each rank's part.
        what: it is for, for messages; the same text on every rank.
        wanted: the transport, the same on every rank; None is "p2p" where every pair can, else
            "host", which is said once in the log.
        tried: that every pair of these devices works is known already.

    Raises:
        OutOfMemory: need and available are named; on every rank.
        MachineError: CUDA refuses, or devices do not reach each other where "p2p" is wanted; on
            every rank.

    """
    if wanted != "host":
        try:
            return _on_devices(fabric, ordinal, nbytes, what=what, tried=tried), "p2p"
        except MachineError as error:
            if wanted is not None:
                raise
            # All ranks are here: one that fails tells the others. Not all know why.
            mine = str(error) if isinstance(error, Unreached) else ""
            reasons = [reason for reason in gathering(fabric, what)(mine) if reason]
            if not reasons:
                raise
        if fabric.rank == 0:
            _log.warning("all ranks go through pinned host memory, which is slow: %s", reasons[0])
    return allocate_hosted(fabric, ordinal, nbytes, what=what), "host"


def _on_devices(fabric: Fabric, ordinal: int, nbytes: int, *, what: str, tried: bool) -> PeerMemory:
    memory = allocate_shared(fabric, ordinal, nbytes, what=what)
    if not tried:
        try:
            check_pairs(fabric, memory, ordinal, what=what)
        except BaseException:
            memory.close()
            raise
    return memory
