"""One call of every rank: its buffers, poisoned and guarded, and what plain numpy expects of it.

The buffers of a case are cut out of two arrays a rank, one symmetric and one plain, so that many
cases run in one communicator. Around each buffer lie guard bytes. Nothing here knows of plans.
"""

from __future__ import annotations

import functools
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringcoll.dtypes import OPS, ReduceOp, dtype_of, premul_sum

GUARD = 64
POOL = 1 << 19
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan")
SCANS = ("scan", "exscan")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
# Segments that a rank sends and receives: "n" is one for each rank.
SHAPES = {
    "all_reduce": (1, 1),
    "broadcast": (1, 1),
    "reduce": (1, 1),
    "all_gather": (1, "n"),
    "reduce_scatter": ("n", 1),
    "all_to_all": ("n", "n"),
    "gather": (1, "n"),
    "scatter": ("n", 1),
    "scan": (1, 1),
    "exscan": (1, 1),
}


class Wrong(AssertionError):
    """A rank's memory is not what it should be; raised also where ``assert`` is off."""


def per_rank(value: Any, rank: int) -> Any:
    """A field of a case: one value for all ranks, or a tuple of one for each."""
    return value[rank] if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Case:
    """A call that every rank makes. Fields of two types may be a tuple with a value a rank.

    Args:
        collective: its name.
        count: elements a segment.
        dtype: a name of the table of dtypes.
        op: a name, or "premul_sum" with ``scalars``.
        root: of rooted collectives.
        in_place: bool, or one a rank.
        symmetric: whether the buffers are in symmetric memory: bool, or one a rank.
        offset: bytes by which the buffers are shifted: int, or one a rank.
        scalars: premul_sum's factor of every rank.
        options: of the call.
        wild: values that show in which order they are combined; else every order gives one result.
        seed: which values.

    """

    collective: str
    count: int
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    in_place: Any = False
    symmetric: Any = True
    offset: Any = 0
    scalars: tuple[complex, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    wild: bool = False
    seed: int = 0

    def sizes(self, nranks: int) -> tuple[int, int]:
        """Elements that a rank sends and receives."""
        send, recv = (nranks if s == "n" else 1 for s in SHAPES[self.collective])
        return send * self.count, recv * self.count

    def has(self, side: str, rank: int) -> bool:
        """Whether a rank has a buffer to send, or to receive into."""
        if (self.collective, side, rank) == ("exscan", "recv", 0):
            return False
        only_root = {"send": ("broadcast", "scatter"), "recv": ("reduce", "gather")}[side]
        return self.collective not in only_root or rank == self.root

    def operator(self, rank: int) -> ReduceOp | str:
        return premul_sum(self.scalars[rank]) if self.op == "premul_sum" else self.op


class Memory:
    """A rank's bytes, out of which the buffers of its cases are cut."""

    def __init__(self, comm: Any, nbytes: int = 2 << 20) -> None:
        self.half = nbytes
        self.symmetric = comm.empty(2 * nbytes, "uint8")
        self.plain = np.empty(2 * nbytes + 64, np.uint8)
        skip = -self.plain.ctypes.data % 64
        self.plain = self.plain[skip : skip + 2 * nbytes]

    def cut(self, symmetric: bool, second: bool, offset: int, nbytes: int) -> np.ndarray:
        """A buffer with its guards."""
        memory = self.symmetric if symmetric else self.plain
        start = self.half * second + offset
        if offset + nbytes + 2 * GUARD > self.half:
            raise Wrong(f"{nbytes} bytes at {offset}: the cases' memory is too small")
        return memory[start : start + nbytes + 2 * GUARD]


@functools.cache
def pool(name: str, kind: str) -> np.ndarray:
    """Random values of a dtype.

    "wild": anything, NaN and infinity too. "small": integers whose sums are exact in the
    accumulator, "unit": powers of two whose products are; every order gives the same bits.
    """
    dtype = dtype_of(name)
    rng = np.random.default_rng(zlib.crc32(f"{name} {kind}".encode()))
    if dtype.category == "bool":
        return rng.integers(0, 2, POOL).astype(bool)
    if dtype.category == "int":
        info = np.iinfo(dtype.numpy)
        return rng.integers(info.min, info.max, POOL, dtype.numpy, endpoint=True)
    parts = 2 if dtype.category == "complex" else 1
    if kind == "wild":
        values = rng.standard_normal(parts * POOL) * 2.0 ** rng.integers(-3, 4, parts * POOL)
        values[rng.integers(0, values.size, values.size // 8)] = 0
        for special in (np.nan, np.inf, -np.inf):
            values[rng.integers(0, values.size, values.size // 64)] = special
    elif kind == "unit" and parts == 1:
        values = rng.choice([-2, -1, 0.5, 1, 2], POOL)
    else:
        top = 3 if kind == "unit" else 8 if dtype.itemsize == 1 else 500
        values = rng.integers(-top, top + 1, parts * POOL)
    if parts == 2:
        return values.astype(f"f{dtype.itemsize // 2}").view(dtype.numpy)
    return values.astype(dtype.numpy)


def contribution(case: Case, rank: int, nranks: int) -> np.ndarray:
    """What a rank sends: a piece of the pool that depends on the case and the rank."""
    size = case.sizes(nranks)[0]
    held = pool(case.dtype, "wild" if case.wild else "unit" if case.op == "prod" else "small")
    start = zlib.crc32(f"{case.seed} {case.collective} {case.count} {rank}".encode())
    return held[start % (held.size - size) :][:size]


def expected(case: Case, rank: int, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """What a rank receives, by plain numpy."""
    n, count = len(inputs), case.count
    match case.collective:
        case "all_reduce" | "reduce":
            return reduced(case, inputs)
        case "reduce_scatter":
            return reduced(case, [i[rank * count : (rank + 1) * count] for i in inputs])
        case "scan" | "exscan":
            return reduced(case, inputs[: rank + (case.collective == "scan")])
        case "broadcast":
            return inputs[case.root]
        case "all_gather" | "gather":
            return np.concatenate(inputs)
        case "scatter":
            return inputs[case.root][rank * count : (rank + 1) * count]
        case "all_to_all":
            return np.concatenate([i[rank * count : (rank + 1) * count] for i in inputs])
    raise Wrong(f"no {case.collective} of {n}")


def reduced(case: Case, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """The left fold in rank order, in the accumulator, rounded once."""
    dtype, n = dtype_of(case.dtype), len(inputs)
    wide = dtype.accumulator
    with np.errstate(all="ignore"):
        terms = [i.astype(wide) for i in inputs]
        if case.op in ("land", "lor"):
            terms = [t != 0 for t in terms]
        if case.op == "premul_sum":
            pairs = zip(terms, case.scalars[:n], strict=True)
            terms = [product(t, in_dtype(s, wide)) for t, s in pairs]
        combine = product if case.op == "prod" else FOLD[case.op]
        if dtype.category == "bool":
            combine = BOOL_FOLD[case.op]
        total = functools.reduce(combine, terms)
        if case.op == "avg" and dtype.category == "int":
            # Toward zero, in Python's integers.
            total = np.array([abs(int(v)) // n * (1 if v >= 0 else -1) for v in total], wide)
        elif case.op == "avg":
            parts = total.real.dtype
            total = (total.view(parts) / np.asarray(n, parts)).view(wide)
        return total.astype(dtype.numpy)


def in_dtype(scalar: complex, wide: np.dtype) -> Any:
    """A factor in the accumulator; an integer wraps."""
    if wide.kind in "iu":
        return np.array(int(scalar.real) % (1 << 8 * wide.itemsize), f"u{wide.itemsize}").astype(
            wide
        )
    return np.asarray(scalar, wide)


def product(left: np.ndarray, right: Any) -> np.ndarray:
    """The product; a complex one by the textbook, where numpy's own may fuse operations."""
    if left.dtype.kind != "c":
        return left * right
    out = np.empty_like(left)
    out.real = left.real * right.real - left.imag * right.imag
    out.imag = left.real * right.imag + left.imag * right.real
    return out


FOLD = {
    "sum": np.add,
    "avg": np.add,
    "premul_sum": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "land": np.logical_and,
    "lor": np.logical_or,
}
BOOL_FOLD = {
    **dict.fromkeys(("sum", "max", "bor", "lor"), np.logical_or),
    **dict.fromkeys(("prod", "min", "band", "land"), np.logical_and),
    "bxor": np.logical_xor,
}


def scalars(dtype_name: str, nranks: int, seed: int) -> tuple[complex, ...]:
    """Factors of premul_sum, another one for each rank, in every form that a dtype takes."""
    rng = random.Random(seed)
    whole = [rng.randint(-9, 9) for _ in range(nranks)]
    match dtype_of(dtype_name).category:
        case "int":
            return tuple(whole)
        case "float":
            return tuple(w if rng.random() < 0.5 else w / 4 for w in whole)
        case _:
            return tuple(complex(w, rng.randint(-3, 3)) for w in whole)


def operators(dtype_name: str, collective: str = "all_reduce") -> list[str]:
    """The names of the operators that make sense on a dtype, premul_sum among them."""
    category = dtype_of(dtype_name).category
    whole = [name for name in OPS if not (OPS[name].finishes and collective in SCANS)]
    names = [*whole, "premul_sum"]
    if category == "bool":
        return [name for name in names if name not in ("avg", "premul_sum")]
    if category == "complex":
        return [name for name in names if name in ("sum", "prod", "avg", "premul_sum")]
    if category == "float":
        return [name for name in names if name not in ("band", "bor", "bxor")]
    return names


def same_bits(seen: np.ndarray, wanted: np.ndarray) -> bool:
    """Equal bit for bit; any NaN equals any NaN."""
    if np.array_equal(seen.view(np.uint8), wanted.view(np.uint8)):
        return True
    if seen.dtype.kind in "iub":
        return False
    if seen.dtype.kind == "c":
        width = f"f{seen.dtype.itemsize // 2}"
        return same_bits(seen.view(width), wanted.view(width))
    nans = np.isnan(wanted)
    bits = f"u{seen.dtype.itemsize}"
    alike = seen.view(bits) == wanted.view(bits)
    return bool(np.all(np.where(nans, np.isnan(seen), alike)))


def case_of_zeros(case: Case) -> bool:
    """Whether the sign of a zero depends on the order, though no other bit does."""
    return case.op == "prod" and not case.wild and dtype_of(case.dtype).category == "complex"


def run_case(comm: Any, memory: Memory, case: Case, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """Make a case's call on this rank and check all memory that it may have touched.

    Returns:
        A copy of what the rank received, empty where it receives nothing.

    """
    call = _Call(comm, memory, case, inputs)
    call.make()
    return call.check()


def run_cases(comm: Any, cases: Sequence[Case], nbytes: int = 2 << 20) -> int:
    """All cases, one after the other, in one communicator; how many."""
    memory = Memory(comm, nbytes)
    for case in cases:
        inputs = [contribution(case, rank, comm.nranks) for rank in range(comm.nranks)]
        try:
            run_case(comm, memory, case, inputs)
        except Exception as error:
            raise Wrong(f"rank {comm.rank}, {case}: {type(error).__name__}: {error}") from error
    return len(cases)


class _Call:
    """The buffers of one rank's call, from poison to check."""

    def __init__(self, comm: Any, memory: Memory, case: Case, inputs: Sequence[np.ndarray]) -> None:
        self.comm, self.case, self.inputs = comm, case, inputs
        self.dtype = dtype_of(case.dtype).numpy
        self.rank = rank = comm.rank
        self.in_place = per_rank(case.in_place, rank)
        symmetric, offset = per_rank(case.symmetric, rank), per_rank(case.offset, rank)
        sizes = [size * self.dtype.itemsize for size in case.sizes(comm.nranks)]
        both = case.has("send", rank) and case.has("recv", rank)
        self.alias = both and self.in_place
        self.send_raw = self.recv_raw = None
        if self.alias:
            self.send_raw = self.recv_raw = memory.cut(symmetric, False, offset, max(sizes))
        else:
            if case.has("send", rank):
                self.send_raw = memory.cut(symmetric, False, offset, sizes[0])
            if case.has("recv", rank):
                self.recv_raw = memory.cut(symmetric, True, offset, sizes[1])
        raws = [raw for raw in (self.send_raw, self.recv_raw) if raw is not None]
        for raw in raws:
            raw[...] = 1 + (case.seed + rank) % 255
        self.send = self._array(self.send_raw, sizes[0], sizes[1])
        self.recv = self._array(self.recv_raw, sizes[1], sizes[0])
        if self.send is not None:
            self.send[...] = inputs[rank]
        # What must be there after the call.
        self.wanted = {id(raw): raw.copy() for raw in raws}

    def _array(self, raw: np.ndarray | None, nbytes: int, other: int) -> np.ndarray | None:
        """The elements in a buffer; in place, the smaller is the rank's slot of the larger."""
        if raw is None:
            return None
        start = GUARD + (self.rank * nbytes if self.alias and other > nbytes else 0)
        return raw[start : start + nbytes].view(self.dtype)

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """The call's arguments; where both forms are legal, the seed decides."""
        case, named = self.case, dict(self.case.options)
        send, recv = self.send, self.recv
        if self.alias and case.seed % 2 == 0:
            # In place without saying so: only the larger buffer is given.
            send, recv = (None, recv) if SHAPES[case.collective] == (1, "n") else (send, None)
        if case.collective == "broadcast" and send is None and case.seed % 2 == 0:
            send, recv = recv, None
        positional = [send] if recv is None else [send, recv]
        if case.collective in REDUCING:
            named["op"] = case.operator(self.rank)
        if case.collective in ROOTED:
            named["root"] = case.root
        return positional, named

    def make(self) -> None:
        positional, named = self.arguments()
        if getattr(self.comm, self.case.collective)(*positional, **named) is not None:
            raise Wrong("the call returned something")

    def check(self) -> np.ndarray:
        if self.recv is None or self.recv_raw is None:
            self._unchanged(self.send_raw)
            return np.empty(0, self.dtype)
        wanted = expected(self.case, self.rank, self.inputs)
        seen = self.recv.copy()
        if case_of_zeros(self.case):
            seen, wanted = seen + 0, wanted + 0
        if not same_bits(seen, wanted):
            at = int(np.argmax(seen.view(f"V{seen.itemsize}") != wanted.view(f"V{seen.itemsize}")))
            raise Wrong(f"element {at}: seen {seen[at]}, wanted {wanted[at]} ({seen.size} in all)")
        received = self.recv.copy()
        # The result is right: everything else must be as it was.
        image = self.wanted[id(self.recv_raw)]
        start = self.recv.ctypes.data - self.recv_raw.ctypes.data
        image[start : start + self.recv.nbytes] = received.view(np.uint8)
        self._unchanged(self.recv_raw)
        if not self.alias:
            self._unchanged(self.send_raw)
        return received

    def _unchanged(self, raw: np.ndarray | None) -> None:
        if raw is not None and not np.array_equal(raw, self.wanted[id(raw)]):
            at = int(np.argmax(raw != self.wanted[id(raw)])) - GUARD
            raise Wrong(f"byte {at} beside the result was written (of {raw.size - 2 * GUARD})")
