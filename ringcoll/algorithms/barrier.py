"""Barriers: steps without data. What they order is written by hand, since no data implies it."""

from __future__ import annotations

from ringcoll.algorithms.parts import Only, Program, assemble, wanted
from ringcoll.collectives import Collective
from ringcoll.plan import Block, Plan, Step, Symmetry


def all_pairs(nranks: int, *, only: Only = None) -> Plan:
    """Each rank signals all others: one hop, n - 1 signals a rank."""
    n, ranks = nranks, wanted(nranks, only)

    def others(rank: int) -> tuple[Block, ...]:
        return tuple(Block((rank + d) % n) for d in range(1, n))

    def program() -> Program:
        for rank in ranks:
            yield Block(rank), Step(signals=others(rank))
        for rank in ranks:
            yield Block(rank), Step(waits=others(rank))

    return assemble(Collective("barrier", n), program(), symmetry=Symmetry((n,)))


def dissemination(nranks: int, *, only: Only = None) -> Plan:
    """In round k each rank signals the one 2^k after it: ⌈log2 n⌉ hops and signals a rank.

    Hensgen, Finkel and Manber, *Two algorithms for barrier synchronization* (1988).
    """
    n, ranks = nranks, wanted(nranks, only)
    strides = [1 << k for k in range((n - 1).bit_length())]

    def program() -> Program:
        before: tuple[int, ...] = ()
        for stride in strides:
            for rank in ranks:
                waits = tuple(Block((rank - d) % n) for d in before)
                yield Block(rank), Step(waits=waits, signals=(Block((rank + stride) % n),))
            before = (stride,)
        for rank in ranks:
            yield Block(rank), Step(waits=tuple(Block((rank - d) % n) for d in before))

    return assemble(Collective("barrier", n), program(), symmetry=Symmetry((n,)))
