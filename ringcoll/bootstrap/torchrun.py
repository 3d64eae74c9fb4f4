"""Bootstrap under torchrun: a client of the store that its environment names.

Only here is torch imported, and only in a process that torchrun has started.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import timedelta

from ringcoll.bootstrap.addresses import bracketed, connected
from ringcoll.bootstrap.launcher import RESTARTS, TorchWorld
from ringcoll.bootstrap.store import Store, StoreBootstrap, post_refusal
from ringcoll.errors import DeadlineError, Error, MachineError
from ringcoll.folders import pip_install

_PAUSE = 0.05  # seconds between attempts to reach the store
_LONGEST = 365 * 86400.0  # seconds; torch's stores know no infinity

# One client a process: rank 0's serves the others, who may still read when its call has returned.
_kept: dict[tuple[int, TorchWorld], Store] = {}


def torchrun_bootstrap(world: TorchWorld, timeout: float) -> StoreBootstrap:
    """The ranks that torchrun has started, given seconds for the store and for each exchange."""
    key = (os.getpid(), world)
    if key not in _kept:
        _kept[key] = _client(world, timeout)
    return StoreBootstrap(_kept[key], world.rank, world.nranks, timeout)


def post_torch_refusal(environ: Mapping[str, str], error: Error, timeout: float) -> None:
    """Let torchrun's ranks raise the error of a process that has no valid rank.

    It waits for their store ``timeout`` seconds, as its server may begin later.
    """
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    from torch.distributed import PrefixStore, TCPStore

    late = time.monotonic() + timeout
    while True:  # torch's own attempts write to the standard error
        try:
            with connected((host, port), timeout):
                break
        except OSError:
            if time.monotonic() > late:
                return
            time.sleep(_PAUSE)
    store = TCPStore(host, port, timeout=timedelta(seconds=timeout), wait_for_workers=False)
    post_refusal(PrefixStore(_prefix(environ.get(RESTARTS, "0")), store), error)


def _prefix(attempt: str) -> str:
    """Of all keys: the agent's store outlives ranks that it starts again."""
    return f"ringcoll/attempt/{attempt}"


def _client(world: TorchWorld, timeout: float) -> Store:
    try:
        from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, TCPStore
    except ImportError as error:
        raise MachineError(
            f"ranks started by torchrun (WORLD_SIZE={world.nranks}) need torch's store, but torch "
            f"cannot be imported ({error}): pip install torch, or start them with mpiexec after "
            f"{pip_install('mpi')}"
        ) from error
    serves = world.rank == 0 and not world.agent
    seconds = min(timeout, _LONGEST)
    try:
        # As torch's own env:// does, so that both share one server. The exchange waits for the
        # ranks, so the store need not.
        store = TCPStore(
            world.host,
            world.port,
            world.nranks,
            serves,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=not world.agent,
        )
    except (DistNetworkError, DistStoreError) as error:
        where = f"torchrun's store at {bracketed(world.host)}:{world.port}"
        first = str(error).splitlines()[0]
        if serves:
            raise MachineError(
                f"init: rank 0 cannot serve {where}: {first}; set MASTER_PORT to a free port"
            ) from error
        server = "torchrun's agent" if world.agent else "rank 0"
        raise DeadlineError(
            f"init: rank {world.rank} of {world.nranks} waited {timeout:.3g} s for {server} to "
            f"serve {where}: {first}; does MASTER_ADDR name the host of rank 0, and is the port "
            "open to this host?"
        ) from error
    kept: Store = PrefixStore(_prefix(world.attempt), store)
    return kept
