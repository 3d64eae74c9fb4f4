"""What kernels say of what they waited for, as ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringcoll.arguments.calls import Call
from ringcoll.dtypes import dtype_of, op_of, premul_sum
from ringcoll.executors.cuda.async_errors import awaited_ranks
from ringcoll.executors.cuda.ll import batches
from ringcoll.executors.cuda.ll_layout import LLLayout
from ringcoll.launch import PROTOCOLS
from ringcoll.tuner import Choice
from tests.kernels.chosen import chosen

N = 4


def choice(protocol: str, algorithm: str, **options) -> tuple[Choice, Call]:
    call = Call("all_reduce", 0, None, None, 4096, dtype_of("float32"), op_of("sum"), nbytes=16384)
    return chosen(call, N, 64, algorithm=algorithm, protocol=protocol, **options), call


@pytest.mark.parametrize("protocol", ["LL", "LL128"])
@pytest.mark.parametrize("rank", range(N))
def test_lines_of_a_ring_come_from_the_rank_before(protocol, rank):
    found, call = choice(protocol, "ring")
    of_rank = batches(found.program, rank, LLLayout(call.dtype, PROTOCOLS[protocol].lanes))
    named = set()
    for step, batch in enumerate(of_rank):
        for number in range(batch.rows * len(batch.srcs)):
            named.update(awaited_ranks(found, call, rank, step, number))
    assert named == {(rank - 1) % N}


@pytest.mark.parametrize("rank", range(N))
def test_lines_of_everyone_come_from_everyone(rank):
    found, call = choice("LL", "one_shot_push")
    of_rank = batches(found.program, rank, LLLayout(call.dtype, 1))
    first, last = 0, len(of_rank) - 1
    assert awaited_ranks(found, call, rank, first, 0) == []  # its own INPUT
    named = [awaited_ranks(found, call, rank, last, number) for number in range(N)]
    assert named == [[q] if q != rank else [] for q in range(N)]


@pytest.mark.parametrize("rank", range(N))
def test_signals_of_a_ring_come_from_its_neighbours(rank):
    found, call = choice("Simple", "ring", slices=3)
    before, after = (rank - 1) % N, (rank + 1) % N
    most = max(len(block.rows) for block in found.program.of(rank))
    named = [awaited_ranks(found, call, rank, step, 0) for step in range(most + 2)]
    assert {before} in [set(peers) for peers in named]
    assert {peer for peers in named for peer in peers} <= {before, after}
    assert awaited_ranks(found, call, rank, 0, 99) == []


def test_a_factor_comes_from_whose_contribution_it_is_for():
    found, call = choice("LL", "ring")
    scaled = replace(call, op=premul_sum(2))
    (last,) = [
        step
        for step, batch in enumerate(
            batches(found.program, 0, LLLayout(call.dtype, 1), scales=True)
        )
        if batch.reduces and batch.final
    ]
    assert awaited_ranks(found, scaled, 0, last, 0) == [3]
    assert awaited_ranks(found, scaled, 0, 99, 0) == []


def test_blocks_of_several_rings_leave_a_choice():
    found, call = choice("Simple", "ring", channels=2)
    assert [1, 3] in [awaited_ranks(found, call, 0, step, 0) for step in range(8)]
