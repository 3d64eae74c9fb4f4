"""Recursive doubling: log2 p rounds between partners, whose numbers differ in one bit.

p is the largest power of two up to n. Where n is larger, n - p pairs of neighbours act as one team
each: its upper rank acts for both, reads what the lower contributes and hands it the result.
Thakur, Rabenseifner and Gropp, *Optimization of collective communication operations in MPICH*
(2005).
"""

from __future__ import annotations

from collections.abc import Sequence

from ringcoll.algorithms.parts import Only, Program, assemble, inp, out, scratch
from ringcoll.collectives import Collective
from ringcoll.plan import Block, Chunk, Plan, Step


def all_reduce(nranks: int, *, only: Only = None) -> Plan:
    """In each round two partners exchange all that they have summed: log2 p hops of a buffer.

    The sum of the lower ranks stands first, so that both partners get the same bits. Thakur,
    Rabenseifner and Gropp (2005).
    """
    teams = teams_of(nranks)
    rounds = (len(teams) - 1).bit_length()

    def kept(team: range, k: int) -> Chunk:
        """Where a team has the sum that it sends in round ``k``."""
        if k == 0 and len(team) == 1:
            return inp(team[-1], 0)
        return scratch(team[-1], rounds + (k - 1) % rounds)

    def program() -> Program:
        for k in range(rounds + 1):
            for v, team in enumerate(teams):
                srcs = tuple(inp(p, 0) for p in team)
                if k > 0:
                    srcs = (kept(team, k - 1), scratch(team[-1], k - 1))
                    if v >> (k - 1) & 1:
                        srcs = srcs[::-1]
                dsts = tuple(out(p, 0) for p in team)
                if k < rounds:
                    own = {kept(team, k)} - set(srcs)
                    dsts = (*own, scratch(teams[v ^ 1 << k][-1], k))
                yield Block(team[-1]), Step(srcs, dsts)

    return assemble(Collective("all_reduce", nranks), program(), only=only)


def all_gather(nranks: int, *, only: Only = None) -> Plan:
    """In each round two partners exchange all segments that they have: log2 p hops.

    A rank sends (p - 1)/p of its OUTPUT; one that acts for two sends nearly all of it once more.
    Thakur, Rabenseifner and Gropp (2005).
    """
    n, teams = nranks, teams_of(nranks)

    def program() -> Program:
        for team in teams:
            for rank in team:
                dsts = tuple(out(p, rank) for p in sorted({rank, team[-1]}))
                yield Block(rank), Step((inp(rank, 0),), dsts)
        yield from gather_by_doubling(teams, [*(team[0] for team in teams), n])
        for lower, upper in (team for team in teams if len(team) == 2):
            for part in (range(lower), range(upper, n)):
                if part:
                    src, dst = (out(rank, part[0], len(part)) for rank in (upper, lower))
                    yield Block(upper), Step((src,), (dst,))

    return assemble(Collective("all_gather", n), program(), only=only)


def teams_of(n: int) -> list[range]:
    """The teams, p of them, of two neighbours or one rank; the last of a team acts for it."""
    p = 1 << (n.bit_length() - 1)
    pairs = [range(2 * v, 2 * v + 2) for v in range(n - p)]
    return pairs + [range(rank, rank + 1) for rank in range(2 * (n - p), n)]


def span(firsts: Sequence[int], v: int, width: int) -> range:
    """The chunks that ``width`` teams answer for: the aligned group that team ``v`` is in.

    Team v answers for the chunks from ``firsts[v]`` up to ``firsts[v + 1]``.
    """
    low = v - v % width
    return range(firsts[low], firsts[low + width])


def gather_by_doubling(teams: Sequence[range], firsts: Sequence[int]) -> Program:
    """All-gather within OUTPUT, where each acting rank has the chunks that its team answers for."""
    width = 1
    while width < len(teams):
        for v, team in enumerate(teams):
            chunks = span(firsts, v, width)
            ends = team[-1], teams[v ^ width][-1]
            src, dst = (out(rank, chunks[0], len(chunks)) for rank in ends)
            yield Block(team[-1]), Step((src,), (dst,))
        width *= 2
