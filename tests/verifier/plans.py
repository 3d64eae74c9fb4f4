"""Plans written by hand, one thing a line, for the tests of the verifier."""

from __future__ import annotations

from ringcoll.collectives import Collective
from ringcoll.plan import Block, Buffer, Chunk, Plan, Step, hello


def chunk(text):
    """``"1.O[3]"`` is chunk 3 of the OUTPUT of rank 1, ``"1.O[3:5]"`` two chunks."""
    rank, rest = text.split(".")
    first, _, last = rest[2:-1].partition(":")
    size = int(last) - int(first) if last else 1
    return Chunk(int(rank), Buffer(rest[0]), int(first), size)


def block(name):
    """``0`` is the first block of rank 0, ``"1.0.2"`` lane 2 of rank 1, ``"hello 1"`` a hello."""
    if isinstance(name, int):
        return Block(name)
    if name.startswith("hello "):
        return hello(int(name[6:]))
    return Block(*map(int, name.split(".")))


def step(move="", waits=(), signals=()):
    """``move`` is ``"0.I[0] + 0.S[0] -> 1.O[0]"``, or empty."""
    srcs, _, dsts = move.partition("->")
    return Step(
        tuple(chunk(c.strip()) for c in srcs.split(" + ") if c.strip()),
        tuple(chunk(c.strip()) for c in dsts.split(",") if c.strip()),
        tuple(block(w) for w in waits),
        tuple(block(s) for s in signals),
    )


def plan(name, nranks, *steps, chunks=1, root=0, in_place=False):
    """A plan from (block, move, waits, signals), the last two optional."""
    collective = Collective(name, nranks, chunks, root, in_place)
    return Plan(collective, tuple((block(b), step(*rest)) for b, *rest in steps))


def broadcast(**changes):
    """Rank 0 writes into rank 1. A named step is replaced; None drops it."""
    steps = {
        "own": (0, "0.I[0] -> 0.O[0]"),
        "hello": (0, "", ["hello 1"]),
        "send": (0, "0.I[0] -> 1.O[0]", [], [1]),
        "exit": (1, "", [0]),
    }
    steps.update(changes)
    return plan("broadcast", 2, *(s for s in steps.values() if s is not None))


def staged_sum(**changes):
    """An all_reduce of two ranks over SCRATCH, reduced by both in rank order."""
    steps = {
        "send0": (0, "0.I[0] -> 1.S[0]", [], [1]),
        "send1": (1, "1.I[0] -> 0.S[0]", [], [0]),
        "sum0": (0, "0.I[0] + 0.S[0] -> 0.O[0]", [1]),
        "sum1": (1, "1.S[0] + 1.I[0] -> 1.O[0]", [0]),
    }
    steps.update(changes)
    return plan("all_reduce", 2, *(s for s in steps.values() if s is not None))
