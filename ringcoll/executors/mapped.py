"""What the ranks' hellos say of their buffers: which of them peers can reach, in place or not."""

from __future__ import annotations

from collections.abc import Sequence

from ringcoll.arguments.calls import Call
from ringcoll.bootstrap.contract import named
from ringcoll.collectives import Collective
from ringcoll.errors import MismatchError
from ringcoll.executors.shared_state import Hello
from ringcoll.plan import Buffer

__all__ = ["agreed"]


def agreed(
    call: Call, hellos: Sequence[Hello], *, rank: int, nranks: int, alike: bool
) -> tuple[frozenset[Buffer], bool]:
    """Which buffers all ranks can reach, and whether the launch is in place.

    Where a reducing collective overwrites its input on any rank, the launch is in place: that
    only adds order, so it is right for the other ranks too. The built-in plans of the others
    write into an input nothing but what it holds there already; they are in place if all
    ranks are. Of a user's plan that is not known.

    Args:
        call: of this rank.
        hellos: of all ranks; none where they are not awaited.
        rank: this rank.
        nranks: how many there are.
        alike: all ranks must be in place, or none, unless the collective reduces.

    """
    collective = Collective(call.collective, nranks, root=call.root)
    if not hellos:
        return frozenset(), collective.reduces
    both = [
        hello
        for other, hello in enumerate(hellos)
        if collective.has("INPUT", other) and collective.has("OUTPUT", other)
    ]
    flags = [hello.in_place for hello in both]
    mixed = any(flags) != all(flags) and not collective.reduces
    if mixed and alike:
        inside = [other for other, hello in enumerate(hellos) if hello.in_place]
        raise MismatchError(
            f"{call.collective} on rank {rank}: in place on {named(inside)} only; "
            f"pass recvbuf on every rank or on none"
        )
    in_place = any(flags) if collective.reduces else bool(flags) and all(flags)
    mapped = set()
    for buffer in (Buffer.INPUT, Buffer.OUTPUT):
        words = [
            hello.send if buffer is Buffer.INPUT else hello.recv
            for other, hello in enumerate(hellos)
            if collective.has(buffer.name, other)
        ]
        if all(words):
            mapped.add(buffer)
    if mixed:
        # Ranks that are in place read their input where it is written: nobody else may.
        mapped.discard(Buffer.INPUT)
    return frozenset(mapped), in_place
