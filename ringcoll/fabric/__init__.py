"""What the ranks of a communicator share: memory on each host, a control plane among all."""

from __future__ import annotations

from ringcoll.fabric.base import Fabric
from ringcoll.fabric.each import each
from ringcoll.fabric.opening import open_fabric
from ringcoll.fabric.process import process_fabric
from ringcoll.fabric.thread import ThreadFabric, thread_fabrics

__all__ = ["Fabric", "ThreadFabric", "each", "open_fabric", "process_fabric", "thread_fabrics"]
