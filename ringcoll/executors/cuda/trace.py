"""Traces: the rows that kernels have executed, from source texts that keep a record.

A record is device memory: a head, then an entry of each executed row. Several CUDA blocks (Simple)
or threads (LL) execute the same row, each on its part of the elements; the trace of a block of the
plan is their sum. See ``kernels/trace.cuh``.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ringcoll.cuda.device import on
from ringcoll.cuda.memory import allocate
from ringcoll.dtypes import DType
from ringcoll.encode import Program
from ringcoll.errors import OutOfMemory, PlanError
from ringcoll.executors.binding import TraceEntry
from ringcoll.executors.cuda.ll import batches
from ringcoll.executors.cuda.ll_layout import LLLayout
from ringcoll.executors.cuda.params import Addresses, Body, padded
from ringcoll.launch import Launch
from ringcoll.plan import Block

if TYPE_CHECKING:
    from ringcoll.tuner.choice import Choice

HEAD = np.dtype([("rows", "<u8"), ("room", "<u8")])
"""``Record`` of ``kernels/trace.cuh``."""
ROW = np.dtype([("block", "<u4"), ("step", "<u4"), ("at", "<u8"), ("count", "<u8")])
"""``Executed`` of ``kernels/trace.cuh``."""
_HELLO = 0xFFFFFFFF
_BYTES = 32 << 20
"""Room for 1.4 million rows: by LL, those of 10 steps of a call of 1 MiB."""


@dataclass(frozen=True, slots=True)
class Executed:
    """A row that a part of a block has executed."""

    block: Block
    part: int  # which of the CUDA blocks that share its work; with LL the pack
    step: int
    at: int
    count: int  # elements that this part has moved


def traced(body: Body, local: Sequence[Addresses]) -> Body:
    """The body with a record; the same body if no rank has one."""
    if not any(at.trace for at in local):
        return body
    number = len(body.words[0])
    words = padded([(*row, at.trace) for row, at in zip(body.words, local, strict=True)])
    lines = f"#define RC_WORDS {len(words[0])}\n#define RC_TRACE {number}\n"
    text = re.sub(r"#define RC_WORDS \d+\n", lines, body.text, count=1)
    return replace(body, text=text, words=words)


def head(nbytes: int) -> bytes:
    """The head of an empty record of so many bytes."""
    return np.array((0, (nbytes - HEAD.itemsize) // ROW.itemsize), HEAD).tobytes()


def ran(record: bytes, rank: int) -> int:
    """The index of the program that all CUDA blocks have run; 1 is the direct one of two."""
    found = {at for _, step, at, _ in _rows(record) if step == _HELLO}
    if len(found) > 1:
        raise PlanError(f"rank {rank}: its CUDA blocks have run programs {sorted(found)}")
    return next(iter(found), 0)


def executed(
    record: bytes, rank: int, program: Program, launch: Launch, ll_layout: LLLayout, replicas: int
) -> list[Executed]:
    """The rows of one call of a rank, in the order in which they ended."""
    rows, room = np.frombuffer(record, HEAD, 1)[0].tolist()
    if rows > room:
        raise OutOfMemory(
            f"the trace of rank {rank} has room for {room} rows, {rows} were executed: make "
            f"smaller calls, and read the trace after each"
        )
    found = _rows(record)
    if launch.in_band:
        return _rows_of_ll(found, rank, program, ll_layout)
    return _rows_of_simple(found, rank, program, launch, replicas)


Raw = Sequence[tuple[int, int, int, int]]


def _rows(record: bytes) -> Raw:
    """Block, step, slice or pack, and elements of the rows in the record."""
    rows, room = np.frombuffer(record, HEAD, 1)[0].tolist()
    found: Raw = np.frombuffer(record, ROW, min(rows, room), HEAD.itemsize).tolist()
    return found


def _rows_of_ll(found: Raw, rank: int, program: Program, ll_layout: LLLayout) -> list[Executed]:
    """LL kernels record a row's batch and its number there, and the pack instead of the slice."""
    sizes = [batch.rows for batch in batches(program, rank, ll_layout)]
    first = [0, *itertools.accumulate(sizes)]
    return [
        Executed(mine.block, place, first[step >> 16] + (step & 0xFFFF), 0, count)
        for mine in program.of(rank)  # one, or none that has nothing to do
        for _, step, place, count in found
    ]


