"""The calls with a count for each rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcoll.arguments.vector import (
    prepare_all_gather_v,
    prepare_all_to_all_v,
    prepare_gather_v,
    prepare_reduce_scatter_v,
    prepare_scatter_v,
)
from ringcoll.dtypes import OPS
from ringcoll.errors import ArgumentError, ArgumentTypeError, UsageError

COUNTS = (3, 0, 2)
ME = {"rank": 2, "nranks": 3}


def x(size, dtype="float32"):
    return np.zeros(size, dtype)


def address(a):
    return a.__array_interface__["data"][0]


def span(a):
    return address(a), a.size


def test_all_gather_v():
    send, recv = x(2), x(5)
    seen = prepare_all_gather_v(send, recv, COUNTS, **ME)
    assert seen.send is send
    assert seen.recv is recv
    assert (seen.recvcounts, seen.recvdispls, seen.sendcounts) == (COUNTS, (0, 3, 3), ())
    assert (seen.in_place, seen.nbytes, seen.op) == (False, 20, None)


@pytest.mark.parametrize("given_slot", [False, True])
def test_all_gather_v_in_place(given_slot):
    recv = x(12)
    slot = recv[9:11]
    seen = prepare_all_gather_v(slot if given_slot else None, recv, COUNTS, [0, 4, 9], **ME)
    assert seen.in_place
    assert span(seen.send) == (address(slot), 2)
    assert seen.recvdispls == (0, 4, 9)


@pytest.mark.parametrize("given_slot", [False, True])
def test_reduce_scatter_v_in_place(given_slot):
    send = x(5)
    slot = send[3:5]
    seen = prepare_reduce_scatter_v(send, slot if given_slot else None, COUNTS, "max", **ME)
    assert seen.in_place
    assert span(seen.recv) == (address(slot), 2)
    assert (seen.op, seen.sendcounts, seen.senddispls) == (OPS["max"], COUNTS, (0, 3, 3))


def test_only_the_root_of_gather_v_needs_counts():
    root = prepare_gather_v(x(2), x(9), COUNTS, (5, 0, 1), 2, **ME)
    assert (root.recvcounts, root.recvdispls, root.root) == (COUNTS, (5, 0, 1), 2)
    for counts in (None, COUNTS):
        other = prepare_gather_v(x(3), None, counts, None, 2, rank=0, nranks=3)
        assert (other.recv, other.recvcounts, span(other.send)[1]) == (None, (), 3)
    assert prepare_gather_v(None, x(5), COUNTS, None, 2, **ME).in_place
    with pytest.raises(ArgumentError, match=r"gather_v on rank 0: .*4 elements, counts\[0\] is 3"):
        prepare_gather_v(x(4), None, COUNTS, None, 2, rank=0, nranks=3)
    with pytest.raises(ArgumentTypeError, match="gather_v on rank 2: counts=None"):
        prepare_gather_v(x(2), x(5), None, None, 2, **ME)


def test_only_the_root_of_scatter_v_needs_counts():
    root = prepare_scatter_v(x(9), x(2), COUNTS, (5, 0, 5), 2, **ME)
    assert (root.sendcounts, root.senddispls) == (COUNTS, (5, 0, 5))
    for counts in (None, COUNTS):
        other = prepare_scatter_v(None, x(3), counts, None, 2, rank=0, nranks=3)
        assert (other.send, other.sendcounts, span(other.recv)[1]) == (None, (), 3)
    assert prepare_scatter_v(x(5), None, COUNTS, None, 2, **ME).in_place
    with pytest.raises(ArgumentError, match=r"scatter_v on rank 0: .*4 elements, counts\[0\] is 3"):
        prepare_scatter_v(None, x(4), COUNTS, None, 2, rank=0, nranks=3)
    read_only = x(3)
    read_only.flags.writeable = False
    with pytest.raises(ArgumentError, match="recvbuf is read-only"):
        prepare_scatter_v(None, read_only, root=2, counts=None, rank=0, nranks=3)


def test_all_to_all_v():
    seen = prepare_all_to_all_v(x(6), (1, 3, 2), x(9), (4, 0, 2), None, (5, 0, 0), **ME)
    assert (seen.sendcounts, seen.senddispls) == ((1, 3, 2), (0, 1, 4))
    assert (seen.recvcounts, seen.recvdispls) == ((4, 0, 2), (5, 0, 0))
    assert (seen.in_place, seen.nbytes) == (False, 36)
    with pytest.raises(ArgumentError, match=r"sendcounts\[2\]=2 and recvcounts\[2\]=1"):
        prepare_all_to_all_v(x(6), (1, 3, 2), x(5), (4, 0, 1), **ME)
    y = x(6)
    with pytest.raises(ArgumentError, match="all_to_all_v on rank 2: recvbuf overlaps sendbuf"):
        prepare_all_to_all_v(y, (1, 3, 2), y, (1, 3, 2), **ME)
    with pytest.raises(ArgumentTypeError, match="float32 and float64"):
        prepare_all_to_all_v(x(6), (1, 3, 2), x(6, "float64"), (1, 3, 2), **ME)


@pytest.mark.parametrize(
    "counts",
    [[3, 0, 2], np.array([3, 0, 2], np.int16), (np.int64(3), 0, 2), iter([3, 0, 2])],
    ids=["list", "array", "mixed", "iterator"],
)
def test_counts_are_any_host_integers(counts):
    assert prepare_all_gather_v(x(2), x(5), counts, **ME).recvcounts == COUNTS


class OnDevice:
    def __init__(self):
        self.__cuda_array_interface__ = {"version": 3}

    def __iter__(self):
        return iter(COUNTS)


@pytest.mark.parametrize(
    "counts", [None, 5, "302", b"123", [3.0, 0, 2], {3: 1, 0: 1, 2: 1}, {3, 0, 2}, OnDevice()]
)
def test_other_counts_are_refused(counts):
    with pytest.raises(ArgumentTypeError, match=r"all_gather_v on rank 2: counts=.* 3 host int"):
        prepare_all_gather_v(x(2), x(5), counts, **ME)


@pytest.mark.parametrize(
    ("size", "counts", "displs", "message"),
    [
        (5, (3, 2), None, "counts has 2 entries"),
        (5, (3, -1, 2), None, "counts=.* has a negative entry"),
        (6, (3, 0, 2), None, "recvbuf has 6 elements, counts add up to 5"),
        (4, (3, 0, 2), None, "recvbuf has 4 elements, counts add up to 5"),
        (6, (3, 0, 2), (0, 0), "displs has 2 entries"),
        (6, (3, 0, 2), (0, -1, 4), "displs=.* has a negative entry"),
        (6, (3, 0, 2), (0, 0, 5), r"displs\[2\]=5 and counts\[2\]=2 end beyond recvbuf"),
        (6, (3, 0, 2), (1, 0, 0), r"segments 2 and 0 of recvbuf overlap"),
        (6, (3, 0, 2), (0, 0, 2), r"segments 0 and 2 of recvbuf overlap"),
        (6, (3, 0, 2), (0, 7, 3), r"displs\[1\]=7 and counts\[1\]=0 end beyond"),
    ],
)
def test_counts_and_displacements_that_do_not_fit(size, counts, displs, message):
    with pytest.raises(ArgumentError, match=f"all_gather_v on rank 2: .*{message}"):
        prepare_all_gather_v(x(2), x(size), counts, displs, **ME)


def test_other_refusals():
    with pytest.raises(ArgumentError, match=r"sendbuf has 3 elements, counts\[2\] is 2"):
        prepare_all_gather_v(x(3), x(5), COUNTS, **ME)
    with pytest.raises(ArgumentTypeError, match="float64 and float32"):
        prepare_all_gather_v(x(2, "float64"), x(5), COUNTS, **ME)
    with pytest.raises(ArgumentTypeError, match="float64 and float32"):
        prepare_reduce_scatter_v(x(5, "float64"), x(2), COUNTS, **ME)
    with pytest.raises(ArgumentTypeError, match=r"'max' stands where recvbuf does.*op='max'"):
        prepare_reduce_scatter_v(x(5), "max", COUNTS, **ME)
    with pytest.raises(ArgumentError, match="op='band' is not defined on float32"):
        prepare_reduce_scatter_v(x(5), x(2), COUNTS, "band", **ME)
    with pytest.raises(ArgumentError, match="gather_v on rank 2: root=3"):
        prepare_gather_v(x(2), x(5), COUNTS, None, 3, **ME)
    wide = x(5)
    with pytest.raises(ArgumentError, match=r"exactly slot 2, recvbuf\[3:5\]"):
        prepare_all_gather_v(wide[2:4], wide, COUNTS, **ME)
    with pytest.raises(ArgumentError, match=r"exactly slot 2, sendbuf\[3:5\]"):
        prepare_reduce_scatter_v(wide, wide[:2], COUNTS, **ME)


def test_ranks_agree_by_what_all_of_them_know():
    one = prepare_all_gather_v(x(3), x(5), COUNTS, rank=0, nranks=3)
    assert one.signature() == prepare_all_gather_v(x(2), x(5), COUNTS, **ME).signature()
    assert one.signature() != prepare_all_gather_v(x(2), x(5), (2, 1, 2), **ME).signature()
    assert one.signature() == "all_gather_v dtype=float32 counts=3,0,2 displs=0,3,3"
    root = prepare_gather_v(x(2), x(5), COUNTS, None, 2, **ME)
    other = prepare_gather_v(x(3), None, None, None, 2, rank=0, nranks=3)
    assert root.signature() == other.signature()
    scattered = prepare_reduce_scatter_v(x(5), x(2), COUNTS, "max", **ME)
    assert scattered.signature() == "reduce_scatter_v dtype=float32 counts=3,0,2 op=max"


@given(data=st.data(), nranks=st.integers(1, 5))
def test_accepted_segments_are_inside_and_apart(data, nranks):
    numbers = st.lists(st.integers(0, 6), min_size=nranks, max_size=nranks)
    counts, displs = data.draw(numbers), data.draw(st.none() | numbers)
    rank = data.draw(st.integers(0, nranks - 1))
    size = data.draw(st.sampled_from([sum(counts), sum(counts) + 1, 12]))
    recv = x(size, "uint8")
    try:
        seen = prepare_all_gather_v(
            x(counts[rank], "uint8"), recv, counts, displs, rank=rank, nranks=nranks
        )
    except UsageError:
        seen = None
    places = displs or [sum(counts[:i]) for i in range(nranks)]
    touched = np.zeros(30, int)
    for place, count in zip(places, counts, strict=True):
        touched[place : place + count] += 1
    ends = max(p + c for p, c in zip(places, counts, strict=True))
    legal = ends <= size and touched.max() <= 1 and (displs is not None or ends == size)
    assert (seen is not None) == legal
    if seen is not None:
        assert seen.recvdispls == tuple(places)
