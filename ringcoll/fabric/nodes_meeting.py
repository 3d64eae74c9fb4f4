"""How some ranks of several nodes find each other, whatever has become of the rest.

Each member sends a fresh token to those on other nodes, with the list of members, and takes theirs.
Who gives up takes its token back. Inside a node members meet over the control segments instead
(:mod:`ringcoll.fabric.meeting`).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence

from ringcoll.bootstrap.contract import named
from ringcoll.errors import RankLostError
from ringcoll.fabric.links import Frame, Link
from ringcoll.fabric.poll import Lookout, poll

__all__ = ["meet"]


def meet(
    links: Mapping[int, Link],
    serial: int,
    members: tuple[int, ...],
    own: int,
    lost: Callable[[], Sequence[int]],
    what: str,
    deadline: float,
) -> dict[int, bytes]:
    """The fresh tokens of this rank and of the members on other nodes.

    Args:
        links: to every rank of the other nodes.
        serial: the number of the fabric whose ranks meet.
        members: who meets, in the order of their new ranks.
        own: this rank of the fabric.
        lost: the ranks that are known to have died or closed; raises if the fabric was closed.
        what: the call that asks.
        deadline: value of ``time.monotonic()``.

    Raises:
        RankLostError: a member has died or has closed the fabric.
        DeadlineError: a member did not come.

    """
    far = {rank: links[rank] for rank in members if rank in links}
    key, token = json.dumps(members).replace(" ", "").encode(), secrets.token_hex(16).encode()
    for link in far.values():
        link.send(Frame.MEET, serial, key + b" " + token)
    found = {own: token}

    def ready() -> bool:
        for rank, link in far.items():
            link.pump()
            said = link.inbox(serial).meetings.get(key)
            if said is not None:
                found[rank] = said
        return len(found) == 1 + len(far)

    def describe() -> str:
        absent = named([rank for rank in far if rank not in found])
        return f"{what}: rank {own} waited for {absent} in vain"

    def look() -> None:
        gone = [rank for rank in lost() if rank in members]
        if gone:
            raise RankLostError(f"{what}: {named(gone)} died or closed the communicator")

    try:
        poll(ready, deadline, describe, Lookout(), look)
    except BaseException:
        for link in far.values():
            link.send(Frame.PART, serial, key + b" " + token)
        raise
    for link in far.values():
        # Used up: the next meeting of these members has other tokens.
        link.inbox(serial).meetings.pop(key, None)
    return found
