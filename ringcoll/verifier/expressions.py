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
    contribution counted twice is a flaw; only tests say no. ``prefix``: no tree is complete by
    itself, and what OUTPUT gets is finished there (:meth:`finished`).
    """

    def __init__(
        self, nranks: int, *, rounds: bool = False, overlap: bool = True, prefix: bool = False
    ) -> None:
        self.everyone = (1 << nranks) - 1
        self.prefix = prefix
        self.rounds, self.overlap = rounds, overlap
        self.label: list[Label] = [Label.RAW]
        self.roundings: list[int] = [0]
        self._mask: list[int] = [0]
        self._index: list[int] = [-1]
        self._parts: list[tuple[int, ...]] = [()]
        self._leaves: dict[tuple[int, int], int] = {}
        self._sums: dict[tuple[int, int], int] = {}
        self._stored: dict[int, int] = {}
        self._finished: dict[int, int] = {}
        self._in_order: dict[tuple[int, int], int] = {}

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
        if mask == self.everyone and not self.prefix:
            return self._new(mask, index, (whole,), Label.FINAL, roundings + 1)
        if self.rounds and len(self._parts[whole]) > 1:
            return self._new(mask, index, (whole,), Label.PARTIAL, roundings + 1)
        return whole

    def finished(self, whole: int) -> int:
        """What a prefix's OUTPUT gets of a tree: it is finished once, and then only copied."""
        if self.label[whole] is Label.FINAL:
            return whole
        found = self._finished.get(whole)
        if found is None:
            mask, index, roundings = self._mask[whole], self._index[whole], self.roundings[whole]
            found = self._new(mask, index, (whole,), Label.FINAL, roundings + 1)
            self._finished[whole] = self._stored[found] = found
        return found

    def _add(self, left: int, right: int) -> int:
        both = self._mask[left] & self._mask[right]
        if self.prefix and Label.FINAL in (self.label[left], self.label[right]):
            raise Flaw(
                f"seen {self.show(left)} + {self.show(right)}, wanted no finished result combined"
            )
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

    def is_final(self, whole: int, index: int, count: int) -> bool:
        """Whether this is what the first ranks contribute to chunk ``index``, finished."""
        final = self.label[whole] is Label.FINAL and self._index[whole] == index
        return final and self._mask[whole] == (1 << count) - 1

    def in_rank_order(self, index: int, count: int) -> int:
        """The left fold of what the first ranks contribute to ``index``, as OUTPUT gets it."""
        found = self._in_order.get((index, count))
        if found is None:
            first, *rest = (self.leaf(rank, index) for rank in range(count))
            found = self.reduce(first, rest)
            found = self._in_order[index, count] = self.finished(found) if self.prefix else found
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
    if collective.kind.prefix:
        return f"the [{leaves[0].index}] of ranks 0 to {leaves[-1].rank} once, finished"
    return f"every rank's [{leaves[0].index}] once, finished"
