"""Rows that are given another count are those that are made for it, in every call."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll.algorithms import ALGORITHMS
from ringcoll.collectives import COLLECTIVES
from ringcoll.dtypes import dtype_of
from ringcoll.executors.cpu.cpu_call import BoundRows
from ringcoll.executors.cpu.executor import CpuExecutor
from ringcoll.plan import Buffer
from ringcoll.tuner import choose

NAMES = [name for name in COLLECTIVES if name not in ("send", "barrier")]
Plain = tuple[object, ...]


def arrays_of(work: Any) -> list[Plain]:
    """Where the arrays lie that a row's closure holds, and their types."""
    if work is None:
        return []
    while isinstance(work, functools.partial):
        (work,) = work.args
    held = [cell.cell_contents for cell in work.__closure__ or ()]
    lists = [each for each in held if isinstance(each, list) and isinstance(each[0], np.ndarray)]
    places = [[(a.__array_interface__["data"][0], a.size, a.dtype) for a in each] for each in lists]
    return [work.__code__.co_name, *places]


def rows_of(bound: BoundRows) -> list[Plain]:
    """All that rows wait for, move and post."""
    return [
        (
            [(id(words), at, count) for words, at, count in waits],
            arrays_of(work),
            [(id(words), at, count, rank) for words, at, count, rank in signals],
        )
        for lane in bound.lanes
        for waits, work, signals in lane
    ]


class Compared:
    """Compares every binding of an executor with one that is made from the beginning."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patched: list[bool] = []  # of each call
        self.honest = CpuExecutor.bind
        monkeypatch.setattr(CpuExecutor, "bind", lambda host, active: self.bind(host, active))

    def bind(self, host: CpuExecutor, active: Any) -> BoundRows:
        prepared = active.prepared
        before = {id(rows): rows.count for rows in prepared.bound.values()}
        bound = self.honest(host, active)
        call = prepared.call
        self.patched.append(before.get(id(bound), call.count) != call.count)
        if prepared.agrees:
            return bound
        alone = host.prepare(call.on(call.send, call.recv), prepared.limits, timeout=1)
        assert alone.hello.signature == prepared.hello.signature == active.signature
        assert (alone.signature_text, alone.shown) == (prepared.signature_text, prepared.shown)
        assert (alone.staged, alone.each) == (prepared.staged, prepared.each)
        choice = choose(call, host.machine, prepared.staged, host.choices._fits)
        active.prepared = alone
        try:
            anew = host.binder.bind(active, choice, choice.layout, [], None)
        finally:
            active.prepared = prepared
        assert rows_of(bound) == rows_of(anew)
        assert (bound.total, bound.messages, bound.sources) == (
            anew.total,
            anew.messages,
            anew.sources,
        )
        assert [part[1:] for part in bound.user_parts] == [part[1:] for part in anew.user_parts]
        return bound


def expected(name: str, rows: list[Any], rank: int, root: int, op: str, count: int) -> Any:
    """What a rank receives, by numpy; None: nothing."""
    ufunc = {"sum": np.add, "max": np.maximum, "min": np.minimum}[op]
    slot = slice(rank * count, (rank + 1) * count)
    match name:
        case "all_reduce":
            return ufunc.reduce(rows)
        case "reduce":
            return ufunc.reduce(rows) if rank == root else None
        case "reduce_scatter":
            return ufunc.reduce(rows)[slot]
        case "scan":
            return ufunc.reduce(rows[: rank + 1])
        case "exscan":
            return ufunc.reduce(rows[:rank]) if rank else None
        case "broadcast":
            return rows[root]
        case "all_gather":
            return np.concatenate(rows)
        case "gather":
            return np.concatenate(rows) if rank == root else None
        case "scatter":
            return rows[root][slot]
    return np.concatenate([row[slot] for row in rows])


def shape_of(rng: random.Random, nranks: int) -> tuple[Any, ...]:
    """What of a random call is no count: its name, dtype, operator, root, options."""
    name = rng.choice(NAMES)
    dtype, op = rng.choice(("int32", "float64", "bfloat16", "int8")), rng.choice(("sum", "max"))
    named = {"algorithm": rng.choice(list(ALGORITHMS[name]))}
    how = rng.choice(({}, {}, {"deterministic": True}, {"slices": 3}, named))
    return name, dtype, op, rng.randrange(nranks), how, rng.random() < 0.5


def make(comm: Any, shape: tuple[Any, ...], count: int, seed: int) -> None:
    """A call of a shape, with this seed for the inputs of all ranks; checks its result."""
    (name, dtype, op, root, how, in_place), n, rank = shape, comm.nranks, comm.rank
    collective, kind, how = COLLECTIVES[name], dtype_of(dtype).numpy, dict(how)
    sent, received = (
        n * count if side == "all" else count for side in (collective.input, collective.output)
    )
    rows = [(np.arange(sent) * (other + 2) + seed) % 7 - 2 for other in range(n)]
    data, out = rows[rank].astype(kind), np.zeros(received, kind)
    if collective.reduces:
        how["op"] = op
    if collective.has_root:
        how["root"] = root
    call = getattr(comm, name)
    if name in ("all_reduce", "scan") and in_place:
        call(out := data, **how)
    elif name == "all_gather" and in_place:
        out[rank * count : (rank + 1) * count] = data
        call(None, out, **how)
    elif name == "broadcast":
        call(out := (data if rank == root else out), **how)
    elif name == "scatter":
        call(data if rank == root else None, out, **how)
    elif collective.has_root:
        call(data, out if rank == root else None, **how)
    else:
        call(data, out, **how)
    wanted = expected(name, rows, rank, root, op, count)
    assert wanted is None or np.array_equal(out.astype("f8"), wanted.astype(kind).astype("f8"))


@pytest.mark.parametrize(("nranks", "calls"), [(2, 1000), (3, 700), (5, 350)])
def test_patched_rows_are_those_of_a_first_call(monkeypatch, nranks, calls):
    compared = Compared(monkeypatch)

    def work(comm):
        rng = random.Random(nranks)
        shapes = [shape_of(rng, nranks) for _ in range(calls // 25)]
        for seed in range(calls):
            about = 2 ** rng.choice((2.5, 6.5, 9.5, 12))
            make(comm, rng.choice(shapes), int(about * rng.uniform(0.8, 1.2)), seed)

    ringcoll.spawn(work, nranks, timeout=120)
    assert len(compared.patched) == calls * nranks
    assert sum(compared.patched) > calls * nranks // 4


def test_rows_that_an_interrupt_has_left_half_moved_are_moved_again():
    """Their arrays are then of two calls, and another may come at the addresses of the first."""

    class Interrupted(list[Any]):
        def __setitem__(self, *_):
            raise KeyboardInterrupt

    moved: list[Any] = [None]
    key, calls = (Buffer.INPUT, False), []
    for value in (1, 2):
        array = np.full(4, value)
        calls.append((SimpleNamespace(rank=0, send=array, recv=None), (value, 0, 0, 0)))
    rows: Any = BoundRows(True, [], user_parts=[(moved, 0, key, slice(4))])
    rows.move_to(*calls[0])
    rows.user_parts.append((Interrupted([None]), 0, key, slice(4)))
    with pytest.raises(KeyboardInterrupt):
        rows.move_to(*calls[1])
    assert moved[0] is not None and moved[0][0] == 2
    assert rows.given != calls[0][1]
