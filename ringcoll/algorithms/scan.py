"""Prefixes: rank r gets the contributions of ranks 0 to r (scan), or of 0 to r - 1 (exscan).

What is on its way to other ranks is a partial in SCRATCH; the step that writes OUTPUT finishes it
for one rank. So a rank of a chain adds its contribution twice: once for the next rank, and, after
that has gone, once for itself.
"""

from __future__ import annotations

from ringcoll.algorithms.parts import Only, Program, assemble, inp, out, scratch
from ringcoll.collectives import Collective
from ringcoll.plan import Block, Chunk, Plan, Step


def scan_one_shot(nranks: int, *, only: Only = None) -> Plan:
    """Each rank reads the buffers of all ranks before it: r buffers in, summed in rank order."""
    return _one_shot(Collective("scan", nranks), only)


def exscan_one_shot(nranks: int, *, only: Only = None) -> Plan:
    """Each rank reads the buffers of all ranks before it: r buffers in, summed in rank order."""
    return _one_shot(Collective("exscan", nranks), only)


def scan_chain(nranks: int, *, only: Only = None) -> Plan:
    """Each rank adds its contribution and hands the sum on to the next: n - 1 hops of a buffer.

    In S slices the last rank is done after S + n - 2 of them; sums are in rank order.
    """
    return _chain(Collective("scan", nranks), only)


def exscan_chain(nranks: int, *, only: Only = None) -> Plan:
    """Each rank hands on the sum that it got and its contribution: n - 1 hops of a buffer.

    In S slices the last rank is done after S + n - 2 of them; sums are in rank order.
    """
    return _chain(Collective("exscan", nranks), only)


def scan_doubling(nranks: int, *, only: Only = None) -> Plan:
    """In round k each rank hands its sum of 2^k ranks to the rank 2^k above: log2 n hops.

    Hillis and Steele, *Data parallel algorithms* (1986).
    """
    return _doubling(Collective("scan", nranks), only)


def exscan_doubling(nranks: int, *, only: Only = None) -> Plan:
    """In round k each rank hands its sum of 2^k ranks to the rank 2^k above: log2 n hops.

    Hillis and Steele, *Data parallel algorithms* (1986).
    """
    return _doubling(Collective("exscan", nranks), only)


def _one_shot(collective: Collective, only: Only) -> Plan:
    def program() -> Program:
        # From the last rank down, so that in place each input is read before it is overwritten.
        for rank in reversed(range(collective.nranks)):
            if leaves := collective.after(rank).get(0):
                yield Block(rank), Step(tuple(inp(p, 0) for p, _ in leaves), (out(rank, 0),))

    return assemble(collective, program(), only=only)


def _chain(collective: Collective, only: Only) -> Plan:
    last = collective.nranks - 1

    def program() -> Program:
        for rank in range(collective.nranks):
            before = (scratch(rank, 0),) if rank else ()
            through = (*before, inp(rank, 0))
            if rank < last:
                yield Block(rank), Step(through, (scratch(rank + 1, 0),))
            if own := through if collective.name == "scan" else before:
                yield Block(rank), Step(own, (out(rank, 0),))

    return assemble(collective, program(), only=only)


def _doubling(collective: Collective, only: Only) -> Plan:
    n = collective.nranks
    rounds = (n - 1).bit_length()

    def arrived(rank: int, k: int) -> tuple[Chunk, ...]:
        """What has come before round ``k``, from 2^j ranks below in round j: the lowest first."""
        return tuple(scratch(rank, j) for j in reversed(range(min(k, rank.bit_length()))))

    def program() -> Program:
        for k in range(rounds):
            for rank in range(n):
                # With all that is below it, a rank hands its sum to everybody that is left.
                last = rounds if k == rank.bit_length() else k + 1
                above = [(rank + (1 << j), j) for j in range(k, last)]
                dsts = tuple(scratch(other, j) for other, j in above if other < n)
                if dsts and k <= rank.bit_length():
                    yield Block(rank), Step((*arrived(rank, k), inp(rank, 0)), dsts)
        for rank in range(n):
            own = (inp(rank, 0),) if collective.name == "scan" else ()
            if srcs := (*arrived(rank, rounds), *own):
                yield Block(rank), Step(srcs, (out(rank, 0),))

    return assemble(collective, program(), only=only)
