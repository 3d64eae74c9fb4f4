"""What ranks must agree on for a call on GPUs, in words: its digest goes with their hellos."""

from __future__ import annotations

import hashlib

from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.executors.cuda.copies import remote_buffers
from ringcoll.executors.cuda.kernel_choice import KernelChoice
from ringcoll.plan import Buffer, format_plan
from ringcoll.symmetric.device import CudaSymmetricMemory

__all__ = ["OFFSETS", "OFFSET_BITS", "copied_buffers", "peer_addresses", "signature_text"]

OFFSET_BITS = 48
"""Of a buffer as peers reach it: mapping << 48 | offset, 0 if they cannot."""
OFFSETS = (1 << OFFSET_BITS) - 1


def copied_buffers(choice: KernelChoice, hello: tuple[int, int]) -> tuple[int, int]:
    """Of INPUT and OUTPUT as peers reach them, those that copy engines touch at their peers.

    The host must know where, so they lie at the same place of the same array on all ranks.
    """
    buffers = remote_buffers(choice.program) if choice.engine == "copy" else frozenset[Buffer]()
    return hello[0] * (Buffer.INPUT in buffers), hello[1] * (Buffer.OUTPUT in buffers)


def peer_addresses(
    known: tuple[int, int], symmetric: CudaSymmetricMemory, nranks: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Every rank's INPUT and OUTPUT as this rank's device addresses them; () where not known.

    Args:
        known: from :func:`copied_buffers`; ranks agree on it before anything is copied.

    """
    send, recv = (
        tuple(
            symmetric.peer_pointer(rank, word >> OFFSET_BITS, word & OFFSETS)
            for rank in range(nranks if word else 0)
        )
        for word in known
    )
    return send, recv


def signature_text(choice: KernelChoice, call: Call, known: tuple[int, int]) -> str:
    """A call and what is chosen for it, as ranks must agree on it."""
    launch = choice.launch
    mapped = "+".join(sorted(buffer.name for buffer in launch.mapped)) or "nothing"
    plan = hashlib.blake2b(format_plan(choice.plan).encode(), digest_size=4).hexdigest()
    text = f"by {launch.protocol} slices={launch.slices} mapped={mapped} blocks={choice.blocks}"
    if not launch.mapped and choice.direct is not None:
        text += " asked=all"
    shares = choice.layout.shares
    if len(shares) > 1:
        text += f" shares={':'.join(map(str, shares))}"
    if choice.engine != "sm":
        text += f" engine={choice.engine}"
    # Of a rooted call only the root knows, and only its own buffers are concerned.
    if choice.meets and not COLLECTIVES[call.collective].has_root:
        text += f" in_place={call.in_place}"
    for name, word in zip(("sendbuf", "recvbuf"), known, strict=True):
        if word:
            text += f" {name}=byte {word & OFFSETS} of symmetric array {word >> OFFSET_BITS}"
    return f"{call.signature()} {text} plan={plan}"
