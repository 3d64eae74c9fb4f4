"""How some of a fabric's ranks find each other, whatever has become of the rest.

Each member posts a fresh token in its control segment under a tag that stands for the list of
members, and reads the others'. A token that a rank has seen before is a leftover of an earlier
meeting. From then on the members exchange payloads under tags that stand for all of their tokens.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Sequence

from ringcoll.bootstrap.contract import named
from ringcoll.errors import RankLostError
from ringcoll.fabric.control import Control, Exchange
from ringcoll.fabric.poll import Lookout, poll

__all__ = ["Meeting"]


class Meeting:
    """A bootstrap among some ranks of a fabric.

    Args:
        controls: of all ranks of the fabric.
        members: who meets, in the order of their new ranks.
        own: this rank of the fabric.
        lost: the ranks that are known to have died or closed; raises if the fabric was closed.
        seen: the last token that each rank has met this one by; updated.
        what: the call that asks.
        deadline: value of ``time.monotonic()``.

    Raises:
        RankLostError: a member has died or has closed the fabric.
        DeadlineError: a member did not come.

    """

    def __init__(
        self,
        controls: Sequence[Control],
        members: tuple[int, ...],
        own: int,
        lost: Callable[[], Sequence[int]],
        seen: dict[int, str],
        what: str,
        deadline: float,
    ) -> None:
        self.rank = members.index(own)
        self.nranks = len(members)
        self._members = members
        self._own = own
        self._what = what
        self._deadline = deadline
        self._lost = lost
        self._boxes = [controls[rank].subsets for rank in members]
        tokens = self._meet(seen)
        self._exchange = Exchange(self._boxes, self.rank, _digest(json.dumps(tokens)))

    def allgather(self, payload: bytes) -> list[bytes]:
        """Every member's bytes."""
        return self._exchange.allgather(payload, self._what, self._wait)

    def _meet(self, seen: dict[int, str]) -> list[str]:
        tag = _digest(json.dumps(self._members)) or 2
        tokens = {self.rank: secrets.token_hex(16)}
        self._boxes[self.rank].post(tag, tokens[self.rank].encode())

        def ready() -> bool:
            for index, rank in enumerate(self._members):
                if index not in tokens:
                    said = (self._boxes[index].read(tag) or b"").decode("ascii", "replace")
                    if said and said != seen.get(rank):
                        tokens[index] = said
            return len(tokens) == self.nranks

        self._wait(ready, lambda: [index for index in range(self.nranks) if index not in tokens])
        for index, rank in enumerate(self._members):
            seen[rank] = tokens[index]
        return [tokens[index] for index in range(self.nranks)]

    def _wait(self, ready: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        def describe() -> str:
            absent = named([self._members[index] for index in missing()])
            return f"{self._what}: rank {self._own} waited for {absent} in vain"

        def look() -> None:
            lost = [rank for rank in self._lost() if rank in self._members]
            if lost:
                raise RankLostError(f"{self._what}: {named(lost)} died or closed the communicator")

        poll(ready, self._deadline, describe, Lookout(), look)


def _digest(text: str) -> int:
    """An even number of 62 bits that stands for a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 3 << 1
