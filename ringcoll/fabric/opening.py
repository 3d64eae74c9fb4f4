"""How the ranks of a bootstrap become a fabric: on one node, or on several."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ringcoll import finalize
from ringcoll.bootstrap.contract import Bootstrap, exchange_values, gathered, malformed, named
from ringcoll.bootstrap.mpi import settled
from ringcoll.bootstrap.overlap import commit
from ringcoll.bootstrap.store import StoreBootstrap
from ringcoll.errors import AbortedError, MachineError, MismatchError, RankLostError
from ringcoll.fabric.base import Fabric, closing_if_it_fails
from ringcoll.fabric.identity import compare, compare_versions, identity, nodes_of
from ringcoll.fabric.liveness import Process, ProcessMonitor
from ringcoll.fabric.process import process_fabric
from ringcoll.fabric.thread import ThreadFabric, thread_fabrics
from ringcoll.fabric.world import World

_worlds: dict[str, World] = {}  # that not all of their ranks have yet
_ENDING, _INTERVAL = 0.5, 1e-3  # seconds from a process's last connection to its end


def open_fabric(bootstrap: Bootstrap, *, timeout: float, node: str | None = None) -> Fabric:
    """The fabric of a bootstrap's ranks; collective. ``node`` replaces the host's name."""
    if bootstrap.nranks == 1:
        return thread_fabrics(1, timeout)[0]
    own = {**identity(), "node": node or "", "pid": str(os.getpid())}
    own |= {"rank": str(bootstrap.rank), "nranks": str(bootstrap.nranks)}
    found: list[Mapping[str, str]] = []
    try:
        found = _checked(gathered(bootstrap, own), own)
        commit()
        if isinstance(bootstrap, StoreBootstrap):
            bootstrap.watch = partial(_check_alive, _beside(found, bootstrap.rank))
        fabric = _opened(bootstrap, found, timeout)
    except BaseException as error:
        if isinstance(error, RankLostError) and not isinstance(error, AbortedError):
            settled(lost=True)
        if found:
            _hold_exit(found, bootstrap.rank, isinstance(error, RankLostError))
        raise
    settled()
    return fabric


def _checked(found: list[Any], own: Mapping[str, str]) -> list[Mapping[str, str]]:
    """The identities that all ranks have sent, each at the place of its rank."""
    for rank, other in enumerate(found):
        texts = isinstance(other, dict) and all(type(text) is str for text in other.values())
        if not texts or not own.keys() <= other.keys() or not other["pid"].isdecimal():
            raise malformed(rank, other)
    names = [f"process {other['pid']} on host {other['host']}" for other in found]
    for rank, other in enumerate(found):
        if other["nranks"] != own["nranks"]:
            raise MismatchError(
                f"init: rank {own['rank']} was given nranks={own['nranks']} and rank "
                f"{other['rank']} ({names[rank]}) nranks={other['nranks']}: pass the same on every "
                "rank"
            )
        if other["rank"] != str(rank):
            first = next(peer for peer in range(len(found)) if found[peer]["rank"] == other["rank"])
            twice = f"two processes are rank {other['rank']}: {names[first]} and {names[rank]}"
            moved = (
                f"rank {other['rank']} ({names[rank]}) is at place {rank} of the bootstrap's answer"
            )
            raise MismatchError(f"init: {moved if first == rank else twice}")
    return found


def _opened(bootstrap: Bootstrap, found: Sequence[Mapping[str, str]], timeout: float) -> Fabric:
    """The fabric of ranks whose identities are known."""
    nodes = nodes_of(found)
    compare_versions(found, "init")
    for number in range(max(nodes) + 1):
        compare(found, "init", [rank for rank, node in enumerate(nodes) if node == number])
    if len({_place(other) for other in found}) == 1 and max(nodes) == 0:
        return _thread_fabric(bootstrap, timeout)
    if max(nodes) == 0:
        return process_fabric(bootstrap, timeout=timeout, compared=True)
    from ringcoll.fabric.nodes import nodes_fabric  # ranks of one host need no messages of MPI

    return nodes_fabric(bootstrap, nodes, found, timeout)


def _place(other: Mapping[str, str]) -> tuple[str, ...]:
    """What tells a rank's process from all others."""
    return other["boot"], other["pidns"], other["pid"]


def _thread_fabric(bootstrap: Bootstrap, timeout: float) -> Fabric:
    """The fabric of ranks that are threads of this process; collective."""
    name = exchange_values(bootstrap, [os.urandom(16).hex()], (str,))[0][0]
    world = _worlds.setdefault(name, World(bootstrap.nranks))
    fabric = ThreadFabric(world, bootstrap.rank, timeout)
    try:
        with closing_if_it_fails(fabric):
            bootstrap.allgather(b"")  # all ranks have the world
    finally:
        _worlds.pop(name, None)
    return fabric


def _beside(found: Sequence[Mapping[str, str]], rank: int) -> ProcessMonitor:
    """The processes of other ranks that this one can watch: those of its host."""
    keys = ("boot", "pidns")
    return ProcessMonitor(
        {
            peer: Process(int(other["pid"]))
            for peer, other in enumerate(found)
            if peer != rank and all(other[key] == found[rank][key] for key in keys)
        }
    )


def _check_alive(monitor: ProcessMonitor) -> None:
    """Raise if a process has ended while the ranks begin."""
    dead = monitor.dead()
    if dead:
        verb = "its process has" if len(dead) == 1 else "their processes have"
        raise RankLostError(f"init: {named(dead)} died: {verb} ended")


def _hold_exit(found: Sequence[Mapping[str, str]], rank: int, lost: bool) -> None:
    """No fabric was made, perhaps because a rank has died: MPI_Finalize would wait for it for ever.

    The processes of this host are checked before that; those of another host cannot be watched.
    """
    with contextlib.suppress(MachineError):  # of the monitor: the first error matters more
        monitor, late = _beside(found, rank), time.monotonic() + _ENDING
        while lost and not monitor.dead() and time.monotonic() < late:
            time.sleep(_INTERVAL)
        meeting = finalize.Exit(lambda: None, lambda: True, monitor.dead)
        finalize.hold(frozenset((peer, other["pid"]) for peer, other in enumerate(found)), meeting)
        finalize.note_death()
