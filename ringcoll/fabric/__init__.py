"""The host side of a communicator: its ranks' shared memory, control plane and liveness.

Not libfabric's fabric: data between nodes goes over MPI, and between GPUs over the transports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringcoll import lazy
from ringcoll.fabric.base import Fabric, closing_if_it_fails
from ringcoll.fabric.thread import RankThread, ThreadFabric, each, start_all, thread_fabrics

if TYPE_CHECKING:
    from ringcoll.fabric.opening import open_fabric
    from ringcoll.fabric.process import process_fabric

__all__ = [
    "Fabric",
    "RankThread",
    "ThreadFabric",
    "closing_if_it_fails",
    "each",
    "open_fabric",
    "process_fabric",
    "start_all",
    "thread_fabrics",
]

# Ranks that are threads of one process need none of these.
__getattr__ = lazy.attributes(
    __name__,
    {
        "open_fabric": "ringcoll.fabric.opening",
        "process_fabric": "ringcoll.fabric.process",
    },
)
