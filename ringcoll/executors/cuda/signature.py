"""What ranks must agree on for a call on GPUs, in words: its digest goes with their hellos."""

from __future__ import annotations

import hashlib

from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.executors.cuda.chosen import Chosen
from ringcoll.executors.cuda.copies import reached
from ringcoll.plan import Buffer, format_plan
from ringcoll.symmetric.device import CudaSymmetricMemory

__all__ = ["OFFSETS", "OFFSET_BITS", "places", "terms_of", "touched"]

OFFSET_BITS = 48
"""Of a buffer as peers reach it: mapping << 48 | offset, 0 if they cannot."""
OFFSETS = (1 << OFFSET_BITS) - 1


def touched(chosen: Chosen, hello: tuple[int, int]) -> tuple[int, int]:
    """Of INPUT and OUTPUT as peers reach them, those that copy engines touch at their peers.

    The host must know where, so they lie at the same place of the same array on all ranks.
    """
    buffers = reached(chosen.program) if chosen.engine == "copy" else frozenset[Buffer]()
    return hello[0] * (Buffer.INPUT in buffers), hello[1] * (Buffer.OUTPUT in buffers)


def places(
    known: tuple[int, int], symmetric: CudaSymmetricMemory, nranks: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Every rank's INPUT and OUTPUT as this rank's device addresses them; () where not known.

    Args:
        known: from :func:`touched`; ranks agree on it before anything is copied.
        symmetric: where they lie.
        nranks: how many.

    """
    send, recv = (
        tuple(
            symmetric.peer_pointer(rank, word >> OFFSET_BITS, word & OFFSETS)
            for rank in range(nranks if word else 0)
        )
        for word in known
    )
    return send, recv


def terms_of(chosen: Chosen, call: Call, known: tuple[int, int]) -> str:
    """A call and what is chosen for it, as ranks must agree on it.

    Args:
        chosen: what runs.
        call: checked.
        known: from :func:`touched`.

    """
    launch = chosen.launch
    mapped = "+".join(sorted(buffer.name for buffer in launch.mapped)) or "nothing"
    plan = hashlib.blake2b(format_plan(chosen.plan).encode(), digest_size=4).hexdigest()
    said = f"by {launch.protocol} slices={launch.slices} mapped={mapped} blocks={chosen.blocks}"
    if not launch.mapped and chosen.reached is not None:
        said += " asked=all"
    shares = chosen.layout.shares
    if len(shares) > 1:
        said += f" shares={':'.join(map(str, shares))}"
    if chosen.engine != "sm":
        said += f" engine={chosen.engine}"
    # Of a rooted call only the root knows, and only its own buffers are concerned.
    if chosen.meets and not COLLECTIVES[call.collective].has_root:
        said += f" in_place={call.in_place}"
    for name, word in zip(("sendbuf", "recvbuf"), known, strict=True):
        if word:
            said += f" {name}=byte {word & OFFSETS} of symmetric array {word >> OFFSET_BITS}"
    return f"{call.describe()} {said} plan={plan}"
