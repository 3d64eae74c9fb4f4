"""A message from one rank to another: what every point-to-point call is made of."""

from __future__ import annotations

from ringcoll.algorithms.parts import Only, Program, assemble, inp, out
from ringcoll.collectives import Collective
from ringcoll.plan import Block, Plan, Step

__all__ = ["send"]


def send(nranks: int = 2, *, only: Only = None) -> Plan:
    """Rank 0 writes its INPUT to the OUTPUT of rank 1."""

    def program() -> Program:
        yield Block(0), Step((inp(0, 0),), (out(1, 0),))

    return assemble(Collective("send", nranks), program(), only=only)