def _rows_of_simple(
    found: Raw, rank: int, program: Program, launch: Launch, replicas: int
) -> list[Executed]:
    """Simple kernels number the rows of a slice; the exit signals and waits come after them."""
    blocks = program.of(rank)
    rows: list[Executed] = []
    for number, step, at, count in found:
        mine, part = blocks[number // replicas], number % replicas
        entry = int(bool(mine.entry))
        if step == _HELLO:
            # Every block reads all hellos; the plan has an entry row only where it is needed.
            if entry:
                rows.append(Executed(mine.block, part, 0, 0, count))
            continue
        behind = step - len(mine.rows)
        if behind < 0:
            step += entry + at * len(mine.rows)
        else:
            step = entry + launch.slices * len(mine.rows) + behind * bool(mine.exit_signals)
        rows.append(Executed(mine.block, part, step, at, count))
    return rows


def summed(rows: Sequence[Executed]) -> list[TraceEntry]:
    """The trace of each block: the elements of all parts, in the order that all have kept."""
    parts: dict[tuple[Block, int], list[Executed]] = defaultdict(list)
    for row in rows:
        parts[row.block, row.part].append(row)
    totals: dict[Block, list[TraceEntry]] = {}
    for (block, part), own in parts.items():
        seen = [(block, row.step, row.at, row.count) for row in own]
        total = totals.setdefault(block, [(*entry[:3], 0) for entry in seen])
        if [entry[:3] for entry in seen] != [entry[:3] for entry in total]:
            raise PlanError(
                f"{block}: part {part} executed {[entry[1:3] for entry in seen]}, another part "
                f"{[entry[1:3] for entry in total]} (step and slice of each row)"
            )
        totals[block] = [
            (*entry[:3], entry[3] + more[3]) for entry, more in zip(total, seen, strict=True)
        ]
    return [entry for total in totals.values() for entry in total]


class Recorder:
    """The record of one rank, in the memory of its GPU."""

    def __init__(self, ordinal: int, nbytes: int = _BYTES) -> None:
        self._memory = allocate(ordinal, nbytes, what="a rank's trace")
        self._clear()

    @property
    def address(self) -> int:
        """Its device address."""
        return self._memory.pointer

    def rows(self, rank: int, choice: Choice, dtype: DType) -> list[TraceEntry]:
        """The rows of the one call that has ended since the last reading, which clears them."""
        number, room = np.frombuffer(self._read(HEAD.itemsize), HEAD)[0].tolist()
        record = self._read(HEAD.itemsize + min(number, room) * ROW.itemsize)
        self._clear()
        found = choice.variants[ran(record, rank)]
        ll_layout = LLLayout(dtype, found.launch.lanes or 1)
        return summed(
            executed(record, rank, found.program, found.launch, ll_layout, found.grid.replicas)
        )

    def close(self) -> None:
        """Free the memory; no kernel may use it any more."""
        self._memory.free()

    def _read(self, nbytes: int) -> bytes:
        found = np.empty(nbytes, np.uint8)
        with on(self._memory.ordinal) as cuda:
            cuda.memcpy(found.ctypes.data, self.address, nbytes, cuda.memcpyDefault)
        return found.tobytes()

    def _clear(self) -> None:
        empty = np.frombuffer(head(self._memory.nbytes), np.uint8)
        with on(self._memory.ordinal) as cuda:
            cuda.memcpy(self.address, empty.ctypes.data, empty.size, cuda.memcpyDefault)
