"""How the ranks of a bootstrap become a fabric: on one node, or on several."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence

from ringcoll import finalize
from ringcoll.bootstrap.contract import Bootstrap
from ringcoll.bootstrap.mpi import MpiBootstrap, PartOfMpi
from ringcoll.bootstrap.mpi_world import in_mpi_world
from ringcoll.bootstrap.store import StoreBootstrap
from ringcoll.errors import Error, MachineError
from ringcoll.fabric.base import Fabric
from ringcoll.fabric.connect import connect
from ringcoll.fabric.identity import compare, compare_versions, identity, nodes_of
from ringcoll.fabric.liveness import Process, ProcessMonitor
from ringcoll.fabric.mapping import texts_of, together
from ringcoll.fabric.mpi import Carrier
from ringcoll.fabric.nodes import NodesFabric
from ringcoll.fabric.process import ProcessFabric, process_fabric
from ringcoll.fabric.remote import hold_exit
from ringcoll.fabric.thread import thread_fabrics


def open_fabric(bootstrap: Bootstrap, *, timeout: float, node: str | None = None) -> Fabric:
    """The fabric of a bootstrap's ranks; collective. ``node`` replaces the host's name."""
    if bootstrap.nranks == 1:
        return thread_fabrics(1, timeout)[0]
    own = {**identity(), "node": node or "", "pid": str(os.getpid())}
    found = [json.loads(text) for text in texts_of(bootstrap)(json.dumps(own))]
    try:
        return _opened(bootstrap, found, timeout)
    except Error:
        _hold_exit(found, bootstrap.rank)
        raise


def _opened(bootstrap: Bootstrap, found: Sequence[Mapping[str, str]], timeout: float) -> Fabric:
    """The fabric of ranks whose identities are known."""
    nodes = nodes_of(found)
    compare_versions(found, "init")
    for number in range(max(nodes) + 1):
        compare(found, "init", [rank for rank, node in enumerate(nodes) if node == number])
    if max(nodes) == 0:
        return process_fabric(bootstrap, timeout=timeout, compared=True)
    return _nodes_fabric(bootstrap, nodes, found, timeout)


def _hold_exit(found: Sequence[Mapping[str, str]], rank: int) -> None:
    """No fabric was made, perhaps because a rank has died: MPI_Finalize would wait for it for ever.

    The processes of this host are checked before that; those of another host cannot be watched.
    """
    keys = ("boot", "pidns")
    beside = {
        peer: int(other["pid"])
        for peer, other in enumerate(found)
        if peer != rank and all(other.get(key) == found[rank].get(key) for key in keys)
    }
    with contextlib.suppress(MachineError):  # of the monitor: the first error matters more
        monitor = ProcessMonitor({peer: Process(pid) for peer, pid in beside.items()})
        meeting = finalize.Exit(lambda: None, lambda: True, monitor.dead)
        finalize.hold(frozenset(beside.items()), meeting)
        finalize.note_death()


def _nodes_fabric(
    bootstrap: Bootstrap, nodes: list[int], found: Sequence[Mapping[str, str]], timeout: float
) -> Fabric:
    """Begin inside each node, then among all."""
    if isinstance(bootstrap, MpiBootstrap):
        carrier = Carrier(bootstrap.communicator, range(bootstrap.nranks))
    else:
        carrier = Carrier(*in_mpi_world(bootstrap))
    links = connect(bootstrap, nodes, timeout)
    serial = int.from_bytes(bootstrap.allgather(secrets.token_bytes(8))[0], "little")
    near = [rank for rank, node in enumerate(nodes) if node == nodes[bootstrap.rank]]
    local = _local_fabric(bootstrap, near, timeout)
    fabric = NodesFabric(bootstrap.rank, nodes, local, links, serial, carrier, timeout)
    keys = ("boot", "pidns", "pid")
    processes = zip(nodes, found, strict=True)
    world = frozenset((node, *(other.get(key) for key in keys)) for node, other in processes)
    hold_exit(world, links)
    fabric.start("init")
    return fabric


def _local_fabric(bootstrap: Bootstrap, near: Sequence[int], timeout: float) -> ProcessFabric:
    """That of this rank's node; raises on all ranks if a node cannot have one."""

    def make() -> ProcessFabric:
        return process_fabric(_part(bootstrap, near, timeout), timeout=timeout, compared=True)

    return together(texts_of(bootstrap), make, undo=ProcessFabric.close, catch=Error)


def _part(bootstrap: Bootstrap, near: Sequence[int], timeout: float) -> Bootstrap:
    """The ranks of this rank's node."""
    if isinstance(bootstrap, MpiBootstrap):
        return PartOfMpi(bootstrap, near, timeout)
    if isinstance(bootstrap, StoreBootstrap):
        return bootstrap.part(near, timeout)
    raise MachineError(
        f"init: a {type(bootstrap).__name__} cannot begin ranks on several nodes: start them with "
        "mpiexec or torchrun, or pass init(bootstrap=) an mpi4py communicator or a torch Store"
    )
