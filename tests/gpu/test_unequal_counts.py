"""all_gather_v and reduce_scatter_v of counts that never come again, on GPUs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll.fabric import each
from tests.gpu.ranks import close, on

pytestmark = pytest.mark.gpu

ROUNDS = 60
GUARD = 5


@pytest.fixture(
    params=[[0, 0], [0, 0, 0], pytest.param([0, 1], marks=pytest.mark.multi_gpu)], ids=str
)
def ranks(request) -> Iterator[list[Any]]:
    """Ranks that share a GPU, and with it their launches, and ranks on GPUs of their own."""
    made: list[Any] = ringcoll.init_all(request.param, device="cuda", timeout=20)
    yield made
    close(made, failed=True)


def counts_of(chance: random.Random, nranks: int, most: int) -> list[int]:
    """Some are 0, some are of one rank alone."""
    found = [chance.randrange(most) for _ in range(nranks)]
    if chance.random() < 0.2:
        found = [count // 50 for count in found]
        found[chance.randrange(nranks)] = most
    if chance.random() < 0.1:
        found[chance.randrange(nranks)] = 0
    return found if any(found) else [1] * nranks


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("most", [100, 9000, 400_000])  # by LL, LL128 and Simple
def test_results(ranks, monkeypatch, dtype, most):
    """In place and not, at any element, with timeouts of their own; few are prepared anew."""
    n, chance = len(ranks), random.Random(most)
    vectors = [counts_of(chance, n, most) for _ in range(ROUNDS)]
    kinds = [(chance.random() < 0.3, chance.randrange(2)) for _ in vectors]
    prepared = [0] * n

    def given(rank: int, count: int) -> np.ndarray:
        return ((np.arange(count) + 3 * rank) % 11).astype(dtype)

    def noting(comm: Any) -> None:
        prepare = comm._state.cuda.prepare

        def preparing(*how: Any) -> Any:
            prepared[comm.rank] += 1
            return prepare(*how)

        monkeypatch.setattr(comm._state.cuda, "prepare", preparing)

    def placed(pool: Any, size: int, shift: int, data: np.ndarray | None = None) -> tuple[Any, Any]:
        """An array among guards, and all of it, without an allocation.

        One on a GPU whose memory another reaches waits for that GPU's kernels, and so for the rank
        that allocates.
        """
        whole = pool[: size + shift + GUARD]
        whole.set(np.full(whole.size, 99, dtype))
        array = whole[shift : shift + size]
        if data is not None:
            array.set(data)
        return array, whole

    def run(comm: Any) -> None:
        rank = comm.rank
        with on(comm):
            first, second = (comm.xp.empty(n * most + 1 + GUARD, dtype) for _ in range(2))
            comm.barrier()
            comm.synchronize()
            for number, (counts, (in_place, shift)) in enumerate(zip(vectors, kinds, strict=True)):
                *places, total = accumulate(counts, initial=0)
                own = slice(places[rank], places[rank] + counts[rank])
                how: dict[str, Any] = {"timeout": 19 - number / 9} if number % 3 else {}

                wide, guarded = placed(first, total, shift)
                narrow, _ = placed(second, counts[rank], shift, given(rank, counts[rank]))
                if in_place:
                    wide[own] = narrow
                comm.all_gather_v(None if in_place else narrow, wide, counts, **how)
                wanted = np.concatenate([given(at, count) for at, count in enumerate(counts)])
                assert (wide.get() == wanted).all(), (number, counts)
                assert (guarded[shift + total :].get() == 99).all()

                wide, _ = placed(first, total, shift, given(rank, total))
                narrow, guarded = placed(second, counts[rank], shift)
                comm.reduce_scatter_v(wide, None if in_place else narrow, counts, **how)
                found = wide[own] if in_place else narrow
                summed = np.sum([given(at, total)[own].astype(int) for at in range(n)], axis=0)
                assert (found.get() == summed).all(), (number, counts)
                assert in_place or (guarded[shift + counts[rank] :].get() == 99).all()
            comm.synchronize()

    for comm in ranks:
        noting(comm)
    each(ranks, run)
    if len({comm.device for comm in ranks}) == n:  # else they share their launches
        assert max(prepared) < ROUNDS
