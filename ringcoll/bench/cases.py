"""What is measured: a collective on so many bytes, by the size rules of nccl-tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ringcoll.algorithms import Builder
from ringcoll.algorithms.load import find, is_own
from ringcoll.bench.settings import Settings
from ringcoll.collectives import COLLECTIVES, Kind
from ringcoll.dtypes import DTYPES, OPS, DType, ReduceOp, dtype_of, op_of, premul_sum
from ringcoll.errors import ArgumentError, UsageError
from ringcoll.model.closed_form import bus_factor

# nccl-tests spells some of the names in its own way.
_TYPE_NAMES = {
    "float16": "half",
    "float32": "float",
    "float64": "double",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
    "complex64": "cfloat",
    "complex128": "cdouble",
}
_PREMUL = "premul_sum"
_OP_ALIASES = {"mulsum": _PREMUL}
_OP_NAMES = {_PREMUL: "mulsum"}


@dataclass(frozen=True, slots=True)
class Section:
    """What stays the same while sizes are swept: one table. None: the library's choice.

    "sendrecv" is a ring: to the next rank, from the last one. ``root`` is -1 where there is none.
    """

    collective: str
    nranks: int
    dtype: DType
    op: str | None = None
    root: int = -1
    algorithm: str | None = None
    slices: int | None = None

    @property
    def kind(self) -> Kind:
        """How many segments the collective's buffers hold."""
        return COLLECTIVES["send" if self.collective == "sendrecv" else self.collective]

    @property
    def type_name(self) -> str:
        """The dtype as nccl-tests spells it."""
        return _TYPE_NAMES.get(self.dtype.name, self.dtype.name)

    @property
    def op_name(self) -> str:
        """The operator as nccl-tests spells it."""
        return "none" if self.op is None else _OP_NAMES.get(self.op, self.op)

    @property
    def bus_factor(self) -> float:
        """What busbw is of algbw."""
        return bus_factor(self.collective, self.nranks)

    def operator(self, rank: int) -> ReduceOp:
        """The operator as ``rank`` passes it: premul_sum has a factor for each rank."""
        if self.op == _PREMUL:
            return premul_sum(rank % 3 + 1)
        return op_of(self.op)

    def case(self, nbytes: int) -> Case:
        """The case of at most ``nbytes`` bytes."""
        elements = nbytes // self.dtype.itemsize
        wide = "all" in (self.kind.input, self.kind.output)
        count = elements // self.nranks if wide else elements
        if self.collective in ("all_gather", "reduce_scatter"):
            # nccl-tests: whole 16 bytes a rank.
            per_line = max(1, 16 // self.dtype.itemsize)
            count -= count % per_line
        return Case(self, 0 if self.collective == "barrier" else count)


@dataclass(frozen=True, slots=True)
class Case:
    """One row of a table. ``count`` is elements a segment."""

    section: Section
    count: int

    @property
    def elements(self) -> int:
        """Elements of the larger of the two buffers of a rank that has both."""
        kind = self.section.kind
        return self.count * (self.section.nranks if "all" in (kind.input, kind.output) else 1)

    @property
    def nbytes(self) -> int:
        """The size in nccl-tests' sense."""
        return self.elements * self.section.dtype.itemsize

    def algbw(self, seconds: float) -> float:
        """GB/s (10⁹) of the size."""
        return self.nbytes / seconds / 1e9 if seconds > 0 else 0.0

    def busbw(self, seconds: float) -> float:
        """GB/s that links must have carried, whatever the number of ranks."""
        return self.algbw(seconds) * self.section.bus_factor


def sizes(settings: Settings) -> Iterator[int]:
    """Every size of the sweep, in bytes."""
    nbytes = settings.min_bytes
    while nbytes <= settings.max_bytes:
        yield nbytes
        if settings.step_factor > 1 and nbytes:
            nbytes *= settings.step_factor
        else:
            nbytes += max(1, settings.step_bytes)


def check(settings: Settings, nranks: int | None) -> None:
    """Refuse what no rank could measure, and run no file of a person; None ranks: not yet known."""
    named = tuple(name for name in settings.algorithms if name is not None and not is_own(name))
    roots = (0,) if nranks is None else settings.roots
    sections(replace(settings, algorithms=named or (None,), roots=roots), nranks or 1)


def sections(settings: Settings, nranks: int) -> tuple[Section, ...]:
    """Every table, in the order of nccl-tests: types, then operators, then roots."""
    for name in filter(None, settings.algorithms):
        find_of(settings.collective, name)
    kind = Section(settings.collective, nranks, DTYPES[0]).kind
    if settings.collective == "barrier":
        dtypes: tuple[DType, ...] = (dtype_of("uint8"),)
    elif settings.dtypes == ("all",):
        dtypes = DTYPES
    else:
        dtypes = tuple(_dtype(name) for name in settings.dtypes)
    roots: tuple[int, ...] = (-1,)
    if kind.has_root:
        roots = tuple(range(nranks)) if settings.roots is None else settings.roots
        if max(roots) >= nranks:
            raise ArgumentError(f"-r {max(roots)}: name a root from 0 to {nranks - 1}")
    made = tuple(
        Section(settings.collective, nranks, dtype, op, root, algorithm, slices)
        for algorithm in settings.algorithms
        for slices in settings.slices
        for dtype in dtypes
        for op in _ops(settings, dtype, kind)
        for root in roots
    )
    if not made:
        raise ArgumentError(
            f"-o {','.join(settings.ops)}: no operator takes the types of -d; leave one of them out"
        )
    return made


def find_of(collective: str, algorithm: str) -> str | Builder:
    """An algorithm by its name, or a user's function by FILE.py:FUNCTION or MODULE:FUNCTION."""
    return find("send" if collective == "sendrecv" else collective, algorithm)


def _dtype(name: str) -> DType:
    try:
        return dtype_of(name)
    except UsageError as error:
        raise ArgumentError(f"-d {name}: {error}") from None


def _op(name: str) -> ReduceOp:
    try:
        return premul_sum(1) if name == _PREMUL else op_of(name)
    except UsageError as error:
        raise ArgumentError(f"-o {name}: {error}") from None


def _ops(settings: Settings, dtype: DType, kind: Kind) -> tuple[str | None, ...]:
    if not kind.reduces:
        return (None,)
    every = settings.ops == ("all",)
    names = (*OPS, _PREMUL) if every else [_OP_ALIASES.get(n, n) for n in settings.ops]
    legal = []
    for name in names:
        op = _op(name)
        try:
            op.check(dtype)
            if kind.prefix and op.finishes:
                raise ArgumentError(f"-o {name}: {kind.name} has no {name}; name another operator")
        except ArgumentError:
            # With "all" of either, what makes no sense is left out.
            if every or settings.dtypes == ("all",):
                continue
            raise
        legal.append(name)
    return tuple(legal)
