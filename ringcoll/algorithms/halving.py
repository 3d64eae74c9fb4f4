"""Recursive halving: in each of log2 p rounds, partners exchange the half the other answers for.

Teams and partners are those of recursive doubling. What arrives is summed where it is sent on, or
kept in the end, in one step with all earlier arrivals. Thakur, Rabenseifner and Gropp,
*Optimization of collective communication operations in MPICH* (2005).
"""

from __future__ import annotations

from collections.abc import Sequence

from ringcoll.algorithms.doubling import gather_by_doubling, span, teams_of
from ringcoll.algorithms.parts import Only, Program, assemble, inp, out, scratch
from ringcoll.collectives import Collective
from ringcoll.plan import Block, Chunk, Plan, Step


def reduce_scatter(nranks: int, *, only: Only = None) -> Plan:
    """In each round two partners exchange the half that the other must sum: log2 p hops.

    Each rank sends (p - 1)/p of its INPUT. Thakur, Rabenseifner and Gropp (2005).
    """
    n, teams = nranks, teams_of(nranks)
    firsts = [*(team[0] for team in teams), n]

    def program() -> Program:
        yield from _halve(teams, firsts)
        for v, team in enumerate(teams):
            for rank in team:
                srcs = _contributions(teams, firsts, v, range(rank, rank + 1), 1)
                yield Block(team[-1]), Step(srcs, (out(rank, 0),))

    return assemble(Collective("reduce_scatter", n), program(), only=only)


def all_reduce(nranks: int, *, only: Only = None) -> Plan:
    """Partners exchange ever smaller halves to sum them, then ever larger sums: 2 log2 p hops.

    Each rank sends 2(p - 1)/p of the buffer; one that acts for two sends the whole of it besides.
    Rabenseifner, *Optimization of collective reduction operations* (2004).
    """
    teams = teams_of(nranks)
    pieces = len(teams)
    firsts = range(pieces + 1)

    def program() -> Program:
        yield from _halve(teams, firsts)
        for v, team in enumerate(teams):
            srcs = _contributions(teams, firsts, v, range(v, v + 1), 1)
            yield Block(team[-1]), Step(srcs, (out(team[-1], v),))
        yield from gather_by_doubling(teams, firsts)
        for lower, upper in (team for team in teams if len(team) == 2):
            yield Block(upper), Step((out(upper, 0, pieces),), (out(lower, 0, pieces),))

    return assemble(Collective("all_reduce", nranks, pieces), program(), only=only)


def _halve(teams: Sequence[range], firsts: Sequence[int]) -> Program:
    """Reduce-scatter from INPUT to SCRATCH, all but each team's last sum."""
    width = len(teams) // 2
    while width:
        for v, team in enumerate(teams):
            partner = v ^ width
            chunks, at = _received(firsts, partner, width)[-1]
            srcs = _contributions(teams, firsts, v, chunks, 2 * width)
            dst = scratch(teams[partner][-1], at, len(chunks))
            yield Block(team[-1]), Step(srcs, (dst,))
        width //= 2


def _contributions(
    teams: Sequence[range], firsts: Sequence[int], v: int, chunks: range, least: int
) -> tuple[Chunk, ...]:
    """What team ``v`` has of ``chunks`` after the round of width ``least``."""
    first, size = chunks[0], len(chunks)
    return (
        *(inp(rank, first, size) for rank in teams[v]),
        *(
            scratch(teams[v][-1], at + first - received[0], size)
            for received, at in _received(firsts, v, least)
        ),
    )


def _received(firsts: Sequence[int], v: int, least: int) -> list[tuple[range, int]]:
    """The chunks that reach team ``v`` in each round down to width ``least``, and where.

    They are those of its own half, stacked in SCRATCH one round after another.
    """
    arrivals: list[tuple[range, int]] = []
    width, at = (len(firsts) - 1) // 2, 0
    while width >= least:
        chunks = span(firsts, v, width)
        arrivals.append((chunks, at))
        width, at = width // 2, at + len(chunks)
    return arrivals
