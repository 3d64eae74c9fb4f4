"""The words that the compiled part writes for a call of a new count; by fakes, without a GPU."""

from __future__ import annotations

import gc
import random
import weakref
from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ringcoll.dtypes import dtype_of
from ringcoll.executors.cuda import launches as module
from ringcoll.executors.cuda.ll_layout import LLLayout
from ringcoll.executors.cuda.ll_recounts import LLRecounts
from ringcoll.executors.cuda.params import TIMEOUT_WORD, nanoseconds
from ringcoll.executors.cuda.recounted import sign
from ringcoll.launch import Layout
from ringcoll.plan import Buffer
from ringcoll.tuner.gpu import LLGrid

pytest.importorskip("cupy")

from tests.gpu.compiled_counts import Compiled, Kernel, x
from tests.gpu.noted import noted

pytestmark = pytest.mark.skipif(
    module._launches is None, reason="the compiled part has not been built"
)


@pytest.fixture
def compiled(monkeypatch):
    """One of two ranks, with the compiled part."""
    for comms, gpus in noted(2, monkeypatch):
        yield Compiled(comms[0], gpus, monkeypatch)


def test_words_that_are_not_there_are_refused(compiled, monkeypatch):
    """Whatever Python gave: nothing is written beside the parameter."""
    comm = compiled.comm
    for count in (1000, 1002):
        comm.all_reduce(x(count))
    recounter, honest = compiled.last.recounter, compiled.last.recounter.recounts.table()
    call, nbytes = ("all_reduce", x(1000), None, "sum", 0), (4000, 0)
    compiled.known.clear()
    size, number_at = len(recounter.launchable.parameter.words), recounter.number_at

    def add(table: Any, at: int | None = None) -> None:
        recounter.recounts = SimpleNamespace(table=lambda: table)
        monkeypatch.setattr(recounter, "number_at", recounter.number_at if at is None else at)
        compiled.known.add_like(call, recounter, (0, 0, 0, 0), nbytes, 1000)

    layout, lines, grid, places, counts, users, slots, fixed, given = honest
    wrong: list[Any] = [
        ((0, 1), *honest[1:]),
        ((1, 0), *honest[1:]),
        (layout, (0, *lines[1:]), *honest[2:]),
        (layout, (*lines[:2], 64, *lines[3:]), *honest[2:]),
        (layout, lines, (*grid[:3], ()), *honest[3:]),
        (layout, lines, (*grid[:3], (0,)), *honest[3:]),
        (layout, lines, (*grid[:3], (1,) * 9), *honest[3:]),
        (*honest[:4], ((size, 0),), *honest[5:]),
        (*honest[:4], ((-1, 0),), *honest[5:]),
        (*honest[:4], ((0, len(places)),), *honest[5:]),
        (*honest[:5], ((0, 2, 0, 0),), *honest[6:]),
        (*honest[:5], ((0, 0, -1, 0),), *honest[6:]),
        (*honest[:5], ((0, 0, 0, -2),), *honest[6:]),
        (*honest[:6], ((size, 0, 0),), fixed, given),
        (*honest[:7], ((0, 4, 0),), given),
        honest[:8],
    ]
    for table in wrong:
        with pytest.raises((ValueError, IndexError, TypeError)):
            add(table)
    with pytest.raises(IndexError, match="no such word"):
        add(honest, at=size)
    add((*honest[:3], (0,) * 257, *honest[4:]), number_at)  # of many ranks: it is Python's
    assert compiled.known._launches.likes == 0
    add(honest, number_at)
    assert compiled.known._launches.likes == 1, "what is honest is taken"
    assert (counts, users, slots) != ((), (), ())


