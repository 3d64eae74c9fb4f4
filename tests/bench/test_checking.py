"""The judge is judged: against an element-by-element answer, and by outputs that are wrong."""

from __future__ import annotations

from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ringcoll.bench import checking
from ringcoll.bench.cases import Case, Section, sections
from ringcoll.bench.checking import Inputs, answer, compare, given, poison
from ringcoll.bench.settings import Settings
from ringcoll.dtypes import DTYPES, DType, dtype_of

EVERY = sections(Settings(ops=("all",), dtypes=("all",)), 3)
E3M4 = DType("float8_e3m4", np.dtype(ml_dtypes.float8_e3m4), np.dtype("float32"), "float")
"""A type whose largest value, 15.5, is less than 2 to its precision; no row of the table yet."""


def case(collective: str, count: int, nranks: int = 3, dtype: str = "int32", **rest) -> Case:
    return Case(Section(collective, nranks, dtype_of(dtype), **rest), count)


def wrong(seen: Any, right: Any, *, bits: bool) -> Any:
    found = compare(seen, right, bits=bits)
    assert found is not None
    return found


def exact(section: Section, values: list[Any]) -> Any:
    """One element, by Python's own numbers."""
    n, dtype, op = len(values), section.dtype, str(section.op)
    if section.op in ("land", "lor"):
        return (all if section.op == "land" else any)(value != 0 for value in values)
    if dtype.category == "bool":
        name = {"sum": "or", "max": "or", "bor": "or"}.get(op, "and")
        if section.op == "bxor":
            return sum(map(bool, values)) % 2
        return (any if name == "or" else all)(values)
    numbers = [v.item() if hasattr(v, "item") else v for v in values]
    if dtype.category == "float":
        numbers = [float(v) for v in values]
    scaled = [v * (p % 3 + 1) for p, v in enumerate(numbers)]
    found: Any = {
        "sum": lambda: sum(numbers),
        "avg": lambda: sum(numbers),
        "premul_sum": lambda: sum(scaled),
        "prod": lambda: reduce(lambda a, b: a * b, numbers),
        "min": lambda: min(numbers),
        "max": lambda: max(numbers),
        "band": lambda: reduce(lambda a, b: a & b, numbers),
        "bor": lambda: reduce(lambda a, b: a | b, numbers),
        "bxor": lambda: reduce(lambda a, b: a ^ b, numbers),
    }[op]()
    if dtype.category == "int":
        bits = 8 * dtype.itemsize
        found %= 1 << bits
        if np.issubdtype(dtype.numpy, np.signedinteger) and found >= 1 << (bits - 1):
            found -= 1 << bits
        return int(found / n) if section.op == "avg" and bits < 64 else found
    return found / n if section.op == "avg" else found


@pytest.mark.parametrize("section", EVERY, ids=lambda s: f"{s.op}-{s.dtype}")
def test_answer_of_every_operator_and_dtype(section):
    inputs = Inputs(Case(section, 40), 5)
    parts = [given(inputs, p, 40) for p in range(3)]
    found = answer(inputs, 1, 40)
    assert found.dtype == section.dtype.numpy
    wide_average = section.op == "avg" and section.dtype.itemsize == 8
    if wide_average and section.dtype.category == "int":
        # Python's division of such large numbers is not exact: go by the remainder.
        totals = np.sum([p.astype(section.dtype.numpy) for p in parts], 0, section.dtype.numpy)
        for total, quotient in zip(totals.tolist(), found.tolist(), strict=True):
            rest = total - 3 * quotient
            assert abs(rest) < 3
            assert rest * total >= 0
        return
    for at in range(40):
        wanted = exact(section, [part[at] for part in parts])
        if section.op == "avg" and section.dtype.category != "int":
            wanted = np.asarray(wanted, section.dtype.accumulator).astype(section.dtype.numpy)
            if section.dtype.category == "complex":
                # numpy divides by a complex 3, which may be off in the last bit.
                assert abs(found[at] - wanted) <= 2e-7 * abs(wanted)
                continue
        assert found[at] == wanted


