"""Inside a node: the communicator that the GPU ranks of one of several nodes have of their own."""

from __future__ import annotations

from collections.abc import Sequence

from ringcoll.communicator.cuda.state import CudaState
from ringcoll.communicator.setup.machine import agree
from ringcoll.config import Config, Settings
from ringcoll.cuda.device import Device
from ringcoll.errors import Error
from ringcoll.executors.cuda.loader import Loader
from ringcoll.fabric import Fabric


def members_of(nodes: Sequence[int]) -> list[list[int]]:
    """The ranks of each node."""
    return [[rank for rank, at in enumerate(nodes) if at == node] for node in range(max(nodes) + 1)]


def open_inside(
    fabric: Fabric,
    *,
    config: Config,
    settings: Settings,
    device: Device,
    loader: Loader,
    parent: CudaState | None,
    ranks: Sequence[int],
) -> CudaState:
    """The communicator of this node's ranks; ``ranks`` are their numbers in ``parent``."""
    topology = None
    if parent is None:
        try:
            topology = agree(fabric, device.pci, None, settings.cache_dir)
        except BaseException:
            fabric.close()
            raise
    return CudaState(
        fabric,
        config,
        settings,
        device,
        loader,
        parent=parent,
        ranks=ranks,
        topology=topology,
        whole=False,
    )


def inside_failure(inside: CudaState, node_ranks: Sequence[int], rank: int) -> Error | None:
    """The error of a kernel inside the node, with the numbers that it gives the ranks."""
    error = inside.cuda.failure()
    if error is None:
        return None
    numbers = ", ".join(f"{number} is rank {r}" for number, r in enumerate(node_ranks))
    return type(error)(
        f"rank {rank}, inside its node, which counts its own ranks ({numbers}): {error}"
    )
