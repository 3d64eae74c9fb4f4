"""Inputs that each rank can make for all, and what collectives must give, in plain numpy."""

from functools import lru_cache

import numpy as np

ROOTED = ("broadcast", "reduce", "gather", "scatter")
SCANS = ("scan", "exscan")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", *SCANS, *ROOTED)
_SPREAD_INPUT = ("reduce_scatter", "scatter", "all_to_all")
_SPREAD_OUTPUT = ("all_gather", "gather", "all_to_all")


_SEEDS = 4096  # numbers that begin at different places of a rank's row


@lru_cache(maxsize=256)
def _row(rank: int, length: int):
    return np.random.default_rng(rank).integers(-8, 9, length, np.int8)


def data(seed: int, rank: int, count: int, dtype="float32"):
    """Small integers, so that every order of summation gives the same sum."""
    start = seed * 31 % _SEEDS
    length = 1 << (start + count).bit_length()
    return _row(rank, length)[start : start + count].astype(dtype)


def lengths(name: str, count: int, nranks: int) -> tuple[int, int]:
    """Elements of the send and of the receive buffer for segments of ``count``."""
    return (
        count * (nranks if name in _SPREAD_INPUT else 1),
        count * (nranks if name in _SPREAD_OUTPUT else 1),
    )


def inputs(name: str, count: int, nranks: int, seed: int, dtype="float32") -> list:
    """Every rank's send buffer."""
    length, _ = lengths(name, count, nranks)
    return [data(seed, rank, length, dtype) for rank in range(nranks)]


def expected(name: str, count: int, sent: list, rank: int, root: int):
    """What ``rank`` must receive; None where it receives nothing."""
    own = slice(rank * count, (rank + 1) * count)
    if name in ("reduce", "gather") and rank != root:
        return None
    if name in SCANS:
        before = sent[: rank + (name == "scan")]
        return sum(before[1:], before[0].copy()) if before else None
    if name in ("all_reduce", "reduce"):
        return sum(sent[1:], sent[0].copy())
    if name == "broadcast":
        return sent[root]
    if name in ("all_gather", "gather"):
        return np.concatenate(sent)
    if name == "reduce_scatter":
        return sum(part[own] for part in sent)
    if name == "scatter":
        return sent[root][own]
    return np.concatenate([part[own] for part in sent])


def invoke(comm, name: str, send, recv, *, in_place: bool, root: int = 0, **how):
    """Make the call; in place ``recv`` of all_gather and gather, else ``send``, holds the input."""
    method, at_root = getattr(comm, name), comm.rank == root
    if name in ROOTED:
        how["root"] = root
    if name in ("all_gather", "gather") and in_place:
        return method(None, recv, **how) if at_root or name == "all_gather" else method(send, **how)
    if name == "broadcast" and not at_root:
        return method(recv, **how) if in_place else method(None, recv, **how)
    if name in ("reduce", "gather") and not at_root:
        return method(send, **how)
    if name == "scatter" and not at_root:
        return method(None, recv, **how)
    return method(send, **how) if in_place else method(send, recv, **how)
