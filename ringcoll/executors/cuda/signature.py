"""The signature of a call on GPUs: a text on which ranks must agree; hellos carry its digest."""

from __future__ import annotations

import hashlib
from functools import lru_cache

from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.executors.cuda.copies import remote_buffers
from ringcoll.plan import Buffer, Plan, format_plan
from ringcoll.symmetric.device import CudaSymmetricMemory
from ringcoll.tuner.choice import Choice

OFFSET_BITS = 48
"""An address in symmetric memory is mapping << 48 | offset; 0 outside of it."""
OFFSETS = (1 << OFFSET_BITS) - 1


def copied_buffers(choice: Choice, hello: tuple[int, int]) -> tuple[int, int]:
    """INPUT and OUTPUT of a hello, 0 unless copy engines access them at peers.

    The host must know their addresses, so they have the same offset in the same array on all ranks.
    """
    buffers = remote_buffers(choice.program) if choice.engine == "copy" else frozenset[Buffer]()
    return hello[0] * (Buffer.INPUT in buffers), hello[1] * (Buffer.OUTPUT in buffers)


def peer_addresses(
    known: tuple[int, int], symmetric: CudaSymmetricMemory, nranks: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Every rank's INPUT and OUTPUT in this rank's address space; () of a word that is 0."""
    send, recv = (
        tuple(
            symmetric.peer_pointer(rank, word >> OFFSET_BITS, word & OFFSETS)
            for rank in range(nranks if word else 0)
        )
        for word in known
    )
    return send, recv


def signature_text(
    choice: Choice, call: Call, known: tuple[int, int], *, large_scratch: bool = False
) -> str:
    """The text of a call and of its choice; ``large_scratch``: it has that of large calls."""
    launch = choice.launch
    mapped = "nothing"
    if launch.mapped:
        mapped = "+".join(sorted(buffer.name for buffer in launch.mapped))
    text = (
        f"by {launch.protocol} slices={launch.slices} mapped={mapped} blocks={choice.grid.blocks}"
    )
    if not launch.mapped and choice.direct is not None:
        text += " dual=all"
    shares = choice.layout.shares
    if len(shares) > 1:
        text += f" shares={':'.join(map(str, shares))}"
    if choice.engine != "sm":
        text += f" engine={choice.engine}"
    if large_scratch and choice.takes_large and choice.program.scratch:
        text += " scratch=large"  # chunks lie elsewhere than in a workspace
    # In a rooted call only the root knows whether it is in place, in exscan not rank 0.
    if choice.reads_hellos and COLLECTIVES[call.collective].uneven == "none":
        text += f" in_place={call.in_place}"
    for name, word in zip(("sendbuf", "recvbuf"), known, strict=True) if any(known) else ():
        if word:
            text += f" {name}=byte {word & OFFSETS} of symmetric array {word >> OFFSET_BITS}"
    return f"{call.signature()} {text} plan={_digest(choice.plan)}"


class CountedText:
    """The text of a call by LL, LL128 or Simple without its counts and its CUDA ``blocks``."""

    def __init__(self, text: str, call: Call, blocks: int) -> None:
        self._head, _, rest = text.partition(f"{_counts(call)} ")
        self._middle, _, self._tail = rest.partition(f"blocks={blocks} ")

    def of(self, count: int, blocks: int) -> str:
        """The text of a call that differs in these alone."""
        return f"{self._head}count={count} {self._middle}blocks={blocks} {self._tail}"

    def of_call(self, call: Call, blocks: int) -> str:
        """The same of a call, which may have a count for each rank."""
        return f"{self._head}{_counts(call)} {self._middle}blocks={blocks} {self._tail}"


def _counts(call: Call) -> str:
    """What of a call's text says its counts."""
    return call.custom_signature or f"count={call.count}"


@lru_cache(maxsize=512)
def _digest(plan: Plan) -> str:
    return hashlib.blake2b(format_plan(plan).encode(), digest_size=4).hexdigest()
