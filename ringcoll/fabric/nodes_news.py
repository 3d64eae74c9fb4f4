"""What the ranks of other nodes say of themselves over the connections, and what this one says.

It stands for the control pages and the obituary of one host: who has given up, closed or left is
the last word of a rank, and a connection that breaks before there was one is a death.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping

from ringcoll import finalize
from ringcoll.bootstrap.contract import named
from ringcoll.errors import MachineError, RankLostError
from ringcoll.fabric.control import State
from ringcoll.fabric.links import Frame, Link

__all__ = ["News"]

_TEXT = 3500  # characters of a reason
_UNDER_WAY = 2_000_000_000  # nanoseconds that a message may take


class News:
    """The words of one fabric that cross between nodes.

    Args:
        links: to every rank of the other nodes, in order.
        serial: the number of the fabric, which all of its ranks have agreed on.
        owed: by which :mod:`ringcoll.finalize` knows the fabric.

    """

    def __init__(self, links: Mapping[int, Link], serial: int, owed: int) -> None:
        self._links, self._serial, self._owed = links, serial, owed

    def say(self, state: State, reason: str = "") -> None:
        """Tell the other nodes; the first word counts."""
        text = json.dumps([state, reason[:_TEXT]]).encode()
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send(Frame.STATE, self._serial, text)

    def read(self) -> None:
        """Raise if a rank of another node has died or aborted."""
        for link in self._links.values():
            link.pump()
        found = {rank: self._said(rank) for rank in self._links}
        given_up = [rank for rank, (state, _, _) in found.items() if state.given_up]
        killed = [
            rank
            for rank, (state, _, _) in found.items()
            if self._links[rank].dead and state is State.OPEN
        ]
        if given_up or killed:
            finalize.unresolved(self._owed)
            finalize.note_death()
        if given_up:
            first = min(given_up, key=lambda rank: found[rank][2])
            state, reason, _ = found[first]
            raise state.error(named([first]), reason)
        if killed:
            graves = (
                f"rank {rank} died: its {self._links[rank].name} does not answer "
                f"({self._links[rank].broken})"
                for rank in killed
            )
            raise RankLostError("; ".join(graves))

    def left(self) -> dict[int, State]:
        """Who takes part no more, and has said so long enough ago.

        What it sent before may still be on its way: nothing orders MPI and this news.
        """
        then = time.monotonic_ns() - _UNDER_WAY
        found = {rank: self._said(rank) for rank in self._links}
        return {r: state for r, (state, _, since) in found.items() if state.left and since < then}

    def gone(self) -> set[int]:
        """Who has died or closed, as far as is known now."""
        found = set()
        for rank, link in self._links.items():
            link.pump()
            state = self._said(rank)[0]
            if link.broken or state in (State.CLOSED, State.EXITED):
                found.add(rank)
        return found

    @property
    def bereft(self) -> bool:
        """Whether a rank has given up because another is lost."""
        return State.BEREFT in [self._said(rank)[0] for rank in self._links]

    def _said(self, rank: int) -> tuple[State, str, int]:
        """What a rank has said of itself, why, and when that came."""
        inbox = self._links[rank].inbox(self._serial)
        if inbox.state is None:
            return State.OPEN, "", 0
        try:
            value, reason = json.loads(inbox.state)
            return State(value), str(reason), inbox.since
        except (ValueError, TypeError, RecursionError) as error:
            raise MachineError(
                f"rank {rank} told of its state what means nothing: {error}"
            ) from None
