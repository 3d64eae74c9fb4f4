"""Sizes, tables and bandwidth factors against nccl-tests' rules."""

from __future__ import annotations

import pytest

from ringcoll.bench.cases import Case, Section, sections, sizes
from ringcoll.bench.settings import COLLECTIVES, Settings
from ringcoll.dtypes import DTYPES, dtype_of
from ringcoll.errors import ArgumentError


def section(collective: str, nranks: int = 4, dtype: str = "float32", **rest) -> Section:
    return Section(collective, nranks, dtype_of(dtype), **rest)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(min_bytes=8, max_bytes=64, step_factor=2), [8, 16, 32, 64]),
        (Settings(min_bytes=8, max_bytes=100, step_factor=8), [8, 64]),
        (Settings(min_bytes=4, max_bytes=16, step_bytes=5), [4, 9, 14]),
        (Settings(min_bytes=0, max_bytes=2, step_bytes=1, step_factor=4), [0, 1]),
        (Settings(), [32 << 20]),
    ],
)
def test_sizes(settings, expected):
    assert list(sizes(settings)) == expected


@pytest.mark.parametrize(
    ("collective", "nbytes", "count", "size"),
    [
        ("all_reduce", 1024, 256, 1024),
        ("all_reduce", 1027, 256, 1024),
        ("broadcast", 8, 2, 8),
        ("all_gather", 1024, 64, 1024),
        ("all_gather", 1000, 60, 960),  # whole 16 bytes a rank
        ("reduce_scatter", 1000, 60, 960),
        ("reduce_scatter", 8, 0, 0),
        ("all_to_all", 1000, 62, 992),
        ("gather", 1000, 62, 992),
        ("scatter", 1000, 62, 992),
        ("sendrecv", 1000, 250, 1000),
        ("barrier", 1000, 0, 0),
    ],
)
def test_count_and_size(collective, nbytes, count, size):
    case = section(collective).case(nbytes)
    assert (case.count, case.nbytes) == (count, size)


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("gather", 0.75),
        ("scatter", 0.75),
        ("broadcast", 1.0),
        ("reduce", 1.0),
        ("sendrecv", 1.0),
    ],
)
def test_bandwidths(collective, factor):
    case = section(collective).case(4000 * 16)
    assert case.algbw(1e-6) == case.nbytes / 1e3
    assert case.busbw(1e-6) == pytest.approx(factor * case.algbw(1e-6))
    assert case.algbw(0.0) == 0.0


def test_every_collective_makes_a_section():
    for collective in COLLECTIVES:
        (made,) = sections(Settings(collective=collective), 3)
        assert made.collective == collective
        assert (made.root >= 0) == (collective in ("broadcast", "reduce", "gather", "scatter"))
        reduces = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan")
        assert (made.op is not None) == (collective in reduces)


def test_scans_have_no_avg():
    made = sections(Settings(collective="scan", ops=("all",)), 3)
    assert {s.op for s in made} == {"sum", "prod", "min", "max", "land", "lor", "premul_sum"}
    with pytest.raises(ArgumentError, match="-o avg: exscan has no avg; name another"):
        sections(Settings(collective="exscan", ops=("avg",)), 3)


def test_order_is_types_then_operators_then_roots():
    made = sections(
        Settings(collective="reduce", dtypes=("int", "half"), ops=("sum", "max"), roots=None), 2
    )
    assert [(s.type_name, s.op_name, s.root) for s in made[:5]] == [
        ("int32", "sum", 0),
        ("int32", "sum", 1),
        ("int32", "max", 0),
        ("int32", "max", 1),
        ("half", "sum", 0),
    ]


def test_all_leaves_out_what_makes_no_sense():
    made = sections(Settings(ops=("all",), dtypes=("all",)), 2)
    assert {s.dtype.name for s in made} == {row.name for row in DTYPES}
    pairs = {(s.op, s.dtype.name) for s in made}
    assert ("premul_sum", "float32") in pairs
    assert ("band", "float32") not in pairs
    assert ("min", "complex64") not in pairs


def test_named_operator_must_make_sense():
    with pytest.raises(ArgumentError, match="band"):
        sections(Settings(ops=("band",)), 2)
    with pytest.raises(ArgumentError, match="median"):
        sections(Settings(ops=("median",)), 2)
    with pytest.raises(ArgumentError, match="-d quarter: "):
        sections(Settings(dtypes=("quarter",)), 2)
    with pytest.raises(ArgumentError, match="-r 2: name a root from 0 to 1"):
        sections(Settings(collective="broadcast", roots=(2,)), 2)


def test_names_are_those_of_nccl_tests():
    names = ["half", "float", "double", "bfloat16", "f8e4m3", "f8e5m2", "uint64"]
    assert [section("all_reduce", dtype=name).type_name for name in names] == names
    mulsum = sections(Settings(ops=("mulsum",)), 4)[0]
    assert mulsum.op_name == "mulsum"
    assert [mulsum.operator(rank).scalar for rank in range(4)] == [1, 2, 3, 1]
    assert Case(section("broadcast"), 1).section.op_name == "none"
