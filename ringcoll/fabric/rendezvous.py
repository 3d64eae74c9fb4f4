"""How some of a fabric's ranks find each other on one host, whatever has become of the rest.

Each member posts a fresh token in its control segment under a tag that stands for the list of
members, and reads the others'. A token that a rank has seen before is left over from an earlier
rendezvous. From then on the members exchange payloads under tags that stand for all their tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence

from ringcoll.fabric.control import Control, Exchange, Wait


class Rendezvous:
    """A bootstrap among some ranks of a fabric.

    ``seen`` has the last token that each rank has met this one by, and is updated; ``wait`` raises
    when a rank is lost or late. ``whole``: members on all nodes, the same on those that meet.
    """

    def __init__(
        self,
        controls: Sequence[Control],
        members: tuple[int, ...],
        own: int,
        seen: dict[int, str],
        what: str,
        wait: Wait,
        entered: int = 0,
        whole: Sequence[int] = (),
    ) -> None:
        self.rank, self.nranks = members.index(own), len(members)
        self._members = members
        self._what = what
        self._wait = wait
        self._entered, self._whole = entered, whole
        self._boxes = [controls[rank].subsets for rank in members]
        tokens = self._swap_tokens(seen)
        self._exchange = Exchange(self._boxes, self.rank, _digest(json.dumps(tokens)))

    def allgather(self, payload: bytes) -> list[bytes]:
        """Every member's bytes."""
        return self._exchange.allgather(payload, self._what, self._await)

    def fail(self, report: str) -> None:
        """Report a failure to the members, and wait until they have read what is posted here."""
        self._exchange.fail(report.encode(), self._what, self._await)

    def _await(self, ready: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        self._wait(ready, lambda: [self._members[index] for index in missing()])

    def _swap_tokens(self, seen: dict[int, str]) -> list[str]:
        tag = _digest(json.dumps([self._members, self._whole])) or 2
        tokens = {self.rank: os.urandom(16).hex()}
        about = json.dumps([tokens[self.rank], self._members, self._what, self._entered])
        self._boxes[self.rank].post(tag, about.encode())

        def ready() -> bool:
            for index, rank in enumerate(self._members):
                if index not in tokens:
                    token = _posted(self._boxes[index].read(tag))[0]
                    if token and token != seen.get(rank):
                        tokens[index] = token
            return len(tokens) == self.nranks

        self._await(ready, lambda: [index for index in range(self.nranks) if index not in tokens])
        for index, rank in enumerate(self._members):
            seen[rank] = tokens[index]
        return [tokens[index] for index in range(self.nranks)]


def waiting_for(
    controls: Sequence[Control], own: int, seen: dict[int, str]
) -> dict[int, tuple[str, int]]:
    """Who waits for this rank in a rendezvous: the call, and collectives entered before it."""
    found = {}
    for rank, control in enumerate(controls):
        for payload in control.subsets.posted() if rank != own else ():
            token, members, what, entered = _posted(payload)
            if token and token != seen.get(rank) and own in members:
                found[rank] = what, entered
    return found


def _posted(payload: bytes | None) -> tuple[str, list[int], str, int]:
    """Token, members, call and collectives entered; no token if it is no such payload."""
    try:
        token, members, what, entered = json.loads(payload or b"")
        return str(token), list(members), str(what), int(entered)
    except (ValueError, TypeError, RecursionError):
        return "", [], "", 0


def _digest(text: str) -> int:
    """An even number of 62 bits that stands for a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 3 << 1
