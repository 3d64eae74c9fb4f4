"""The errors of ranks whose calls do not belong together: every side in words, and the remedy."""

from __future__ import annotations

from collections.abc import Iterable

from ringcoll.errors import MismatchError

SENDERS_WAIT = (
    "; ranks that all send before they receive wait for each other: use sendrecv or a group"
)
"""What a send's deadline adds: a message that does not fit the landing zone waits for its recv."""


def different_calls(
    where: str, calls: Iterable[tuple[int, str]], *, symmetric: bool = False
) -> MismatchError:
    """The error of a collective call; ``calls`` are ranks and what each of them calls.

    ``symmetric``: kernels compare the signatures, which say whether buffers are symmetric.
    """
    remedy = "make the same call with the same count, dtype, op, root and options on every rank"
    if symmetric:
        remedy += ", and pass symmetric buffers on all or on none"
    lines = [
        f"{where}: the ranks made different calls",
        *(f"  rank {rank}: {text}" for rank, text in calls),
        f"  {remedy}",
    ]
    return MismatchError("\n".join(lines))


def different_ends(
    rank: int, peer: int, epoch: int, mine: str, theirs: str, *, sends: bool
) -> MismatchError:
    """The error of a message from or to ``peer``, the pair's call ``epoch``.

    A message of a larger call has that call's name in front: ``all_to_all_v: sendcounts[1]=3``.
    """
    own, other = ("send", "recv") if sends else ("recv", "send")
    remedy = "count and dtype must be equal"
    tags = mine.partition(" tag=")[2], theirs.partition(" tag=")[2]
    if mine.removesuffix(tags[0]) == theirs.removesuffix(tags[1]):
        remedy = (
            f"the tags differ, {tags[0]!r} and {tags[1]!r}: messages are matched in order, not by "
            f"tag; receive in the order in which rank {rank if sends else peer} sends"
        )
    elif "count<=" in mine + theirs:
        remedy = "the message must fit into the buffer, and the dtypes be equal"
    return MismatchError(
        f"{_end(own, rank, mine, f', call {epoch} of its pair with rank {peer}')}; "
        f"{_end(other, peer, theirs)}; {remedy}"
    )


def _end(verb: str, rank: int, text: str, which: str = "") -> str:
    call, _, said = text.partition(": ")
    if not call.isidentifier():
        call, said = verb, text
    return f"{call} on rank {rank}{which}: {said}"
