"""Which buffers each call takes on each rank, what in place means, and what is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcoll.arguments.calls import (
    Call,
    check_peer,
    prepare,
    prepare_recv,
    prepare_send,
    prepare_sendrecv,
)
from ringcoll.collectives import COLLECTIVES, Collective
from ringcoll.dtypes import DTYPES, OPS, dtype_of, premul_sum
from ringcoll.errors import ArgumentError, ArgumentTypeError, UsageError

N = 4
NAMES = [name for name in COLLECTIVES if name not in ("send", "barrier")]
REDUCING = [name for name in NAMES if COLLECTIVES[name].reduces]
ROOTED = [name for name in NAMES if COLLECTIVES[name].has_root]
# One buffer of the size of the other, or one of the two has nranks segments.
SCANS = ["scan", "exscan"]
EQUAL = ["all_reduce", "reduce", "broadcast", "all_to_all", *SCANS]
WIDE_RECV = ["all_gather", "gather"]
WIDE_SEND = ["reduce_scatter", "scatter"]


def address(a):
    return a.__array_interface__["data"][0]


def same(a, b):
    return address(a) == address(b) and a.size == b.size


def buffers(name, rank, root=0, nranks=N, count=6, dtype="float32"):
    """What a rank passes out of place: exactly the buffers that it needs."""
    collective = Collective(name, nranks, root=root if COLLECTIVES[name].has_root else 0)
    sizes = [collective.chunks_in(b, rank) * count for b in ("INPUT", "OUTPUT")]
    return [
        np.zeros(size, dtype_of(dtype).numpy) if collective.has(b, rank) else None
        for b, size in zip(("INPUT", "OUTPUT"), sizes, strict=True)
    ]


def call(name, sendbuf=None, recvbuf=None, *, rank=2, nranks=N, **how):
    return prepare(name, rank=rank, nranks=nranks, sendbuf=sendbuf, recvbuf=recvbuf, **how)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rank", range(N))
@pytest.mark.parametrize("count", [0, 1, 6])
def test_out_of_place(name, rank, count):
    root = 1 if name in ROOTED else 0
    send, recv = buffers(name, rank, root, count=count)
    seen = call(name, send, recv, rank=rank, root=root)
    assert (seen.collective, seen.rank, seen.root, seen.peer) == (name, rank, root, -1)
    assert seen.send is send
    assert seen.recv is recv
    assert not seen.in_place
    assert (seen.count, seen.dtype.name) == (count, "float32")
    assert (seen.op is OPS["sum"]) == (name in REDUCING)
    wide = name not in ("all_reduce", "reduce", "broadcast", *SCANS)
    assert seen.nbytes == count * 4 * (N if wide else 1)


@pytest.mark.parametrize("name", EQUAL)
def test_in_place_by_none_or_by_the_same_memory(name):
    x = np.zeros(8, np.float32)
    for recv in (None, x, x[:], x.reshape(2, 4)):
        seen = call(name, x, recv, root=2)
        assert seen.in_place
        assert same(seen.send, x)
        assert same(seen.recv, x)


@pytest.mark.parametrize("name", WIDE_RECV + WIDE_SEND)
@pytest.mark.parametrize("given_slot", [False, True])
def test_in_place_by_none_or_by_the_ranks_slot(name, given_slot):
    wide = np.zeros(4 * 3, np.float32)
    slot = wide[2 * 3 : 3 * 3]
    narrow = slot if given_slot else None
    pair = (narrow, wide) if name in WIDE_RECV else (wide, narrow)
    seen = call(name, *pair, root=2)
    small, large = (seen.send, seen.recv) if name in WIDE_RECV else (seen.recv, seen.send)
    assert seen.in_place
    assert same(small, slot)
    assert same(large, wide)
    assert (seen.count, seen.nbytes) == (3, 48)


def test_a_broadcast_of_one_buffer_receives_in_it_elsewhere():
    x = np.zeros(3)
    seen = call("broadcast", x, rank=2, root=0)
    assert seen.send is None
    assert seen.recv is x
    y = np.zeros(3)
    assert call("broadcast", x, y, rank=2, root=0).recv is y
    assert call("broadcast", None, y, rank=2, root=0).recv is y


@pytest.mark.parametrize(
    ("name", "pair"),
    [
        ("reduce", (np.zeros(4), "ignored")),
        ("gather", (np.zeros(4), "ignored")),
        ("scatter", ("ignored", np.zeros(4))),
        ("broadcast", ("ignored", np.zeros(4))),
    ],
)
def test_buffers_that_a_rank_does_not_need_are_ignored(name, pair):
    other = np.zeros(99, "M8[s]")
    given_pair = [other if isinstance(b, str) else b for b in pair]
    seen = call(name, *given_pair, rank=1, root=0)
    assert (seen.send is None) != (seen.recv is None)
    assert seen.count == 4


def test_a_send_buffer_of_reduce_may_be_read_only_except_in_place():
    x = np.zeros(4)
    x.flags.writeable = False
    assert call("reduce", x, rank=1, root=0).send is x
    assert call("all_reduce", x, np.zeros(4)).send is x
    for name in ("all_reduce", "reduce_scatter", "all_to_all"):
        with pytest.raises(ArgumentError, match="sendbuf is read-only"):
            call(name, x)
    with pytest.raises(ArgumentError, match="recvbuf is read-only"):
        call("all_reduce", np.zeros(4), x)


def test_a_barrier_has_no_buffers():
    seen = call("barrier")
    assert (seen.send, seen.recv, seen.count, seen.nbytes) == (None, None, 0, 0)


@pytest.mark.parametrize("name", EQUAL)
def test_sizes_must_match_exactly(name):
    with pytest.raises(
        ArgumentError, match=f"{name} on rank 2: recvbuf has 4 elements, sendbuf 8: .*recvbuf of 8"
    ):
        call(name, np.zeros(8), np.zeros(4), root=2)


@pytest.mark.parametrize("name", WIDE_RECV + WIDE_SEND)
def test_a_wide_buffer_has_one_segment_a_rank(name):
    wide, narrow = np.zeros(12), np.zeros(4)
    pair = (narrow, wide) if name in WIDE_RECV else (wide, narrow)
    with pytest.raises(ArgumentError, match=r"has 4 elements, .* 12 for 4 ranks: .* of 3 or .*16"):
        call(name, *pair, root=2)


@pytest.mark.parametrize("name", WIDE_RECV + WIDE_SEND)
def test_swapped_buffers_are_told(name):
    wide, narrow = np.zeros(12), np.zeros(3)
    pair = (wide, narrow) if name in WIDE_RECV else (narrow, wide)
    with pytest.raises(ArgumentError, match="which are 4 times as many: are they swapped"):
        call(name, *pair, root=2)


@pytest.mark.parametrize("name", [*WIDE_RECV, *WIDE_SEND, "all_to_all"])
def test_a_remainder_is_refused_never_dropped(name):
    wide = np.zeros(13)
    pair = (None, wide) if name in WIDE_RECV else (wide, None)
    with pytest.raises(ArgumentError, match=rf"{name} on rank 2: .*1 would be left.*12 or 16.*_v"):
        call(name, *pair, root=2)


@pytest.mark.parametrize("name", WIDE_RECV + WIDE_SEND)
def test_the_remedy_of_a_remainder_fits_the_other_buffer(name):
    wide, narrow = np.zeros(7), np.zeros(3)
    pair = (narrow, wide) if name in WIDE_RECV else (wide, narrow)
    with pytest.raises(ArgumentError, match=rf"buf of 12, or use {name}_v") as refused:
        call(name, *pair, root=2)
    assert "left over" not in str(refused.value)


@pytest.mark.parametrize("name", NAMES)
def test_dtypes_must_match(name):
    send, recv = buffers(name, 2, root=2 if name in ROOTED else 0)
    with pytest.raises(ArgumentTypeError, match=f"{name} on rank 2: .*float32 and float64"):
        call(name, send, recv.astype("float64"), root=2)


@pytest.mark.parametrize("name", NAMES)
def test_overlap_that_is_not_in_place_is_refused(name):
    send, recv = buffers(name, 2, root=2 if name in ROOTED else 0)
    arena = np.zeros(send.size + recv.size, np.float32)
    for shift in (1, send.size - 1):
        pair = (arena[: send.size], arena[shift : shift + recv.size])
        with pytest.raises(ArgumentError, match=f"{name} on rank 2: .* overlaps .*in place"):
            call(name, *pair, root=2)


@pytest.mark.parametrize("name", WIDE_RECV + WIDE_SEND)
def test_another_ranks_slot_is_refused(name):
    wide = np.zeros(12)
    narrow = wide[3:6]
    pair = (narrow, wide) if name in WIDE_RECV else (wide, narrow)
    with pytest.raises(ArgumentError, match=r"exactly slot 2, .*\[6:9\]"):
        call(name, *pair, root=2)


def test_neighbours_in_memory_do_not_overlap():
    arena = np.zeros(16)
    assert not call("all_reduce", arena[:8], arena[8:]).in_place


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("value", "keyword"), [("max", "op"), (3, "root"), (OPS["max"], "op")])
def test_a_keyword_by_position_is_named(name, value, keyword):
    for rank in (0, 2):
        with pytest.raises(ArgumentTypeError) as caught:
            call(name, np.zeros(4), value, rank=rank, root=0)
        kind = COLLECTIVES[name]
        if {"op": kind.reduces, "root": kind.has_root}[keyword]:
            assert f"write {keyword}={value!r}" in str(caught.value)
        assert f"{name} on rank {rank}: {value!r} stands where recvbuf does" in str(caught.value)


@pytest.mark.parametrize("name", ROOTED)
@pytest.mark.parametrize("root", [-1, 4, 99])
def test_a_root_out_of_range_is_refused(name, root):
    send, recv = buffers(name, 0)
    with pytest.raises(ArgumentError, match=rf"{name} on rank 2: root={root} .* from 0 to 3"):
        call(name, send, recv, root=root)


@pytest.mark.parametrize("root", [None, "0", 1.0, True])
def test_a_root_that_is_no_integer_is_refused(root):
    with pytest.raises(ArgumentTypeError, match="broadcast on rank 2: root="):
        call("broadcast", np.zeros(4), root=root)


def test_a_numpy_integer_is_a_root():
    seen = call("broadcast", np.zeros(4), root=np.int64(3))
    assert type(seen.root) is int
    assert seen.root == 3


@pytest.mark.parametrize("name", REDUCING)
@pytest.mark.parametrize("op", ["sum", "max", "avg", "bxor", "land"])
def test_operators_and_dtypes(name, op):
    refused = {
        "max": ("complex",),
        "avg": ("bool",),
        "bxor": ("float", "complex"),
        "land": ("complex",),
    }
    for dtype in DTYPES:
        send, recv = buffers(name, 2, root=2 if name == "reduce" else 0, dtype=dtype)
        if name in SCANS and op == "avg" and dtype.category != "bool":
            with pytest.raises(ArgumentError, match=f"{name} on rank 2: op='avg' has no meaning"):
                call(name, send, recv, op=op)
        elif dtype.category in refused.get(op, ()):
            with pytest.raises(ArgumentError, match=f"{name} on rank 2: op='{op}' is not defined"):
                call(name, send, recv, root=2, op=op)
        else:
            assert call(name, send, recv, root=2, op=op).op is OPS[op], dtype


@pytest.mark.parametrize("op", ["mean", "SUM", 3, None, max])
def test_an_unknown_operator_is_refused(op):
    with pytest.raises(ArgumentError, match=r"all_reduce on rank 2: op=.* is not one of sum"):
        call("all_reduce", np.zeros(4), op=op)


@pytest.mark.parametrize("name", NAMES)
def test_a_needed_buffer_that_is_missing_is_named(name):
    argument = "recvbuf" if name in WIDE_RECV else "sendbuf"
    with pytest.raises(ArgumentTypeError, match=f"{name} on rank 2: {argument} is (None|missing)"):
        call(name, root=2)


@pytest.mark.parametrize(
    ("name", "narrow", "wide"),
    [
        ("all_gather", "sendbuf", "recvbuf"),
        ("gather", "sendbuf", "recvbuf"),
        ("reduce_scatter", "recvbuf", "sendbuf"),
        ("scatter", "recvbuf", "sendbuf"),
    ],
)
def test_the_buffer_of_all_segments_that_is_missing_is_described(name, narrow, wide):
    buffers = {"sendbuf": None, "recvbuf": None, narrow: np.zeros(5, "float32")}
    who = ", which the root has to pass" if name in ("gather", "scatter") else ""
    size = f"{5 * N} elements of float32, 5 for each of {N} ranks"
    with pytest.raises(ArgumentTypeError) as caught:
        call(name, *buffers.values(), root=2)
    assert str(caught.value) == f"{name} on rank 2: {wide} is missing{who}: pass an array of {size}"


def test_ranks_agree_by_what_they_say():
    x, y = np.zeros(8, np.float32), np.zeros(8, np.float32)
    assert call("all_reduce", x).signature() == "all_reduce count=8 dtype=float32 op=sum"
    assert call("all_reduce", x).signature() == call("all_reduce", x, y, rank=0).signature()
    assert call("reduce", x, root=0).signature() == call("reduce", x, y, rank=0).signature()
    one, two = premul_sum(1), premul_sum(2)
    assert call("all_reduce", x, op=one).signature() == call("all_reduce", x, op=two).signature()
    different = [
        call("all_reduce", x),
        call("all_reduce", x[:4]),
        call("all_reduce", x, op="max"),
        call("all_reduce", x.astype("float64")),
        call("reduce", x, root=0),
        call("reduce", x, root=1),
        call("broadcast", x, root=0),
        call("broadcast", x, root=1),
        call("all_to_all", x),
        call("reduce_scatter", x),
        call("scan", x),
        call("exscan", x),
        call("barrier"),
    ]
    assert len({c.signature() for c in different}) == len(different)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("root", range(N))
def test_all_ranks_of_a_call_say_the_same(name, root):
    root = root if name in ROOTED else 0
    said = {
        call(name, *buffers(name, rank, root), rank=rank, root=root).signature()
        for rank in range(N)
    }
    assert len(said) == 1


def test_pairs():
    x = np.zeros((2, 3), np.int16)
    send = prepare_send(x, 3, rank=2, nranks=N)
    assert (send.collective, send.peer, send.recv, send.nbytes) == ("send", 3, None, 12)
    assert same(send.send, x)
    recv = prepare_recv(x, np.int8(2), rank=3, nranks=N)
    assert (recv.peer, recv.send, recv.count) == (2, None, 6)
    assert send.signature() == recv.signature()
    there, back = prepare_sendrecv(x, 3, np.zeros(9), 0, rank=2, nranks=N)
    assert (there.peer, there.count, back.peer, back.count) == (3, 6, 0, 9)


def test_what_pairs_refuse():
    x = np.zeros(6)
    x.flags.writeable = False
    assert prepare_send(x, 2, rank=2, nranks=N).peer == 2
    with pytest.raises(ArgumentError, match="recv on rank 2: buf is read-only"):
        prepare_recv(x, 0, rank=2, nranks=N)
    with pytest.raises(ArgumentError, match=r"send on rank 2: dest=4 .* from 0 to 3"):
        prepare_send(x, 4, rank=2, nranks=N)
    with pytest.raises(ArgumentTypeError, match="recv on rank 2: source="):
        prepare_recv(x, "0", rank=2, nranks=N)
    y = np.zeros(6)
    with pytest.raises(ArgumentError, match="sendrecv on rank 2: recvbuf overlaps sendbuf"):
        prepare_sendrecv(y[:4], 0, y[2:], 1, rank=2, nranks=N)
    with pytest.raises(ArgumentError, match="sendrecv on rank 2: source=-1"):
        check_peer("sendrecv", "source", -1, rank=2, nranks=N)


@given(
    name=st.sampled_from(NAMES),
    nranks=st.integers(1, 5),
    data=st.data(),
)
def test_any_two_views_of_one_arena(name, nranks, data):
    """Accepted buffers share all their memory as in place says, or none."""
    rank = data.draw(st.integers(0, nranks - 1))
    start = st.integers(0, 30)
    sizes = st.sampled_from([0, 1, 2, 3, 4, 6, 8, nranks, 2 * nranks])
    arena = np.zeros(60, np.int32)
    a, m, b, n = (data.draw(s) for s in (start, sizes, start, sizes))
    send, recv = arena[a : a + m], arena[b : b + n]
    try:
        seen = call(name, send, recv, rank=rank, nranks=nranks, root=rank)
    except UsageError as error:
        assert re.match(f"{name} on rank {rank}: ", str(error))
        return
    shared = max(0, min(a + m, b + n) - max(a, b)) if m and n else 0
    if (name, rank) == ("exscan", 0):  # nothing is received, in place or not
        assert seen.recv is None and not seen.in_place and shared in (0, m)
        return
    assert shared == (min(m, n) if seen.in_place else 0)
    if seen.in_place and m:
        offset = rank * seen.count * 4 if m != n else 0
        smaller, larger = (seen.send, seen.recv) if m <= n else (seen.recv, seen.send)
        assert address(smaller) == address(larger) + offset


def test_calls_of_other_counts_have_no_arrays():
    call = Call("all_reduce", 1, np.ones(6), np.ones(6), 6, dtype_of("float64"), nbytes=48)
    other = call.with_count(9)
    assert (other.count, other.nbytes, other.send, other.recv) == (9, 72, None, None)
    assert call.with_counts(other).count == 9 and call.count == 6


@pytest.mark.parametrize(
    ("total", "longest", "counts", "displs"),
    [
        (10, 4, (4, 4, 2), (0, 4, 8)),
        (10, 1, (4, 4, 2), (0, 4, 8)),  # no three are shorter
        (10, 7, (7, 3, 0), (0, 7, 10)),
        (3, 9, (3, 0, 0), (0, 3, 3)),
    ],
)
def test_counts_are_spread_over_the_ranks(total, longest, counts, displs):
    call = Call("all_gather", 0, None, None, 1, dtype_of("float32"), counts=(1,) * 3, displs=(0,))
    other = call.spread(total, longest, 3)
    assert (other.counts, other.displs) == (counts, displs)
    assert (other.count, other.nbytes) == (counts[0], 4 * total)
