"""Ranks on several nodes: shared memory inside each of them, connections between them.

A fabric of several nodes is the fabric of this rank's own node and a :class:`Link` to each rank of
the others. What all ranks must get goes both ways at once; no rank relays for another, so that the
end of any of them leaves the rest as they are. Memory is shared inside a node only.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import struct
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count

from ringcoll import finalize
from ringcoll.bootstrap.contract import Bootstrap, exchange_values
from ringcoll.bootstrap.mpi_world import in_mpi_world
from ringcoll.bootstrap.relayed import RelayedBootstrap
from ringcoll.bootstrap.store import StoreBootstrap
from ringcoll.errors import AbortedError, DeadlineError, Error, MachineError, RankLostError
from ringcoll.fabric.base import Fabric, Missing, Ready, closing_if_it_fails
from ringcoll.fabric.connect import connect
from ringcoll.fabric.control import compare_calls
from ringcoll.fabric.links import Link
from ringcoll.fabric.liveness import State, Status, raise_departed, raise_failed
from ringcoll.fabric.mapping import texts_of, together
from ringcoll.fabric.mpi import Carrier, Messages
from ringcoll.fabric.poll import LivenessTimer
from ringcoll.fabric.process import ProcessFabric, process_fabric
from ringcoll.fabric.remote import RemoteRanks, hold_exit

# Number of the exchange, collectives that the rank has entered, length of `what`.
_ROUND = struct.Struct("<QQI")
_SOON, _INTERVAL = 1.0, 1e-3  # seconds until a loss shows everywhere, and between checks for it
_IN_FLIGHT = 2_000_000_000  # nanoseconds that a message may take
_RELAYED = re.compile(r"^(?:reported by rank \d+: )+")
_exit_keys = count(1)


class NodesFabric(Fabric):
    """One process's view of ranks on several nodes; made by :func:`ringcoll.fabric.open_fabric`.

    ``nodes`` is the node of each rank, from 0 in the order of their first ranks; ``local`` the
    fabric of this rank's node. All ranks have agreed on ``serial``.
    """

    threads = False
    notify = None

    def __init__(
        self,
        rank: int,
        nodes: Sequence[int],
        local: ProcessFabric,
        links: Mapping[int, Link],
        serial: int,
        carrier: Carrier,
        timeout: float,
    ) -> None:
        self.rank, self.nranks, self.nodes = rank, len(nodes), tuple(nodes)
        self.names = range(self.nranks)
        self.timeout, self.fence, self.spins = timeout, local.fence, local.spins
        self.local, self.links = local, dict(sorted(links.items()))
        self.near = [peer for peer, node in enumerate(nodes) if node == nodes[rank]]
        local.names = tuple(self.near)
        self._serial = serial
        self._carrier = carrier
        self._number = 0
        self._exit_key = -next(_exit_keys)  # those of other fabrics are positive
        self._remote = RemoteRanks(self.links, serial)
        self._timer = LivenessTimer(local.alarm)
        self.messages: Messages | None = None
        self._held: list[Messages] = []
        self._forget = weakref.finalize(self, _collected, self._remote, os.getpid(), self._held)
        self._forget.atexit = False

    def start(self, what: str) -> None:
        """Send all ranks the tags by which messages come here, and wait for theirs; collective."""
        ranges = self.allgather(b"%d" % self._carrier.reserve(), what=what)
        self.messages = self._carrier.messages([int(number) for number in ranges], self.rank)
        self.messages.on_failure(self._await_failure)
        self._held.append(self.messages)
        finalize.track(self)

    # -- memory and the control plane ----------------------------------------------------------

    def share(self, nbytes: int, *, what: str) -> list[memoryview]:
        """Memory of this node's ranks; an empty view stands for that of another node's."""
        views = together(self.texts(what), lambda: self.local.share(nbytes, what=what))
        parts = [memoryview(bytearray(0)) for _ in range(self.nranks)]
        for rank, view in zip(self.near, views, strict=True):
            parts[rank] = view
        return parts

    def allgather(self, payload: bytes, *, what: str, timeout: float | None = None) -> list[bytes]:
        """Every rank's payload: through the mailboxes of the node, and a frame to each other."""
        self.check()
        self._number += 1
        call, started, deadline = what.encode(), time.monotonic(), self.deadline(timeout)
        frame = _ROUND.pack(self._number, self.entered, len(call)) + call + payload
        self._remote.gather(frame)
        # Meanwhile a rank of another node may fail.
        self.local.check_beyond = self._check_remote
        try:
            near = self.local.allgather(frame, what="exchange", timeout=timeout, call=what)
        except DeadlineError as error:
            self.abort(str(error), error=DeadlineError)
            raise
        finally:
            self.local.check_beyond = None
        remote = self._remote
        self._await_all(lambda: not remote.missing(), remote.missing, what, started, deadline)
        calls, payloads = [""] * self.nranks, [b""] * self.nranks
        for rank, frame in {**dict(zip(self.near, near, strict=True)), **remote.take()}.items():
            number, _, calls[rank], payloads[rank] = _unpacked(frame)
            if number != self._number:
                raise MachineError(
                    f"{what}: rank {rank} is at exchange {number}, rank {self.rank} at "
                    f"{self._number}"
                )
        compare_calls(calls)
        return payloads

    def ahead(self) -> dict[int, tuple[str, int]]:
        """Calls in which ranks wait; nothing orders hellos and connections, so they are counted."""
        near = {self.near[rank]: frame for rank, frame in self.local.posted().items()}
        frames = {rank: _unpacked(frame) for rank, frame in {**near, **self._remote.next()}.items()}
        found = {rank: (call, entered) for rank, (_, entered, call, _) in frames.items()}
        waiting = self._remote.waiting(self.rank)
        found |= waiting if waiting and self._intact() else {}
        return found | {self.near[rank]: at for rank, at in self.local.rendezvous().items()}

    def wait(
        self,
        ready: Ready,
        *,
        deadline: float,
        describe: Callable[[], str],
        peers: Missing | None = None,
    ) -> None:
        """As on one node, moving messages before each test."""

        def moved() -> bool:
            self.progress()
            return ready()

        super().wait(moved, deadline=deadline, describe=describe, peers=peers)

    def progress(self) -> None:
        """Let messages move on; connections are read when liveness is checked."""
        if self.messages is not None:
            self.messages.progress()

    # -- liveness ------------------------------------------------------------------------------

    def check(self) -> None:
        """Read this node's alarm, and every 20 ms who has died here or on another node."""
        if self._ended:
            self._require_open()
        self._timer.tick(self.check_failures)

    def check_failures(self) -> None:
        """Raise if a rank has died or aborted; of this node's ranks more is known, so first."""
        self._require_open()
        self.local.check_failures()
        self._check_remote()

    def _check_remote(self) -> None:
        self._require_open()
        raise_failed(self._remote.statuses(), None, self.names, self._note_failure)

    def check_peers(self, peers: Missing | None) -> None:
        """Raise if a rank has failed, or one has left that a wait needs.

        A rank of another node counts as gone a little later: what it sent before may still be on
        its way, as nothing orders MPI and the connections.
        """
        self.check_failures()
        recent = time.monotonic_ns() - _IN_FLIGHT
        statuses = {
            rank: Status() if rank in self.links and status.since >= recent else status
            for rank, status in self._statuses().items()
            if rank != self.rank
        }
        raise_departed(statuses, self.names, peers, self._note_departure)

    def _statuses(self) -> Mapping[int, Status]:
        near = self.local._statuses()
        return {self.near[i]: status for i, status in near.items()} | self._remote.statuses()

    def _await_failure(self) -> None:
        """MPI has failed: if a rank has died, its connection breaks soon, and this raises."""
        late = time.monotonic() + _SOON
        while time.monotonic() < late:
            self._check_remote()
            time.sleep(_INTERVAL)

    def lost(self) -> tuple[int, ...]:
        """The other ranks that have died or closed.

        After a peer's failure because of a loss, this waits a little until the loss is detected
        here too: a process's end shows on its connections before its own node detects it, or after.
        """
        late = time.monotonic() + _SOON
        gone = super().lost()
        while not gone and self._peer_lost() and time.monotonic() < late:
            time.sleep(_INTERVAL)
            gone = super().lost()
        return gone

    def _peer_lost(self) -> bool:
        """Whether a rank has given up because another is lost."""
        return State.PEER_LOST in [status.state for status in self._statuses().values()]

    def abort(self, reason: str, *, error: type[BaseException] = AbortedError) -> None:
        """Tell this node's ranks and all others."""
        if self._ended:
            return
        # A reason that came from others is passed on without all of their names.
        reason = _RELAYED.sub("", reason)
        self.local.abort(reason, error=error)
        self._remote.declare(State.of(error), reason)

    # -- the end -------------------------------------------------------------------------------

    def _declare(self, state: State) -> None:
        self._remote.declare(state)

    def leave(self) -> None:
        """Declare the orderly end."""
        super().leave()
        self.local.leave()

    def mpi_finalized(self) -> None:
        """No message can be sent any more."""
        self.exited()
        self._ended = "MPI is finalized: close communicators of several nodes before MPI.Finalize()"

    def exited(self) -> None:
        """The process ends without having closed this fabric; its node's does so for itself."""
        super().exited()
        self._close_messages()

    def _close_messages(self) -> None:
        if self.messages is not None:
            self.messages.close()
            self.messages = None

    def close(self) -> None:
        """Leave, and let go of messages and memory; connections serve other fabrics too."""
        self.leave()
        finalize.resolve(self._exit_key)
        self._close_messages()
        self._forget.detach()
        self._remote.forget()
        self.local.close()
        self.links, self._remote = {}, RemoteRanks({}, self._serial)
        self._timer = LivenessTimer()

    def _release(self) -> None:
        for link in self.links.values():
            link.close()
        self.messages = None
        self._forget.detach()

    # -- children ------------------------------------------------------------------------------

    def subset(self, members: Sequence[int], *, what: str) -> Fabric:
        """Meet the members of this node over memory and the others over the connections."""
        ranks = self._members(members, what)
        near = [rank for rank in ranks if rank in self.near]
        self.local.entered = self.entered
        intact = self._intact()

        def beyond() -> None:
            # Else some of a node's ranks would meet that differ in who is lost on another.
            gone = [
                r for r, status in self._remote.statuses().items() if r in ranks and status.lost
            ]
            if gone:
                raise RankLostError(f"{what}: {self._named(gone)} died or closed the communicator")

        numbers = [self.near.index(rank) for rank in near]
        local = self.local.subset(numbers, what=what, whole=ranks, beyond=beyond)
        finalize.resolve(self._exit_key)
        if len(near) == len(ranks):
            return local
        if not isinstance(local, ProcessFabric):
            raise MachineError(f"{what}: ranks of several nodes are processes")
        deadline = self.deadline()
        wait = partial(self._await_members, what=what, deadline=deadline, intact=intact)
        try:
            own, tokens = self._remote.swap_tokens(ranks, wait, what, self.entered)
            local.names = near
            tokens |= dict(zip(near, local.allgather(own, what=what), strict=True))
            text = b" ".join(tokens[rank] for rank in ranks)
            fabric = NodesFabric(
                ranks.index(self.rank),
                _renumbered([self.nodes[rank] for rank in ranks]),
                local,
                {ranks.index(rank): self.links[rank] for rank in ranks if rank in self.links},
                int.from_bytes(hashlib.sha256(text).digest()[:8], "little"),
                self._carrier.among(ranks),
                self.timeout,
            )
            local.names, fabric.names = near, ranks  # of this fabric, until there is another
            fabric.start(what)
            local.names, fabric.names = tuple(fabric.near), range(fabric.nranks)
        except BaseException:
            local.close()
            raise
        return fabric


