"""Any sizes at any offsets, found by hypothesis: many calls in a row in one communicator."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import ringcoll
from ringcoll.algorithms import ALGORITHMS
from tests.communicator.cases import (
    REDUCING,
    ROOTED,
    SHAPES,
    Case,
    Memory,
    contribution,
    run_cases,
    same_bits,
)

NARROW = ["int8", "int32", "float16", "float32", "float64", "complex128", "bool"]
# Near what may go wrong: nothing, one, a cache line, a page, a tile, the size that is agreed on.
NEAR = [0, 1, 2, 15, 16, 17, 63, 64, 65, 1023, 1025, 8191, 8192, 8193, 32768, 32769, 70_000]


@st.composite
def case_of(draw, nranks):
    collective = draw(st.sampled_from(sorted(SHAPES)))
    dtype = draw(st.sampled_from(NARROW))
    itemsize = np.dtype(dtype).itemsize
    wide = nranks if "n" in SHAPES[collective] else 1
    nbytes = draw(st.sampled_from(NEAR) | st.integers(0, 300_000))
    all_alike = draw(st.booleans())

    def each(strategy):
        if all_alike:
            return draw(strategy)
        return tuple(draw(strategy) for _ in range(nranks))

    place = each(st.booleans())
    if collective == "all_to_all" and isinstance(place, tuple):
        place = place[0]
    options = {"algorithm": draw(st.sampled_from([None, *ALGORITHMS[collective]]))}
    if draw(st.booleans()):
        options["slices"] = draw(st.integers(1, 9))
    return Case(
        collective,
        nbytes // itemsize // wide,
        dtype,
        draw(st.sampled_from(["sum", "prod"])) if collective in REDUCING else "sum",
        root=draw(st.integers(0, nranks - 1)) if collective in ROOTED else 0,
        in_place=place,
        symmetric=each(st.booleans()),
        offset=each(st.integers(0, 130)),
        options=options,
        seed=draw(st.integers(0, 999)),
    )


@st.composite
def calls(draw):
    nranks = draw(st.integers(1, 5))
    return nranks, draw(st.lists(case_of(nranks), min_size=3, max_size=8))


@settings(max_examples=25)
@given(calls())
def test_any_calls_in_a_row(drawn):
    nranks, cases = drawn
    assert ringcoll.spawn(run_cases, nranks, cases) == [len(cases)] * nranks


@settings(max_examples=15)
@given(
    st.lists(st.sampled_from(NEAR) | st.integers(0, 90_000), min_size=2, max_size=6),
    st.lists(st.integers(0, 70), min_size=3, max_size=3),
)
def test_ranks_of_one_thread_take_any_sizes(sizes, offsets):
    """The same in a group: one thread drives all ranks."""
    comms = ringcoll.init_all(3)
    memory = np.zeros((3, 100_000), np.uint8)
    for seed, size in enumerate(sizes):
        case = Case("all_reduce", size // 2, "int16", seed=seed)
        inputs = [contribution(case, rank, 3) for rank in range(3)]
        views = []
        for rank, offset in enumerate(offsets):
            memory[rank] = 7
            view = memory[rank, offset : offset + 2 * case.count].view("int16")
            view[...] = inputs[rank]
            views.append(view)
        with ringcoll.group():
            for comm, view in zip(comms, views, strict=True):
                comm.all_reduce(view)
        wanted = (inputs[0] + inputs[1] + inputs[2]).astype("int16")
        for rank, offset in enumerate(offsets):
            assert same_bits(views[rank], wanted)
            assert (memory[rank, :offset] == 7).all()
            assert (memory[rank, offset + wanted.nbytes :] == 7).all()
    for comm in comms:
        comm.close()


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(st.integers(0, 200_000), st.integers(0, 66), st.integers(0, 66)),
        min_size=1,
        max_size=5,
    )
)
def test_messages_of_any_size_from_any_offset_to_any_other(messages):
    def work(comm):
        peer = 1 - comm.rank
        memory = Memory(comm)
        for number, (size, here, there) in enumerate(messages):
            case = Case("broadcast", size, "uint8", seed=number)
            sent = memory.cut(number % 2 == 0, False, here, size)[64 : 64 + size]
            sent[...] = contribution(case, comm.rank, 2)
            raw = memory.cut(number % 3 == 0, True, there, size)
            raw[...] = 5
            comm.sendrecv(sent, peer, raw[64 : 64 + size], peer)
            assert same_bits(raw[64 : 64 + size], contribution(case, peer, 2))
            assert set(raw[:64]) | set(raw[64 + size :]) == {5}

    ringcoll.spawn(work, 2)
