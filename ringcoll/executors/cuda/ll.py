"""Protocols LL and LL128: a program whose signals ride in the data, as source text and words.

The source text depends on how many sources and destinations a row has and where each lies; sizes
and addresses are words. A *batch* is several rows of one such shape, none of which depends on
another: their lines are polled together. See ``kernels/ll.cuh``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ringcoll.dtypes import DType, ReduceOp
from ringcoll.encode import Program, Row
from ringcoll.errors import LaunchRefused
from ringcoll.executors.cuda.ll_layout import LLLayout, Storage
from ringcoll.executors.cuda.params import (
    Addresses,
    Body,
    GenericForm,
    compared_ranks,
    padded,
)
from ringcoll.executors.cuda.source import elements_word, kernel_text, names_of
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.labels import Label
from ringcoll.launch import Layout, Protocol
from ringcoll.plan import Buffer, Chunk

WORKERS, SYNC_THREADS = 480, 32
"""Threads a CUDA block that move data. With the synchronizing warp they are 16 warps of 128
registers a thread; 17 would get 96 and spill."""

POLLED = 16
"""Lines that a thread polls at once, in 64 registers."""

CHUNKS = 32
"""Sources or destinations of a step, two bits each in a 64-bit constant."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive rows of one shape, none of which depends on another."""

    rows: int
    reduces: bool
    final: bool
    raw: int  # bit k: source k is a contribution yet to be loaded
    srcs: tuple[Storage, ...]
    dsts: tuple[Storage, ...]
    owned: bool = False

    @property
    def words(self) -> int:
        """Words of all its rows: a count, the sources, the destinations, the sources' owners."""
        owners = len(self.srcs) if self.owned else 0
        return self.rows * (1 + len(self.srcs) + len(self.dsts) + owners)


@lru_cache(maxsize=1024)
def batches(
    program: Program, rank: int, ll_layout: LLLayout, *, scales: bool = False
) -> tuple[Batch, ...]:
    """The rows of a rank as batches, in order; ``scales``: every rank has a factor."""
    cell = program.collective.cell
    found: list[Batch] = []
    fresh: set[tuple[int, str, int]] = set()  # cells that the last batch writes
    for row, alone in zip(
        rows_of(program, rank), _alone(program, rank, ll_layout.dtype, scales=scales), strict=True
    ):
        lines = sum(map(ll_layout.lines, alone.srcs))
        last = found[-1] if found else None
        if (
            last is not None
            and replace(last, rows=1) == alone
            and not alone.reduces
            and (last.rows + 1) * max(1, lines) <= POLLED
            and not fresh.intersection(map(cell, row.srcs))
        ):
            found[-1] = replace(last, rows=last.rows + 1)
        else:
            fresh = set()
            found.append(alone)
        fresh.update(map(cell, row.dsts))
    return tuple(found)


def rows_of(program: Program, rank: int) -> tuple[Row, ...]:
    """The rows of the one block of a rank; none if it has nothing to do."""
    blocks = program.of(rank)
    return blocks[0].rows if blocks else ()


def _alone(program: Program, rank: int, dtype: DType, *, scales: bool) -> Iterator[Batch]:
    """Each row as a batch of one."""
    collective = program.collective
    kept: set[tuple[int, str, int]] = set()
    for row in rows_of(program, rank):
        label = row.labels
        if max(len(row.srcs), len(row.dsts)) > CHUNKS:
            raise LaunchRefused(
                f"{collective}: a step of {len(row.srcs)} sources and {len(row.dsts)} "
                f"destinations; LL allows {CHUNKS} of each: use protocol='Simple'"
            )
        srcs = tuple(
            Storage.KEPT
            if not label.reduces and collective.cell(src) in kept
            else _storage_of(src, k, dtype)
            for src, k in zip(row.srcs, label.srcs, strict=True)
        )
        dsts = tuple(_storage_of(dst, label.dst, dtype) for dst in row.dsts)
        raw = sum(1 << k for k, kind in enumerate(label.srcs) if kind is Label.RAW)
        owned = scales and label.reduces
        yield Batch(1, label.reduces, label.dst is Label.FINAL, raw, srcs, dsts, owned)
        written = set(map(collective.cell, row.dsts))
        if label.reduces:
            kept = written if label.dst is Label.FINAL else set()
        else:
            kept -= written


def _storage_of(chunk: Chunk, label: Label, dtype: DType) -> Storage:
    if chunk.buffer is not Buffer.SCRATCH:
        return Storage.USER
    wide = label is Label.PARTIAL and dtype.partial != dtype.numpy
    return Storage.PARTIAL if wide else Storage.LINES


@lru_cache(maxsize=512)
def pack_bytes(program: Program, ll_layout: LLLayout) -> int:
    """Bytes of a pack of a SCRATCH chunk, for the widest type that the program keeps there."""
    storages = {
        _storage_of(chunk, label, ll_layout.dtype)
        for block in program.programs
        for row in block.rows
        for chunk, label in zip(
            (*row.srcs, *row.dsts),
            (*row.labels.srcs, *(row.labels.dst for _ in row.dsts)),
            strict=True,
        )
    }
    return ll_layout.pack_bytes(storages)


def ll_scratch_bytes(program: Program, layout: Layout, ll_layout: LLLayout) -> int:
    """Bytes of lines that the program needs on a rank, for each half."""
    return program.scratch * ll_layout.packs(layout.width()) * pack_bytes(program, ll_layout)


