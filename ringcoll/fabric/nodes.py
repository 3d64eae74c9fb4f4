"""Ranks on several nodes: shared memory inside each of them, connections between them.

A fabric of several nodes is the fabric of this rank's own node and a :class:`Link` to each rank of
the others. What is said to all goes both ways at once; no rank speaks for another, so that the end
of any of them leaves the rest as they are. Memory is shared inside a node only.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from ringcoll import finalize
from ringcoll.bootstrap.contract import named
from ringcoll.errors import (
    AbortedError,
    ClosedError,
    DeadlineError,
    MachineError,
    MismatchError,
    RankLostError,
)
from ringcoll.fabric.base import Fabric, chosen
from ringcoll.fabric.control import State, sides
from ringcoll.fabric.links import Frame, Link
from ringcoll.fabric.mapping import outcome
from ringcoll.fabric.mpi import Carrier, Messages
from ringcoll.fabric.nodes_meeting import meet
from ringcoll.fabric.nodes_news import News
from ringcoll.fabric.poll import SPINS, Lookout, poll
from ringcoll.fabric.process import ProcessFabric

__all__ = ["NodesFabric"]

_ROUND = struct.Struct("<QI")  # number of the exchange, length of `what`
_SOON, _LOOK = 1.0, 1e-3  # seconds until a loss shows everywhere, and between looks for it
_HEARD = re.compile(r"^(?:rank \d+ gave up: )+")
_serials = count(1)


class NodesFabric(Fabric):
    """One process's view of ranks on several nodes; made by :func:`ringcoll.fabric.open_fabric`.

    Args:
        rank: this rank.
        nodes: the node of each rank, from 0 in the order of their first ranks.
        local: the fabric of this rank's node, its ranks in order.
        links: to every rank of the other nodes.
        serial: the number of this fabric, which all of its ranks have agreed on.
        carrier: what moves data between these ranks.
        timeout: seconds that a wait may take.

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
        self.timeout, self.fence = timeout, local.fence
        self.local, self.links = local, dict(sorted(links.items()))
        self.near = [peer for peer, node in enumerate(nodes) if node == nodes[rank]]
        self.far = list(self.links)
        local.names = tuple(self.near)
        self._serial = serial
        self._carrier = carrier
        self._number = 0
        self._ended = ""
        self._owed = -next(_serials)  # to finalize; other fabrics' are positive
        self._news = News(self.links, serial, self._owed)
        self._lookout = Lookout()
        self.messages: Messages | None = None
        self._held: list[Messages] = []
        self._forget = weakref.finalize(self, _collected, self._news, os.getpid(), self._held)
        self._forget.atexit = False

    def start(self, what: str) -> None:
        """Tell all by which tags messages come here, and find that all have come; collective."""
        ranges = self.allgather(b"%d" % self._carrier.reserve(), what=what)
        self.messages = self._carrier.messages([int(number) for number in ranges], self.rank)
        self.messages.on_failure(self._await_news)
        self._held.append(self.messages)
        finalize.track(self)

    # -- memory and the control plane ----------------------------------------------------------

    def share(self, nbytes: int, *, what: str) -> list[memoryview]:
        """Memory of this node's ranks; an empty view stands for that of another node's."""
        views: list[memoryview] = []
        failure: MachineError | None = None
        try:
            views = self.local.share(nbytes, what=what)
        except MachineError as error:
            failure = error
        outcome(lambda text: self._texts(text, what), True, failure)
        parts = [memoryview(bytearray(0)) for _ in range(self.nranks)]
        for rank, view in zip(self.near, views, strict=True):
            parts[rank] = view
        return parts

    def expose(self, memory: memoryview, *, what: str) -> None:
        """Nothing: no process reaches into another's own memory."""

    def _texts(self, text: str, what: str) -> list[str]:
        return [part.decode() for part in self.allgather(text.encode(), what=what)]

    def allgather(self, payload: bytes, *, what: str, timeout: float | None = None) -> list[bytes]:
        """Every rank's payload: through the mailboxes of the node, and a frame to each other."""
        self.check()
        self._number += 1
        words, started, deadline = what.encode(), time.monotonic(), self.deadline(timeout)
        frame = _ROUND.pack(self._number, len(words)) + words + payload
        for rank in self.far:
            self.links[rank].send(Frame.GATHER, self._serial, frame)
        try:
            nearby = self._nearby(frame, what, timeout)
            boxes = {rank: self.links[rank].inbox(self._serial).gathers for rank in self.far}

            def missing() -> list[int]:
                return [rank for rank, box in boxes.items() if not box]

            def describe() -> str:
                waited = time.monotonic() - started
                return f"{what}: rank {self.rank} waited {waited:.3g} s for {named(missing())}"

            def arrived() -> bool:
                for rank in self.far:
                    self.links[rank].pump()
                return not missing()

            self.wait(arrived, deadline=deadline, describe=describe, peers=missing)
        except DeadlineError as error:
            # The others may still come: they must not take this round for a success.
            self.abort(str(error), error=DeadlineError)
            raise
        frames = dict(zip(self.near, nearby, strict=True))
        frames |= {rank: box.popleft() for rank, box in boxes.items()}
        calls, said = [""] * self.nranks, [b""] * self.nranks
        for rank, frame in frames.items():
            number, calls[rank], said[rank] = _unpacked(frame)
            if number != self._number:
                raise MachineError(
                    f"{what}: rank {rank} is at exchange {number}, rank {self.rank} at "
                    f"{self._number}"
                )
        if len(set(calls)) > 1:
            raise MismatchError(f"the ranks make different calls: {sides(calls)}")
        return said

    def _nearby(self, frame: bytes, what: str, timeout: float | None) -> list[bytes]:
        """The frames of this node's ranks; meanwhile the other nodes' news are listened to."""
        self.local.beyond = self._news_from_afar
        try:
            return self.local.allgather(frame, what="exchange", timeout=timeout, call=what)
        finally:
            self.local.beyond = None

    def wait(
        self,
        ready: Callable[[], bool],
        *,
        deadline: float,
        describe: Callable[[], str],
        peers: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """As on one node; each look moves messages too."""

        def moved() -> bool:
            self.progress()
            return ready()

        for _ in range(SPINS):
            if moved():
                return
        self._usable()
        poll(moved, deadline, describe, Lookout(self.local.alarm), lambda: self.look(peers))

    def progress(self) -> None:
        """Let messages move on; connections are read when it is time to look around."""
        if self.messages is not None:
            self.messages.progress()

    # -- news ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Look at this node's alarm, and every 20 ms at the connections."""
        self._usable()
        self.local.check()
        self._lookout.glance(self._news_from_afar)

    def look(self, peers: Callable[[], Sequence[int]] | None) -> None:
        """Read who has died, aborted or left, here and on the other nodes."""
        awaited = None if peers is None else peers()
        near = [] if awaited is None else [self.near.index(p) for p in awaited if p in self.near]
        self.local.look(lambda: near)
        self._news_from_afar()
        left = self._news.left()
        if awaited is None:
            if len(left) + len(self.local.lost()) < self.nranks - 1:
                return
            awaited = list(left)
        for rank, state in left.items():
            if rank in awaited:
                finalize.unresolved(self._owed)
                how = "closed" if state is State.CLOSED else "left without closing"
                raise RankLostError(f"rank {rank} {how} its communicator")

    def _usable(self) -> None:
        if self._ended:
            raise ClosedError(self._ended)

    def _news_from_afar(self) -> None:
        """Raise if a rank of another node has died or aborted."""
        self._usable()
        self._news.read()

    def _await_news(self) -> None:
        """MPI has failed: if a rank has died, its connection says so soon, and this raises."""
        late = time.monotonic() + _SOON
        while time.monotonic() < late:
            self._news_from_afar()
            time.sleep(_LOOK)

    def lost(self) -> tuple[int, ...]:
        """The other ranks that have died or closed.

        Who has heard from a peer that somebody is lost waits a little until it sees so itself: the
        end of a process shows on its connections before its own node sees it, or after.
        """
        late = time.monotonic() + _SOON
        gone = self._gone()
        while not gone and self._bereft() and time.monotonic() < late:
            time.sleep(_LOOK)
            gone = self._gone()
        return tuple(sorted(gone))

    def _bereft(self) -> bool:
        """Whether a rank has given up because another is lost."""
        near = (control.state for control in self.local.controls)
        return self._news.bereft or State.BEREFT in near

    def _gone(self) -> set[int]:
        self._usable()
        return {self.near[index] for index in self.local.lost()} | self._news.gone()

    def abort(self, reason: str, *, error: type[BaseException] = AbortedError) -> None:
        """Tell this node's ranks and all others."""
        if self._ended:
            return
        # What was heard from others is passed on without all of their names.
        reason = _HEARD.sub("", reason)
        self.local.abort(reason, error=error)
        self._news.say(State.of(error), reason)

    # -- the end -------------------------------------------------------------------------------

    def leave(self) -> None:
        """Declare the orderly end."""
        self._leave(State.CLOSED)
        self.local.leave()

    def exited(self) -> None:
        """The process ends without having closed this fabric."""
        self._leave(State.EXITED)
        self._silence()

    def _leave(self, state: State) -> None:
        if not self._ended:
            self._news.say(state)
            self._ended = f"rank {self.rank} has closed this communicator"

    def _silence(self) -> None:
        if self.messages is not None:
            self.messages.close()
            self.messages = None

    def close(self) -> None:
        """Leave, and let go of messages and memory; connections serve other fabrics too."""
        self.leave()
        finalize.resolve(self._owed)
        self._silence()
        self._forget.detach()
        for link in self.links.values():
            link.forget(self._serial)
        self.local.close()
        self.links, self.far = {}, []
        self._news = News({}, self._serial, self._owed)

    def forked(self) -> None:
        """This process is a child of the rank: connections and messages stay the parent's."""
        self._ended = (
            f"this process was forked from rank {self.rank}, to which the communicator belongs; "
            "make a new one, or start processes by spawn"
        )
        for link in self.links.values():
            link.close()
        self.messages = None
        self._forget.detach()

    # -- children ------------------------------------------------------------------------------

    def subset(self, members: Sequence[int], *, what: str) -> Fabric:
        """Meet the members of this node over memory and the others over the connections."""
        self._usable()
        ranks = chosen(self, members, what)
        near = [rank for rank in ranks if rank in self.near]
        far = [rank for rank in ranks if rank not in self.near]
        local = self.local.subset([self.near.index(rank) for rank in near], what=what)
        finalize.resolve(self._owed)
        if not far:
            return local
        if not isinstance(local, ProcessFabric):
            raise MachineError(f"{what}: ranks of several nodes are processes")
        try:
            tokens = meet(
                self.links, self._serial, ranks, self.rank, self.lost, what, self.deadline()
            )
            own = dict(zip(near, local.allgather(tokens[self.rank], what=what), strict=True))
            text = b" ".join(own[rank] if rank in own else tokens[rank] for rank in ranks)
            serial = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
            fabric = NodesFabric(
                ranks.index(self.rank),
                _renumbered([self.nodes[rank] for rank in ranks]),
                local,
                {ranks.index(rank): self.links[rank] for rank in far},
                serial,
                self._carrier.among(ranks),
                self.timeout,
            )
            fabric.start(what)
        except BaseException:
            local.close()
            raise
        return fabric


def _unpacked(frame: bytes) -> tuple[int, str, bytes]:
    number, length = _ROUND.unpack_from(frame)
    start = _ROUND.size + length
    return number, frame[_ROUND.size : start].decode("utf-8", "replace"), frame[start:]


def _renumbered(nodes: Sequence[int]) -> list[int]:
    """Nodes from 0 in the order of their first ranks."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(node, len(numbers)) for node in nodes]


def _collected(news: News, pid: int, held: list[Messages]) -> None:
    """A fabric was collected without close(): nobody may wait for it for ever."""
    if os.getpid() == pid:
        for messages in held:
            messages.close()
        news.say(State.EXITED)
