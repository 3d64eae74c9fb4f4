"""What the ranks of a communicator that live on one host share."""

from __future__ import annotations

from ringcoll.bootstrap.contract import Bootstrap
from ringcoll.fabric.base import Fabric
from ringcoll.fabric.each import each
from ringcoll.fabric.process import process_fabric
from ringcoll.fabric.thread import ThreadFabric, thread_fabrics

__all__ = ["Fabric", "ThreadFabric", "each", "open_fabric", "process_fabric", "thread_fabrics"]


def open_fabric(bootstrap: Bootstrap, *, timeout: float) -> Fabric:
    """The fabric of a bootstrap's ranks; a world of one needs no shared memory."""
    if bootstrap.nranks == 1:
        return thread_fabrics(1, timeout)[0]
    return process_fabric(bootstrap, timeout=timeout)