def _unpacked(frame: bytes) -> tuple[int, int, str, bytes]:
    number, entered, length = _ROUND.unpack_from(frame)
    start = _ROUND.size + length
    return number, entered, frame[_ROUND.size : start].decode("utf-8", "replace"), frame[start:]


def _renumbered(nodes: Sequence[int]) -> list[int]:
    """Nodes from 0 in the order of their first ranks."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(node, len(numbers)) for node in nodes]


def _collected(remote: RemoteRanks, pid: int, held: list[Messages]) -> None:
    """A fabric was collected without close(): nobody may wait for it for ever."""
    if os.getpid() == pid:
        for messages in held:
            messages.close()
        remote.declare(State.EXITED)


def nodes_fabric(
    bootstrap: Bootstrap, nodes: list[int], found: Sequence[Mapping[str, str]], timeout: float
) -> Fabric:
    """Begin inside each node, then among all."""
    carrier = Carrier(*in_mpi_world(bootstrap, timeout))
    links = connect(bootstrap, nodes, timeout)
    serial = exchange_values(bootstrap, [secrets.randbits(63)], (int,))[0][0] % (1 << 63)
    near = [rank for rank, node in enumerate(nodes) if node == nodes[bootstrap.rank]]
    local = _local_fabric(bootstrap, near, timeout)
    fabric = NodesFabric(bootstrap.rank, nodes, local, links, serial, carrier, timeout)
    keys = ("boot", "pidns", "pid")
    processes = zip(nodes, found, strict=True)
    world = frozenset((node, *(other.get(key) for key in keys)) for node, other in processes)
    with closing_if_it_fails(fabric):
        hold_exit(world, links)
        fabric.start("init")
    return fabric


def _local_fabric(bootstrap: Bootstrap, near: Sequence[int], timeout: float) -> ProcessFabric:
    """That of this rank's node; raises on all ranks if a node cannot have one."""

    def make() -> ProcessFabric:
        return process_fabric(_part(bootstrap, near), timeout=timeout, compared=True)

    return together(texts_of(bootstrap), make, undo=ProcessFabric.close, catch=Error)


def _part(bootstrap: Bootstrap, near: Sequence[int]) -> Bootstrap:
    """The ranks of this rank's node."""
    if isinstance(bootstrap, (RelayedBootstrap, StoreBootstrap)):
        return bootstrap.part(near)
    raise MachineError(
        f"init: a {type(bootstrap).__name__} cannot begin ranks on several nodes: start them with "
        "mpiexec or torchrun, or pass init(bootstrap=) an mpi4py communicator or a torch Store"
    )
