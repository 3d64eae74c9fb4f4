"""Place the ranks: all on the CPU, or each on a GPU; agreed by all ranks."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ringcoll import log
from ringcoll.cuda.device import Device, available, cuda_version, devices
from ringcoll.errors import ArgumentError, MachineError
from ringcoll.fabric import Fabric
from ringcoll.fabric.identity import identity
from ringcoll.host.limits import most_threads

if TYPE_CHECKING:
    from ringcoll.executors.cuda.loader import Loader


def placed(fabric: Fabric, wanted: str, ordinal: int | None) -> Device | None:
    """This rank's device, None for a CPU rank; collective. ``ordinal``: the caller's choice."""
    if wanted == "cpu":
        return None
    own = json.dumps([available(), _has_driver()]).encode()
    received = [json.loads(part) for part in fabric.allgather(own, what="init")]
    without = [(rank, reason, driver) for rank, (reason, driver) in enumerate(received) if reason]
    if without:
        rank, reason, driver = without[0]
        if wanted == "cuda":
            raise MachineError(f"init: device='cuda', but rank {rank} has no GPU: {reason}")
        if fabric.rank == 0:
            text = f"init: device='auto' is the CPU: rank {rank} has no GPU ({reason})"
            log.write(log.INFO, "%s", text)
            if driver:
                warnings.warn(
                    f"{text}, though its host has an NVIDIA driver; pass device='cpu' if that is "
                    f"what you want",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return None
    found = devices()
    return found[_place(fabric) % len(found) if ordinal is None else ordinal]


def _has_driver() -> bool:
    """Whether the host has NVIDIA's driver and GPUs that CUDA_VISIBLE_DEVICES does not hide."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(Path("/proc/driver/nvidia/gpus").glob("*"))


def _place(fabric: Fabric) -> int:
    """The number of lower ranks on this host, whatever the nodes' names; collective."""
    if not fabric.nodes:
        return fabric.rank
    host = identity()["boot"].encode()
    return fabric.allgather(host, what="init: hosts")[: fabric.rank].count(host)


def refuse_too_many(call: str, nranks: int) -> None:
    """Refuse more ranks of one process than the machine has threads, before anything is made."""
    if nranks > (most := most_threads()):
        raise ArgumentError(
            f"{call}: nranks={nranks}, wanted at most {most}: each rank is a thread, and this "
            "machine has no more (threads-max and pid_max of /proc/sys/kernel); start processes "
            "by mpiexec on several machines for more"
        )


def ordinals(ranks: int | Sequence[int], wanted: str) -> tuple[int, list[int] | None]:
    """How many ranks ``init_all`` makes, and on which devices; None where it may be the CPU."""
    if isinstance(ranks, (bool, str)) or not isinstance(ranks, (int, Sequence)):
        raise ArgumentError(
            f"init_all: nranks={ranks!r}, wanted an integer >= 1, or a list of devices, one a rank"
        )
    count = len(devices()) if wanted != "cpu" else 0
    if isinstance(ranks, int):
        if ranks < 1:
            raise ArgumentError(f"init_all: nranks={ranks!r}, wanted an integer >= 1")
        refuse_too_many("init_all", ranks)
        # One rank a GPU where there are enough, else neighbours share one.
        spread = [rank * min(count, ranks) // ranks for rank in range(ranks)]
        return ranks, spread if count else None
    listed = list(ranks)
    if wanted == "cpu":
        raise ArgumentError(f"init_all: devices {listed} with device='cpu'; pass how many ranks")
    for number in listed:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
            why = available()
            raise ArgumentError(
                f"init_all: device {number!r} is none of the {count} GPUs of this process"
                + (f": {why}" if why is not None else "")
            )
    if not listed:
        raise ArgumentError("init_all: no devices; pass at least one")
    return len(listed), listed


@cache
def loader(cache_dir: str | None) -> Loader:
    """The kernels of this process; those not in the package are kept in the user's cache folder."""
    from ringcoll.executors.cuda.cache import KernelCache, kernel_folder
    from ringcoll.executors.cuda.loader import Loader
    from ringcoll.executors.cuda.shipped import ShippedKernels

    shipped = ShippedKernels(cuda=cuda_version())
    return Loader(KernelCache(kernel_folder(cache_dir), shipped))
