"""What memory holds while a plan runs: ordered trees of contributions.

Addition of floats is not associative, so a result is not a set of contributions but the tree in
which they were combined. Trees are hash-consed: equal trees are one number, hence comparing the
results of two ranks bit for bit is comparing two integers.
"""

from __future__ import annotations

from collections.abc import Iterable

from ringcoll.collectives import Collective, Leaf
from ringcoll.labels import Label

NOTHING = 0
"""The expression of a chunk that nothing has been written to."""


class Flaw(Exception):
    """What is wrong with a step, without where; never leaves the verifier."""


class Expressions:
    """All trees of one proof; an expression is a number.

    ``rounds``: a stored partial is rounded to the dtype (``accumulate="dtype"``). ``overlap``: a
    contribution counted twice is a flaw; only tests say no.
    """

    def __init__(self, nranks: int, *, rounds: bool = False, overlap: bool = True) -> None:
        self.everyone = (1 << nranks) - 1
        self.rounds, self.overlap = rounds, overlap
        self.label: list[Label] = [Label.RAW]
        self.roundings: list[int] = [0]
        self._mask: list[int] = [0]
        self._index: list[int] = [-1]
        self._parts: list[tuple[int, ...]] = [()]
        self._leaves: dict[tuple[int, int], int] = {}
        self._sums: dict[tuple[int, int], int] = {}
        self._stored: dict[int, int] = {}
        self._in_order: dict[int, int] = {}

    def leaf(self, rank: int, index: int) -> int:
        """Chunk ``index`` of the INPUT of ``rank``, unscaled."""
        found = self._leaves.get((rank, index))
        if found is None:
            found = self._new(1 << rank, index, (rank,), Label.RAW, 0)
            self._leaves[rank, index] = found
        return found

    def reduce(self, first: int, rest: Iterable[int]) -> int:
        """The left fold of several expressions, as it is stored."""
        sums, total = self._sums, first
        for right in rest:
            total = sums.get((total, right)) or self._add(total, right)
        return self.stored(total)

    def stored(self, whole: int) -> int:
        """What a reducing step stores: finished if complete, rounded where ``rounds`` is set."""
        found = self._stored.get(whole)
        if found is None:
            found = self._stored[whole] = self._store(whole)
            self._stored[found] = found
        return found

    def _store(self, whole: int) -> int:
        mask, index, roundings = self._mask[whole], self._index[whole], self.roundings[whole]
        if mask == self.everyone:
            return self._new(mask, index, (whole,), Label.FINAL, roundings + 1)
        if self.rounds and len(self._parts[whole]) > 1:
            return self._new(mask, index, (whole,), Label.PARTIAL, roundings + 1)
        return whole

    def _add(self, left: int, right: int) -> int:
        both = self._mask[left] & self._mask[right]
        if self._index[left] != self._index[right]:
            raise Flaw(
                f"seen {self.show(left)} + {self.show(right)}, "
                f"wanted contributions to one chunk, seen to two"
            )
        if both and self.overlap:
            twice = both.bit_length() - 1
            raise Flaw(
                f"seen {self.show(left)} + {self.show(right)}, "
                f"wanted the contribution of rank {twice} once, seen twice"
            )
        mask = self._mask[left] | self._mask[right]
        roundings = max(self.roundings[left], self.roundings[right])
        found = self._new(mask, self._index[left], (left, right), Label.PARTIAL, roundings)
        self._sums[left, right] = found
        return found

    def _new(
        self, mask: int, index: int, parts: tuple[int, ...], label: Label, roundings: int
    ) -> int:
        self._mask.append(mask)
        self._index.append(index)
        self._parts.append(parts)
        self.label.append(label)
        self.roundings.append(roundings)
        return len(self._mask) - 1

    def is_final(self, whole: int, index: int) -> bool:
        """Whether this is every rank's contribution to chunk ``index``, finished."""
        return self.label[whole] is Label.FINAL and self._index[whole] == index

    def in_rank_order(self, index: int) -> int:
        """The left fold of all contributions to ``index`` in rank order, rounded once."""
        found = self._in_order.get(index)
        if found is None:
            first, *rest = (self.leaf(rank, index) for rank in range(self.everyone.bit_length()))
            found = self._in_order[index] = self.reduce(first, rest)
        return found

    def show(self, whole: int, depth: int = 16) -> str:
        """The tree as text: ``r[i]`` is chunk i of rank r, ``~`` a rounding to the dtype."""
        if whole == NOTHING:
            return "nothing"
        if depth == 0:
            return "…"
        parts = self._parts[whole]
        if self.label[whole] is Label.RAW:
            return f"{parts[0]}[{self._index[whole]}]"
        if len(parts) == 1:
            return "~" + self.show(parts[0], depth)
        return "(" + " + ".join(self.show(part, depth - 1) for part in parts) + ")"


def wanted_text(collective: Collective, leaves: tuple[Leaf, ...]) -> str:
    """A postcondition as text."""
    if not collective.reduces:
        return f"{leaves[0].rank}[{leaves[0].index}]"
    return f"every rank's [{leaves[0].index}] once, finished"
