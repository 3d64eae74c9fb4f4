"""Calls to make on the stand-in of a GPU, and the memory that shows what they did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.dtypes import ReduceOp, dtype_of, op_of, premul_sum
from ringcoll.launch import Launch, Layout
from ringcoll.plan import Buffer, Plan

Array = npt.NDArray[Any]

POISON = 0xA5
"""The byte that memory holds where nothing has been written."""

LL = Launch(protocol="LL", mapped=frozenset())
LL128 = Launch(protocol="LL128", mapped=frozenset())
STAGED = Launch(slices=5, mapped=frozenset())


@dataclass(frozen=True)
class Case:
    """One call of all ranks.

    Args:
        plan: the algorithm's.
        launch: protocol, slices, mapped buffers, in place or not.
        count: elements a segment.
        dtype: by name.
        op: by name; used if the collective reduces.
        shift: elements by which the arrays miss an aligned address.
        replicas: CUDA blocks for each block of the program.
        threads: of each; words need three.
        scalars: of every rank, where the operator is premul_sum.
        shares: weight of each channel.

    """

    plan: Plan
    launch: Launch
    count: int = 203
    dtype: str = "bfloat16"
    op: str = "sum"
    shift: int = 0
    replicas: int = 1
    threads: int = 4
    scalars: tuple[complex, ...] = ()
    shares: tuple[int, ...] = (1,)

    def op_of(self, rank: int) -> ReduceOp:
        """The operator as a rank passes it."""
        return premul_sum(self.scalars[rank]) if self.scalars else op_of(self.op)

    def __str__(self) -> str:
        at = f"{self.dtype} {self.op}{[*self.scalars] or ''} x{self.count}+{self.shift}"
        return f"{self.plan.collective} {at} {self.launch} {self.replicas}x{self.threads}"

    def layout(self, *, sliced: bool) -> Layout:
        collective = self.plan.collective
        align = max(1, 16 // dtype_of(self.dtype).itemsize)
        slices = self.launch.slices if sliced else 1
        return Layout(collective, (self.count,), slices, self.shares, align)


@dataclass(frozen=True, eq=False)
class Arrays:
    """INPUT and OUTPUT of every rank in the world's memory, and what OUTPUT is to be."""

    inputs: list[Array | None]
    outputs: list[Array | None]
    wanted: list[Array | None]
    whole: Array
    """Bytes: the arrays with what lies between them."""
    before: Array
    guards: Array
    """Which bytes belong to no OUTPUT."""
    table: Array
    """Where peers find them: address of mapping and rank."""

    def poison(self) -> None:
        """Forget the results of a call out of place."""
        for output in self.outputs:
            if output is not None:
                output.view(np.uint8)[:] = POISON

    def check(self, title: object) -> None:
        """What was to come has come, and nothing else was touched."""
        for rank, (seen, wanted) in enumerate(zip(self.outputs, self.wanted, strict=True)):
            if seen is not None:
                if wanted is None:
                    raise AssertionError(f"{title}: rank {rank} has an output, and should not")
                same = seen.view(np.uint8) == wanted.view(np.uint8)
                if not same.all():  # asserts of a module that is no test vanish under -O
                    raise AssertionError(f"{title}: rank {rank}: {seen}, wanted {wanted}")
        stray = np.flatnonzero((self.whole != self.before) & self.guards)
        if stray.size:
            raise AssertionError(f"{title}: {stray.size} stray bytes, first at {stray[0]}")


def joined(
    case: Case, rank: int, given: Array, seen: Array, values: Array | None
) -> tuple[Array, Array]:
    """INPUT and OUTPUT of a rank in one memory: the larger buffer's."""
    if values is None:
        raise AssertionError(f"{case}: rank {rank} has no contribution")
    part = slice(rank * case.count, (rank + 1) * case.count)
    if given.size > seen.size:
        return given, given[part]
    if seen.size > given.size:
        seen[part] = values
        return seen[part], seen
    return given, given


def values(dtype: str, size: int, rng: np.random.Generator) -> Array:
    """Numbers whose sums are finite and depend on the order of rounding."""
    numpy = dtype_of(dtype).numpy
    if numpy.kind in "biu":
        return rng.integers(0, 2 if numpy.kind == "b" else 100, size).astype(numpy)
    if numpy.kind == "c":
        return (rng.standard_normal(size) + 1j * rng.standard_normal(size)).astype(numpy)
    return rng.standard_normal(size).astype(np.float32).astype(numpy)


def launches(nranks: int) -> Iterator[Launch]:
    """Launches of every kind of memory; all of them for three ranks."""
    for in_place in (False, True):
        yield Launch(protocol="LL", mapped=frozenset(), in_place=in_place)
        yield Launch(slices=5, mapped=frozenset(), in_place=in_place)
        if nranks == 3:
            yield Launch(protocol="LL128", mapped=frozenset(), in_place=in_place)
            yield Launch(in_place=in_place)
            yield Launch(slices=4, window=1, mapped=frozenset(), in_place=in_place)
            yield Launch(slices=3, mapped=frozenset({Buffer.INPUT}), in_place=in_place)
