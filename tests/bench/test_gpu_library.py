"""What the bars compare outputs with, on numpy: all elements, each with the right sum."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.gpu import library
from benchmarks.gpu.library import WORDS, as_bits, parts, pattern

COUNT, SEED = 23, 7


def defined(name, rank, nranks, count):
    """All of an OUTPUT by the definition of the collective."""
    wide = name in ("reduce_scatter", "all_to_all")
    sent = [pattern(peer, count * (nranks if wide else 1), SEED, xp=np) for peer in range(nranks)]
    own = slice(rank * count, (rank + 1) * count)
    total = sum(sent)
    return {
        "all_reduce": total,
        "reduce": total if rank == 0 else total[:0],
        "reduce_scatter": total[own],
        "broadcast": sent[0],
        "all_gather": np.concatenate(sent),
        "all_to_all": np.concatenate([numbers[own] for numbers in sent]),
    }[name]


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("piece", [1000, 8])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    "name", ["all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "all_to_all"]
)
def test_the_parts_are_the_whole(monkeypatch, name, rank, piece, dtype):
    monkeypatch.setattr(library, "PIECE", piece)
    right = as_bits(defined(name, rank, 3, COUNT).astype("float32"), dtype)
    found, times = np.zeros_like(right), np.zeros(right.size, int)
    for part in parts(name, rank, 3, COUNT):
        assert part.count <= piece
        found[part.first : part.first + part.count] = part.bits(SEED, dtype, np)
        times[part.first : part.first + part.count] += 1
    assert (times == 1).all() and (found == right).all()


def test_sums_of_eight_ranks_are_exact_in_bfloat16():
    numbers = sum(pattern(rank, 1000, SEED, xp=np) for rank in range(8))
    assert np.abs(numbers).max() <= 64 and len({*numbers.tolist()}) > 20
    assert (as_bits(numbers).astype("uint32") << 16).view("float32").tolist() == numbers.tolist()


def test_patterns_begin_anywhere():
    whole = pattern(1, 100, SEED, xp=np)
    assert (pattern(1, 40, SEED, 60, np) == whole[60:]).all()
    assert (whole != pattern(1, 100, 40_000, xp=np)).any()
    assert (whole != pattern(2, 100, SEED, xp=np)).any()
