"""Counts and displacements of the calls that have one for each rank.

They are host integers in elements. Where displacements are None the segments lie one after
another and fill the buffer exactly; else gaps are allowed, and segments that are written must not
overlap.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ringcoll.arguments.checks import refuse_keyword, same_dtype, view
from ringcoll.errors import ArgumentError, ArgumentTypeError
from ringcoll.views import address_of

Array = npt.NDArray[Any]
Counts = tuple[int, ...]

_NO_SEQUENCES = (str, bytes, Mapping, AbstractSet)


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A call in progress: its name, its rank, and how many ranks there are."""

    name: str
    rank: int
    nranks: int

    def refusal(self, why: str) -> ArgumentError:
        """The error that says why this call cannot be."""
        return ArgumentError(f"{self.name} on rank {self.rank}: {why}")

    def slots(
        self,
        wide_name: Literal["sendbuf", "recvbuf"],
        wide: Any,
        narrow_name: Literal["sendbuf", "recvbuf"],
        narrow: Any,
        counts: Any,
        displs: Any,
    ) -> tuple[Array, Array, Counts, Counts, bool]:
        """Narrow and wide buffer, counts and displacements of the wide one, and in place."""
        refuse_keyword(self.name, self.rank, wide if wide_name == "recvbuf" else narrow)
        written = wide_name == "recvbuf"
        large = view(self.name, self.rank, wide_name, wide, written or narrow is None)
        numbers, places = self.segments(wide_name, large.size, "counts", counts, "displs", displs)
        first, count = places[self.rank], numbers[self.rank]
        slot = large[first : first + count]
        if narrow is None:
            return slot, large, numbers, places, True
        small = view(self.name, self.rank, narrow_name, narrow, not written)
        same_dtype(self.name, self.rank, *((small, large) if written else (large, small)))
        self.own_size(narrow_name, small.size, count)
        shared = np.may_share_memory(small, large)
        if shared and address_of(small) != address_of(slot):
            raise self.refusal(
                f"{narrow_name} overlaps {wide_name}; in place it is None or exactly slot "
                f"{self.rank}, {wide_name}[{first}:{first + count}], else they share no memory"
            )
        return small, large, numbers, places, shared

    def own_size(self, narrow_name: str, size: int, count: int) -> None:
        """Refuse a narrow buffer of another size than this rank's count."""
        if size != count:
            raise self.refusal(
                f"{narrow_name} has {size} elements, counts[{self.rank}] is {count}; pass "
                f"{narrow_name} of {count}"
            )

    def segments(
        self, buffer: str, size: int, counts_name: str, counts: Any, displs_name: str, displs: Any
    ) -> tuple[Counts, Counts]:
        """Counts and displacements that fit a buffer of ``size`` elements."""
        numbers = self.integers(counts_name, counts)
        total = sum(numbers)
        if displs is None:
            if total != size:
                raise self.refusal(
                    f"{buffer} has {size} elements, {counts_name} add up to {total}; pass {buffer} "
                    f"of {total}, or {displs_name} for segments with gaps"
                )
            return numbers, (0, *accumulate(numbers[:-1]))
        places = self.integers(displs_name, displs)
        for i, (place, number) in enumerate(zip(places, numbers, strict=True)):
            if place + number > size:
                raise self.refusal(
                    f"{displs_name}[{i}]={place} and {counts_name}[{i}]={number} end beyond "
                    f"{buffer}, which has {size} elements"
                )
        if buffer == "recvbuf":
            self._refuse_overlap(displs_name, counts_name, places, numbers)
        return numbers, places

    def _refuse_overlap(
        self, displs_name: str, counts_name: str, places: Counts, numbers: Counts
    ) -> None:
        filled = sorted(
            (p, n, i) for i, (p, n) in enumerate(zip(places, numbers, strict=True)) if n
        )
        for (place, number, i), (following, _, j) in pairwise(filled):
            if place + number > following:
                raise self.refusal(
                    f"segments {i} and {j} of recvbuf overlap: {displs_name}[{i}]={place} with "
                    f"{counts_name}[{i}]={number}, {displs_name}[{j}]={following}; each element "
                    f"is written once"
                )

    def own_count(self, argument: str, buffer: Array, counts: Any) -> None:
        """Where counts are given though only the root needs them, this rank's must be right."""
        if counts is None:
            return
        count = self.integers("counts", counts)[self.rank]
        if count != buffer.size:
            raise self.refusal(
                f"{argument} has {buffer.size} elements, counts[{self.rank}] is {count}; pass "
                f"{argument} of {count}, or counts=None: only the root needs them"
            )

    def integers(self, argument: str, values: Any) -> Counts:
        """One non-negative host integer a rank."""
        try:
            if type(values) is not list and (
                isinstance(values, _NO_SEQUENCES) or hasattr(values, "__cuda_array_interface__")
            ):
                raise TypeError
            numbers = tuple(map(operator.index, values))
        except TypeError:
            raise ArgumentTypeError(
                f"{self.name} on rank {self.rank}: {argument}={values!r}: pass {self.nranks} host "
                f"integers, elements for each rank"
            ) from None
        if len(numbers) != self.nranks:
            raise self.refusal(
                f"{argument} has {len(numbers)} entries; pass one for each of {self.nranks} ranks"
            )
        if min(numbers) < 0:
            raise self.refusal(f"{argument}={numbers} has a negative entry; counts start at 0")
        return numbers