def ll_body(
    program: Program,
    layout: Layout,
    dtype: DType,
    op: ReduceOp | None,
    workspace: Workspace,
    local: Sequence[Addresses],
    protocol: Protocol,
) -> Body:
    """Text and words for the ranks of one launch by a protocol that has lines."""
    lanes = protocol.lanes
    ll_layout = LLLayout(dtype, lanes)
    need = ll_scratch_bytes(program, layout, ll_layout)
    first, half = workspace.region(protocol.name)
    if need > half:
        raise LaunchRefused(
            f"{program.collective}: needs {need} bytes of lines, the limit is {half}; use "
            f"protocol='Simple', which carries messages of any size"
        )
    scales = op is not None and op.scales
    of_rank = [batches(program, at.rank, ll_layout, scales=scales) for at in local]
    programs = tuple(dict.fromkeys(of_rank))
    packs, words, whole = _words(program, layout, ll_layout, first, local, scales=scales)
    constants = (
        ("RANKS", program.collective.nranks),
        ("LOCAL", len(local)),
        ("WORDS", len(words[0])),
        ("WHOLE", int(whole)),
        ("LANES", lanes),
    )
    text = _text(names_of(dtype, op), constants, programs)
    numbers = tuple(programs.index(found) for found in of_rank)
    compared = compared_ranks(program, local)
    generic = GenericForm(lanes, elements_word(dtype, op), _shapes(of_rank[0]))
    return Body(text, words, numbers, packs, half, compared, generic, whole)


def _words(
    program: Program,
    layout: Layout,
    ll_layout: LLLayout,
    first: int,
    local: Sequence[Addresses],
    *,
    scales: bool,
) -> tuple[int, tuple[tuple[int, ...], ...], bool]:
    """Packs, the words of each rank, row by row (:attr:`Batch.words`), and whether all are whole.

    They are if every chunk in the user's memory begins at 8 bytes and ends with 8 whole ones.
    ``first``: of the region.
    """
    packs, item, whole = ll_layout.packs(layout.width()), ll_layout.dtype.itemsize, True
    width = packs * pack_bytes(program, ll_layout)
    words: list[list[int]] = []
    for at in local:
        found: list[int] = []
        for row in rows_of(program, at.rank):
            labels = row.labels
            extent = labels.extent
            count = layout.span(extent.buffer, extent.rank, extent.index)[1] if extent else 0
            found.append(count)
            for chunk in (*row.srcs, *row.dsts):
                buffer = chunk.buffer
                if buffer is Buffer.SCRATCH:
                    address = at.workspaces[chunk.rank] + first + chunk.index * width
                else:
                    offset, _ = layout.span(buffer, chunk.rank, chunk.index)
                    address = at.user[buffer is Buffer.OUTPUT] + offset * item
                    whole = whole and not (count * item | address) & 7
                found.append(address)
            if scales and labels.reduces:
                found.extend(max(owner, 0) for owner in labels.owners)
        words.append(found)
    return packs, padded(words), whole


@lru_cache(maxsize=512)
def _text(
    names: tuple[str, str],
    values: tuple[tuple[str, int], ...],
    programs: tuple[tuple[Batch, ...], ...],
) -> str:
    (dtype, op), constants = names, dict(values)
    lines = ["using namespace rc::ll;", f"using Type = {dtype};", f"using Op = {op}<Type>;"]
    for number, program in enumerate(programs):
        lines += [
            f"struct Program{number} {{",
            "    using Op = ::Op;",
            f"    using First = {_type(program[0]) if program else 'Nothing<Type>'};",
            "    RC_DEVICE static void rest([[maybe_unused]] Thread<Type>& thread) {",
            *(f"        {text}" for text in _calls(program)),
            "    }",
            "};",
        ]
    cases = [
        f"        case {number}: return run<Type, Program{number}>(args, local);"
        for number in range(len(programs))
    ]
    # With one rank the compiler knows where the parameters lie.
    which = "local_index()" if constants["LOCAL"] > 1 else "0"
    body = ["    switch (local.program) {", *cases, "    }"]
    if len(programs) == 1:
        body = ["    run<Type, Program0>(args, local);"]
    run = "\n".join([f"const Local& local = args.local[{which}];", *body])
    return kernel_text("ll", constants, f"RC_KERNEL({WORKERS} + SYNC_THREADS)", run, lines)


def _calls(program: Sequence[Batch]) -> Iterator[str]:
    """The batches after the first."""
    first = program[0].words if program else 0
    for step, batch in enumerate(program[1:], 1):
        yield f"{_type(batch)}::run(thread, {first}, {step});"
        first += batch.words


def _type(batch: Batch) -> str:
    flags = f"{str(batch.reduces).lower()}, {str(batch.final).lower()}, {batch.raw:#x}"
    counts = f"{batch.rows}, {len(batch.srcs)}, {len(batch.dsts)}"
    kinds = f"Kinds<{_packed(batch.srcs):#x}>, Kinds<{_packed(batch.dsts):#x}>"
    return f"Batch<Type, Op, {flags}, {counts}, {kinds}>"


def _packed(kinds: Sequence[Storage]) -> int:
    return sum(kind << 2 * k for k, kind in enumerate(kinds))


def _shapes(program: Sequence[Batch]) -> tuple[int, ...]:
    """The batches as words of a generic kernel: ``Shape`` of ``kernels/generic_ll.cuh``."""
    words: list[int] = []
    for batch in reversed(program):
        counts = batch.rows | len(batch.srcs) << 8 | len(batch.dsts) << 16
        flags = batch.reduces << 24 | batch.final << 25 | batch.raw << 32
        words += (counts | flags, _packed(batch.srcs), _packed(batch.dsts))
    return (*words, len(program))
