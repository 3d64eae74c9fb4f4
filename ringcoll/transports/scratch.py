"""SCRATCH of a communicator's ranks, through which their kernels exchange data, and its transport.

It lies on the devices, where every pair of them reaches each other and loses nothing; else, for
all ranks of the communicator, in pinned host memory.
"""

from __future__ import annotations

from typing import Literal

from ringcoll import log
from ringcoll.errors import MachineError
from ringcoll.fabric.base import Fabric
from ringcoll.transports.host_memory import allocate_hosted
from ringcoll.transports.mapping import NoPeerAccess
from ringcoll.transports.peers import PeerMemory, allocate_shared
from ringcoll.transports.probe import check_pairs

_log = log.logger()

Transport = Literal["p2p", "host"]
"""How ranks of one host reach each other: device to device, or through pinned host memory."""


def allocate_scratch(
    fabric: Fabric,
    ordinal: int,
    nbytes: int,
    *,
    what: str,
    wanted: Transport | None,
    probed: bool,
) -> tuple[PeerMemory, Transport]:
    """Zeroed memory of every rank that all ranks' devices reach, and its transport; collective.

    No kernel may use it before all ranks have returned: pairs of devices are probed in its first
    bytes, unless ``probed`` already, and these are zero again before any rank returns. ``wanted``
    is the same on every rank; None is "p2p" where every pair can, else "host", with a warning.
    """
    if wanted != "host":
        try:
            return _on_devices(fabric, ordinal, nbytes, what=what, probed=probed), "p2p"
        except MachineError as error:
            if wanted is not None:
                raise
            # A failure is collective, so all ranks are here; not all know the reason.
            reason = str(error) if isinstance(error, NoPeerAccess) else ""
            reasons = [text for text in fabric.texts(what)(reason) if text]
            if not reasons:
                raise
        if fabric.rank == 0:
            _log.warning(
                "all ranks use transport='host', pinned host memory, which is slow: %s", reasons[0]
            )
    return allocate_hosted(fabric, ordinal, nbytes, what=what), "host"


def _on_devices(
    fabric: Fabric, ordinal: int, nbytes: int, *, what: str, probed: bool
) -> PeerMemory:
    memory = allocate_shared(fabric, ordinal, nbytes, what=what)
    if not probed:
        try:
            check_pairs(fabric, memory, ordinal, what=what)
        except BaseException:
            memory.close()
            raise
    return memory
