"""The ranks of other nodes, each over its connection: their liveness, rendezvous and exit.

It stands for the control pages and pidfds of one host: a rank's declaration shows whether it
has failed, closed or left, and a connection that breaks before there was one is a death.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping

from ringcoll import finalize
from ringcoll.errors import MachineError
from ringcoll.fabric.control import Wait
from ringcoll.fabric.links import Frame, Link
from ringcoll.fabric.liveness import State, Status

_REASON = 3500  # characters


class RemoteRanks:
    """One fabric's ranks of other nodes; all ranks have agreed on ``serial``, its number."""

    def __init__(self, links: Mapping[int, Link], serial: int) -> None:
        self._links, self._serial = links, serial

    def declare(self, state: State, reason: str = "") -> None:
        """Send this rank's state; the first declaration counts."""
        text = json.dumps([state, reason[:_REASON]]).encode()
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send(Frame.STATE, self._serial, text)

    def statuses(self) -> dict[int, Status]:
        """What is known of each rank now."""
        for link in self._links.values():
            link.pump()
        return {rank: self._status(rank, link) for rank, link in self._links.items()}

    def _status(self, rank: int, link: Link) -> Status:
        death = f"its {link.name} does not answer ({link.broken})" if link.dead else ""
        inbox = link.inbox(self._serial)
        if inbox.state is None:
            # It broke after the process had announced its exit: no death.
            return Status(State.EXITED if link.broken and not death else State.OPEN, death=death)
        try:
            value, reason = json.loads(inbox.state)
            state, last = State(value), State(json.loads(inbox.left or inbox.state)[0])
            if state.failed and (last.left or link.exiting or link.broken):
                death = death or "it has closed its communicator, or ended"
            return Status(state, inbox.since, str(reason), death)
        except (ValueError, TypeError, RecursionError) as error:
            raise MachineError(f"rank {rank} sent a malformed state: {error}") from None

    def gather(self, frame: bytes) -> None:
        """Send this rank's part of an exchange."""
        for link in self._links.values():
            link.send(Frame.GATHER, self._serial, frame)

    def missing(self) -> list[int]:
        """The ranks that have not sent their part of the next exchange."""
        for link in self._links.values():
            link.pump()
        return [r for r, link in self._links.items() if not link.inbox(self._serial).gathers]

    def next(self) -> dict[int, bytes]:
        """The parts that have come of an exchange to which this rank has not."""
        inboxes = {rank: link.inbox(self._serial) for rank, link in self._links.items()}
        return {rank: inbox.gathers[0] for rank, inbox in inboxes.items() if inbox.gathers}

    def take(self) -> dict[int, bytes]:
        """The parts of an exchange to which all ranks have come."""
        inboxes = {rank: link.inbox(self._serial) for rank, link in self._links.items()}
        return {rank: inbox.gathers.popleft() for rank, inbox in inboxes.items()}

    def waiting(self, own: int) -> dict[int, tuple[str, int]]:
        """Who waits for rank ``own`` in a rendezvous: the call, and collectives entered before."""
        found = {}
        for rank, link in self._links.items():
            for members, token in dict(link.inbox(self._serial).tokens).items():
                _, entered, what = [*token.split(b":", 2), b"", b""][:3]
                if b"%d" % own in members.strip(b"[]").split(b",") and entered.isdigit():
                    found[rank] = what.decode("utf-8", "replace"), int(entered)
        return found

    def swap_tokens(
        self, members: tuple[int, ...], wait: Wait, what: str = "", entered: int = 0
    ) -> tuple[bytes, dict[int, bytes]]:
        """A fresh token of this rank, and those of the members on other nodes.

        A rank that gives up takes its token back. Inside a node members meet over the control
        segments instead (:mod:`ringcoll.fabric.rendezvous`).
        """
        links = {rank: link for rank, link in self._links.items() if rank in members}
        key = json.dumps(members).replace(" ", "").encode()
        token = f"{secrets.token_hex(16)}:{entered}:{what}".encode()
        found: dict[int, bytes] = {}

        def send(kind: Frame) -> None:
            for link in links.values():
                link.send(kind, self._serial, key + b" " + token)

        def ready() -> bool:
            for rank, link in links.items():
                link.pump()
                received = link.inbox(self._serial).tokens.get(key)
                if received is not None:
                    found[rank] = received
            return len(found) == len(links)

        send(Frame.JOIN)
        try:
            wait(ready, lambda: [rank for rank in links if rank not in found])
        except BaseException:
            send(Frame.WITHDRAW)
            raise
        for link in links.values():
            # Used up: the next rendezvous of these members has other tokens.
            link.inbox(self._serial).tokens.pop(key, None)
        return token, found

    def forget(self) -> None:
        """Drop what has come for this fabric; the connections serve other fabrics too."""
        for link in self._links.values():
            link.forget(self._serial)


def hold_exit(world: frozenset[object], links: Mapping[int, Link]) -> None:
    """Remember the processes of other nodes that this one meets in MPI_Finalize.

    The connections of the first fabric of a world serve for that to the end. Those of later ones
    are closed with them, at both ends: so ``world`` is the same on all ranks.
    """

    def announce() -> None:
        for link in links.values():
            link.send(Frame.EXITING, 0)

    def dead() -> list[int]:
        for link in links.values():
            link.pump()
        return [rank for rank, link in links.items() if link.dead]

    def ready() -> bool:
        return all(link.exiting for link in links.values())

    finalize.hold(world, finalize.Exit(announce, ready, dead))
