"""The errors of ranks whose calls do not belong together, or that are late: sides and remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ringcoll.bootstrap.contract import named
from ringcoll.errors import MismatchError

SENDERS_WAIT = (
    "; ranks that all send before they receive wait for each other: use sendrecv or a group"
)
"""What a send's deadline adds: a message that does not fit the landing zone waits for its recv."""


def late_call(where: str, timeout: float, ranks: str, why: str, call: str) -> str:
    """The text of a deadline in a collective, for CPU and GPU ranks: who is late, and what to do.

    ``why``: what is known of these ``ranks``, as the end of a sentence; ``call``: this rank's.
    """
    return (
        f"{where}: waited {timeout:g} s for {ranks}, {why}; look at why {ranks} did not come, or "
        f"pass a longer timeout=; this rank's call: {call}"
    )


def different_calls(
    where: str, calls: Iterable[tuple[int, str]], *, symmetric: bool = False
) -> MismatchError:
    """The error of a collective call; ``calls`` are ranks and what each of them calls.

    ``symmetric``: kernels compare the signatures, which say whether buffers are symmetric.
    """
    remedy = "make the same call with the same count, dtype, op, root and options on every rank"
    if symmetric:
        remedy += ", and pass symmetric buffers on all or on none"
    calls = list(calls)
    lines = [
        f"{where}: the ranks made different calls{_difference(calls)}",
        *(f"  rank {rank}: {text}" for rank, text in calls),
        f"  {remedy}",
    ]
    return MismatchError("\n".join(lines))


def _difference(calls: Sequence[tuple[int, str]]) -> str:
    """In what the calls differ, as the end of a sentence; "" where that is not known.

    Options and choices are named where all else is equal: they may follow from it.
    """
    known = {rank: _parsed(text) for rank, text in calls if "=" in text or " " not in text}
    keys = dict.fromkeys(key for fields in known.values() for key in fields)
    found: list[str] = []
    for key in ("call", *_ARGUMENTS, *(key for key in keys if key not in ("call", *_ARGUMENTS))):
        sides: dict[str, list[int]] = {}
        for rank, fields in known.items():
            sides.setdefault(fields.get(key, "none"), []).append(rank)
        if len(sides) < 2 or (found and key not in _ARGUMENTS):
            continue
        values = [f"{value} on {named(ranks)}" for value, ranks in sides.items()]
        shown = "" if len(values) > 3 or max(map(len, values)) > 60 else f": {' and '.join(values)}"
        found.append(f"{'the ' if key == 'call' else ''}{key}{shown}")
        if key == "call":
            break
    return f"; they differ in {', and in '.join(found)}" if found else ""


_ARGUMENTS = ("count", "counts", "displs", "dtype", "op", "root")


def _parsed(text: str) -> dict[str, str]:
    """A call's text, ``all_reduce count=4 op=sum``, as its name and its fields, without its tag."""
    name, *words = text.partition(" tag=")[0].replace(" by ", " protocol=", 1).split(" ")
    fields, key = {"call": name}, "call"
    for word in words:
        head, equals, value = word.partition("=")
        if equals:
            key, fields[head] = head, value
        else:
            fields[key] += f" {word}"
    return fields


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