def test_floats_add_up_exactly_in_any_order():
    for section in (*EVERY, Section("all_reduce", 3, E3M4, op="sum")):
        if section.op == "sum" and section.dtype.category == "float":
            inputs = Inputs(Case(section, 100), 1)
            parts = [given(inputs, p, 100) for p in range(3)]
            narrow = (parts[2] + parts[0]) + parts[1]
            assert compare(narrow, answer(inputs, 0, 100), bits=False) is None
            assert np.isfinite(narrow).all() and narrow.any()


@pytest.mark.parametrize(
    ("collective", "wanted"),
    [
        ("broadcast", lambda p, r: p[1]),
        ("sendrecv", lambda p, r: p[(r - 1) % 3]),
        ("all_gather", lambda p, r: np.concatenate([part[:4] for part in p])),
        ("gather", lambda p, r: np.concatenate([part[:4] for part in p])),
        ("scatter", lambda p, r: p[1][4 * r : 4 * r + 4]),
        ("all_to_all", lambda p, r: np.concatenate([q[4 * r : 4 * r + 4] for q in p])),
        ("reduce_scatter", lambda p, r: sum(q[4 * r : 4 * r + 4] for q in p)),
    ],
)
def test_answer_of_every_collective(collective, wanted):
    op = "sum" if collective == "reduce_scatter" else None
    inputs = Inputs(case(collective, 4, root=1, op=op), 9)
    parts = [given(inputs, p, 12) for p in range(3)]
    for rank in range(3):
        right = wanted(parts, rank)
        np.testing.assert_array_equal(answer(inputs, rank, right.size), right)


def test_answer_over_blocks(monkeypatch):
    one = answer(Inputs(case("all_to_all", 1000), 3), 2, 3000)
    monkeypatch.setattr(checking, "BLOCK", 1 << 18)
    inputs = Inputs(case("all_to_all", 1000), 3)
    pieces = [inputs.contribution(p, 2000, 3000) for p in range(3)]
    np.testing.assert_array_equal(one, np.concatenate(pieces))
    large = Inputs(case("all_reduce", (1 << 18) + 5, op="max"), 3)
    whole = answer(large, 0, (1 << 18) + 5)
    tail = [large.contribution(p, 1 << 18, (1 << 18) + 5) for p in range(3)]
    np.testing.assert_array_equal(whole[1 << 18 :], np.maximum.reduce(tail))


def test_inputs_are_fresh_for_seed_rank_and_place():
    draws = [
        given(Inputs(case("broadcast", 64), seed), rank, 64).tobytes()
        for seed in (1, 2)
        for rank in (0, 1)
    ]
    assert len(set(draws)) == 4
    again = given(Inputs(case("broadcast", 64), 1), 0, 64).tobytes()
    assert again == draws[0]


@pytest.mark.parametrize("row", DTYPES, ids=str)
def test_one_wrong_element_is_found(row):
    inputs = Inputs(case("broadcast", 50, dtype=row.name, root=0), 2)
    right = answer(inputs, 1, 50)
    assert compare(right.copy(), right, bits=True) is None
    broken = right.copy()
    broken[17:18].view(np.uint8)[-1] ^= 1
    found = wrong(broken, right, bits=True)
    assert (found.count, found.index) == (1, 17)


def test_poison_is_noticed():
    for row in DTYPES:
        inputs = Inputs(case("broadcast", 200, dtype=row.name, root=0), 2)
        right = answer(inputs, 1, 200)
        output = np.zeros(200, row.numpy)
        poison(output)
        assert wrong(output, right, bits=True).count >= 50
    floats = np.zeros(3, np.float32)
    poison(floats)
    assert wrong(floats, np.zeros(3, np.float32), bits=False).count == 3


def test_nan_is_wrong_and_a_negative_zero_is_right():
    right = np.zeros(2, np.float32)
    seen = np.array([np.nan, -0.0], np.float32)
    found = wrong(seen, right, bits=False)
    assert (found.count, found.index, found.seen, found.wanted) == (1, 0, "nan", "0.0")


@pytest.mark.parametrize(
    "row", [*(row for row in DTYPES if row.category in ("float", "complex")), E3M4], ids=str
)
def test_whole_numbers_are_exact_up_to_the_precision_of_a_type(row):
    end = checking._most(row)
    exact = [complex(np.array(n).astype(row.numpy)) == n for n in (end - 1, end, end + 1)]
    assert exact == [True, True, False]
