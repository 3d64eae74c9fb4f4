"""What a name of another library is called here: for a method that a communicator does not have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["hint"]

_OTHERS = {
    "bcast": "broadcast",
    "size": "nranks",
    "getsize": "nranks",
    "worldsize": "nranks",
    "getrank": "rank",
    "free": "close",
    "finalize": "close",
    "destroy": "close",
    "stop": "close",
    "reducescatterblock": "reduce_scatter",
    "reducescattertensor": "reduce_scatter",
    "allgatherintotensor": "all_gather",
    "alltoallsingle": "all_to_all",
}
"""Names of MPI, NCCL and torch that are not a method's without capitals and underscores."""


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def hint(name: str, names: Iterable[str]) -> str:
    """The end of a message: what is meant by ``name``, "" where nothing is near."""
    known = {_plain(own): own for own in names}
    plain = _plain(name)
    found = known.get(plain) or _OTHERS.get(plain)
    later = None if found else known.get(plain.removeprefix("i")) or _OTHERS.get(plain[1:])
    if found:
        return f"; did you mean {found!r}?"
    if later and plain.startswith("i"):  # MPI's Iallreduce, torch's isend
        return f"; did you mean {later!r} with async_op=True?"
    near = difflib.get_close_matches(plain, known, n=1, cutoff=0.75)
    return f"; did you mean {known[near[0]]!r}?" if near else ""