def random_recounts(chance: random.Random, collective: Any, words: array[int]) -> LLRecounts:
    """Some words of a parameter, of any layout and grid."""
    chunks, item = chance.randrange(1, 9), dtype_of(chance.choice(["int8", "float32", "float64"]))
    layout = Layout(replace(collective, chunks=chunks), (1,), align=chance.choice([1, 2, 16]))
    free = [*range(5, len(words))]
    chance.shuffle(free)
    where, nplaces = free.pop, chance.randrange(1, 7)
    sent = [(Buffer.INPUT, 0, chance.randrange(3 * chunks)) for _ in range(nplaces)]

    def place() -> int:
        return chance.randrange(nplaces)

    widths = tuple(sorted(chance.sample(range(32, 512, 32), chance.randrange(1, 5))))
    return LLRecounts(
        words,
        (),
        tuple(sent),
        tuple((where(), place()) for _ in range(4)),
        tuple((where(), place() % 2, place(), chance.choice([-1, place()])) for _ in range(5)),
        tuple((where(), chance.getrandbits(63), chance.randrange(9)) for _ in range(3)),
        tuple((where(), chance.randrange(2), chance.randrange(-64, 64)) for _ in range(3)),
        layout,
        chunks == 1,
        Buffer.OUTPUT,
        LLLayout(item, chance.choice([1, 8])),
        item.itemsize,
        chance.choice([16, 32]),
        (1 << 32, 1 << 32),
        chance.random() < 0.5,
        LLGrid(chance.choice([2, 72, 132]), chance.choice([1, 64]), widths, 32),
    )


def test_any_words_are_written_as_python_writes_them(compiled):
    """Of random layouts, grids and words, which no plan of today may have."""
    comm, chance, made = compiled.comm, random.Random(3), 0
    comm.all_reduce(x(8))
    collective, records = compiled.last.choice.layout.collective, compiled.rank.path.records
    weak = list[Any]()
    for _ in range(400):
        kernel = Kernel(array("Q", [chance.getrandbits(64) for _ in range(40)]))
        recounts, each = random_recounts(chance, collective, kernel.parameter.words), 4
        least, size = 1 + chance.randrange(60), 4 * chance.randrange(60)
        longest, sizes = range(least, least + 100), range(size, size + 1000)
        call = SimpleNamespace(signature=chance.getrandbits(32), number=chance.getrandbits(20))
        call.slot = call.number % len(records)
        records[call.slot] = call.number
        begun = list[tuple[int, ...]]()

        def begin(*given: int, begun: Any = begun, call: Any = call) -> object:
            begun.append(given)
            return call

        recounter: Any = SimpleNamespace(
            taken=0, alike=SimpleNamespace(longest=longest), recounts=recounts, sizes=sizes,
            before=SimpleNamespace(timeout=chance.random(), large=False), each=each,
            begin_new=begin, launchable=kernel, number_at=4,
        )  # fmt: skip
        weak += weakref.ref(begin), weakref.ref(kernel)
        compiled.known.clear()
        given = "all_reduce", x(100), None, "sum", 0
        compiled.known.add_like(given, recounter, (0, 0, 0, 0), (400, 0), 100)
        ends = [
            end for edge in (least, least + 100) for end in range(edge - 2, edge + 2) if end > 0
        ]
        for count in [1, *ends, *(chance.randrange(1, 400) for _ in range(5))]:
            placed, at = recounts.placed(count), 8 * chance.randrange(1 << 20, 1 << 30)
            runs = placed is not None and count in longest and each * count in sizes
            runs = runs and count % 2 == 0  # else it ends in half a word, and that one did not
            words = kernel.parameter.words[:]
            assert compiled.known.make(*given[:1], x(count, at), *given[2:]) == runs
            if placed is None or not runs:
                assert kernel.parameter.words == words
                continue
            made += 1
            placed.write(words, (at, at, 0, 0))
            sign(words, 4, call.signature, call.number)
            words[TIMEOUT_WORD] = nanoseconds(recounter.before.timeout)
            _, blocks, threads = placed.grid
            assert kernel.noted[-1] == ((blocks, threads), words)
            assert begun[-1] == (count, blocks, threads)
            assert compiled.rank.errors.last is call
    assert made > 300
    compiled.known.clear()
    del begin, recounter, kernel, recounts
    gc.collect()
    assert {each() for each in weak} == {None}, "what was known is let go"
