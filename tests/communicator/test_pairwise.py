"""A seeded cover of all pairs of what a call may be, each pair in at least one call."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import pytest

import ringcoll
from ringcoll.algorithms import ALGORITHMS
from ringcoll.dtypes import DTYPES, OPS, dtype_of
from ringcoll.tuner.measured import AGREED_BYTES
from tests.communicator.cases import (
    GUARD,
    REDUCING,
    ROOTED,
    SCANS,
    SHAPES,
    Case,
    operators,
    run_cases,
    scalars,
)

FACTORS: dict[str, list[Any]] = {
    "algorithm": [(c, a) for c in SHAPES for a in (None, *ALGORITHMS[c])],
    "nranks": [1, 2, 3, 4, 5, 6, 8],
    "dtype": [dtype.name for dtype in DTYPES],
    "op": ["none", "premul_sum", *OPS],
    "in_place": ["no", "all", "some"],
    "root": ["first", "middle", "last"],
    "size": ["0", "1", "n-1", "n", "n+1", "odd", "large", "slices"],
    "offset": ["none", "one", "aligned", "unaligned"],
    "memory": ["symmetric", "plain", "mixed"],
}
NAMES = list(FACTORS)


# What moves bytes alone knows the sizes of dtypes; tests of dtypes have each in every collective.
MOVED = frozenset({"bool", "uint8", "bfloat16", "int32", "float64", "complex128"})
OPERATORS = {dtype.name: frozenset(operators(dtype.name)) for dtype in DTYPES}


def legal(row):
    """Whether a part of a row (a dict) can stand in a case."""
    op, (collective, _) = row.get("op"), row.get("algorithm", ("", ""))
    if op and collective and (op != "none") != (collective in REDUCING):
        return False
    moves = op == "none" or (bool(collective) and collective not in REDUCING)
    if moves and row.get("dtype", "uint8") not in MOVED:
        return False
    if op and op != "none" and "dtype" in row and op not in OPERATORS[row["dtype"]]:
        return False
    if op in OPS and OPS[op].finishes and collective in SCANS:
        return False
    # all_to_all is in place on every rank or on none.
    return not (collective == "all_to_all" and row.get("in_place") == "some")


@functools.cache
def rows():
    """Rows that cover every legal pair of two factors' values: greedy, from random candidates."""
    rng = random.Random(8)
    todo = {
        frozenset([(a, x), (b, y)])
        for a, b in itertools.combinations(NAMES, 2)
        for x in FACTORS[a]
        for y in FACTORS[b]
        if legal({a: x, b: y})
    }
    order = sorted(todo, key=str)
    rng.shuffle(order)
    found = []
    for pair in order:
        if pair not in todo:
            continue
        best: dict[str, Any] = {}
        covers: set[frozenset] = set()
        for _ in range(12):
            row = dict(pair)
            for name in rng.sample(NAMES, len(NAMES)):
                if name not in row:
                    row[name] = rng.choice(FACTORS[name])
                    while not legal(row):
                        row[name] = rng.choice(FACTORS[name])
            new = {frozenset(two) for two in itertools.combinations(row.items(), 2)} & todo
            if len(new) > len(covers):
                best, covers = row, new
        todo -= covers
        found.append(best)
    return found


def count_of(size, collective, nranks, itemsize, rng):
    """Elements a segment."""
    segments = nranks if "n" in SHAPES[collective] else 1
    match size:
        case "n-1" | "n" | "n+1":
            return nranks + {"n-1": -1, "n": 0, "n+1": 1}[size]
        case "odd":
            return rng.randrange(3, 300) | 1
        case "large":
            return (AGREED_BYTES.value + rng.randrange(1, 9999)) // itemsize // segments + 1 | 1
        case "slices":
            return rng.randrange(600, 900) * 4 // segments // itemsize * 37 + 5
        case _:
            return int(size)


def case_of(row, seed):
    rng, nranks = random.Random(seed), row["nranks"]
    collective, algorithm = row["algorithm"]
    itemsize = dtype_of(row["dtype"]).itemsize
    named = {} if algorithm is None else {"algorithm": algorithm}
    if row["size"] == "slices":
        named["slices"] = rng.randrange(2, 8)

    def each(value):
        return tuple(value() for _ in range(nranks))

    shift = {
        "none": lambda: 0,
        "one": lambda: itemsize,
        "aligned": lambda: rng.randrange(9) * itemsize,
        "unaligned": lambda: rng.randrange(1, GUARD) | 1,
    }[row["offset"]]
    flag = {"no": lambda: False, "all": lambda: True, "some": lambda: rng.random() < 0.5}
    where = {"symmetric": True, "plain": False}.get(row["memory"])
    return Case(
        collective,
        count_of(row["size"], collective, nranks, itemsize, rng),
        row["dtype"],
        "sum" if row["op"] == "none" else row["op"],
        root={"first": 0, "middle": nranks // 2, "last": nranks - 1}[row["root"]]
        if collective in ROOTED
        else 0,
        in_place=each(flag[row["in_place"]]),
        symmetric=each(lambda: rng.random() < 0.5) if where is None else where,
        offset=each(shift),
        scalars=scalars(row["dtype"], nranks, seed),
        options=named,
        seed=seed,
    )


def test_cover_is_complete():
    """Every legal pair is there, by a count of its own."""
    seen = {
        (a, str(row[a]), b, str(row[b]))
        for row in rows()
        for a, b in itertools.combinations(NAMES, 2)
    }
    wanted = {
        (a, str(x), b, str(y))
        for a, b in itertools.combinations(NAMES, 2)
        for x in FACTORS[a]
        for y in FACTORS[b]
        if legal({a: x, b: y})
    }
    assert seen >= wanted
    assert all(legal(row) for row in rows())


@pytest.mark.parametrize("nranks", FACTORS["nranks"])
def test_every_pair_of_properties(nranks):
    todo = [case_of(row, seed) for seed, row in enumerate(rows()) if row["nranks"] == nranks]
    assert len(todo) > 40
    assert ringcoll.spawn(run_cases, nranks, todo) == [len(todo)] * nranks
