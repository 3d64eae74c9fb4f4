"""Calls between ranks on GPUs with what numpy says of their results: messages and unequal counts.

A scenario gives a rank's calls and what is to be checked after them. It runs by a thread for each
rank, or by one thread that makes the calls of all ranks in one group.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

import ringcoll
from ringcoll.dtypes import dtype_of

GUARD, POISON = 64, 0xA5


class Buffer(ABC):
    """A rank's array among guards, all of it full of poison at first.

    Args:
        comm: of the rank.
        data: what the array is to hold; a number: so many elements of poison.
        dtype: by name.
        offset: elements by which it misses an aligned address.
        symmetric: whether all ranks reach it.

    """

    def __init__(
        self,
        comm: Any,
        data: np.ndarray | int,
        dtype: str = "int32",
        *,
        offset: int = 0,
        symmetric: bool = False,
    ) -> None:
        self.comm, self.symmetric, self.dtype = comm, symmetric, dtype_of(dtype)
        count = data if isinstance(data, int) else data.size
        self.shape, self.nbytes = count, count * self.dtype.itemsize
        self.first = GUARD + offset * self.dtype.itemsize
        self.raw = np.empty(self.first + self.nbytes + GUARD, np.uint8)
        self.array = self._place()
        self.raw[:] = POISON
        if not isinstance(data, int):
            self._values()[:] = data
        self._upload()

    def _values(self) -> np.ndarray:
        return self.raw[self.first : self.first + self.nbytes].view(self.dtype.numpy)

    def check(self, wanted: np.ndarray) -> None:
        """The array holds what is wanted, and the guards are as they were."""
        self._download()
        seen = self._values()
        if seen.tobytes() != wanted.astype(self.dtype.numpy).tobytes():
            wrong = np.flatnonzero(seen != wanted)
            raise AssertionError(f"rank {self.comm.rank}: {wrong[:5]} of {seen.size} differ")
        for guard in (self.raw[: self.first], self.raw[self.first + self.nbytes :]):
            if (guard != POISON).any():
                raise AssertionError(f"rank {self.comm.rank}: stray bytes")

    @abstractmethod
    def _place(self) -> Any:
        """Where it lies; the array that calls take."""

    @abstractmethod
    def _upload(self) -> None:
        """Host to device, guards too."""

    @abstractmethod
    def _download(self) -> None:
        """And back."""


Make = Callable[..., Buffer]


@dataclass
class Todo:
    """One rank's part: what it calls, what it finds then, and what must live as long."""

    calls: list[Callable[[], object]] = field(default_factory=list)
    finds: list[tuple[Buffer, np.ndarray]] = field(default_factory=list)
    sent: list[Buffer] = field(default_factory=list)

    def check(self) -> None:
        for buffer, wanted in self.finds:
            buffer.check(wanted)


Scenario = Callable[[Any, Make], Todo]


def values(*seed: int, count: int, dtype: str = "int32") -> np.ndarray:
    """Numbers that are exact in every type."""
    drawn = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 8, count)
    return drawn.astype(dtype_of(dtype).numpy)


def by_threads(scenario: Scenario, make: Make, *, grouped: bool = False) -> Callable[[Any], None]:
    """A rank's own thread."""

    def work(comm: Any) -> None:
        todo = scenario(comm, make)
        if grouped:
            with ringcoll.group():
                for call in todo.calls:
                    call()
        else:
            for call in todo.calls:
                call()
        comm.synchronize()
        todo.check()

    return work


def by_one(comms: Sequence[Any], scenario: Scenario, make: Make, together: Any) -> None:
    """One thread for all ranks; ``together`` runs what is collective, such as empty."""
    todos = together(comms, lambda comm: scenario(comm, make))
    with ringcoll.group():
        for todo in todos:
            for call in todo.calls:
                call()
    for comm in comms:
        comm.synchronize()
    for todo in todos:
        todo.check()


# -- what ranks call ----------------------------------------------------------------------------


def ring(count: int, dtype: str = "int32", offset: int = 0) -> Scenario:
    """Everyone sends to the next rank, and receives from the last one."""

    def scenario(comm: Any, make: Make) -> Todo:
        n, me = comm.nranks, comm.rank
        right, left = (me + 1) % n, (me - 1) % n
        sent = make(comm, values(me, count, count=count, dtype=dtype), dtype, offset=offset)
        got = make(comm, count, dtype, offset=2 * offset)
        wanted = values(left, count, count=count, dtype=dtype)
        call = lambda: comm.sendrecv(sent.array, right, got.array, left)  # noqa: E731
        return Todo([call], [(got, wanted)])

    return scenario


def messages(sent: Sequence[tuple[int, int, int]], seed: int = 0) -> Scenario:
    """Sends and receives: sender, receiver and count of each."""

    def scenario(comm: Any, make: Make) -> Todo:
        todo = Todo()
        for number, (sender, receiver, count) in enumerate(sent):
            data = values(seed, number, sender, count=count)
            if comm.rank == sender:
                buffer = make(comm, data, offset=number % 3)
                todo.calls.append(partial(comm.send, buffer.array, receiver))
                todo.sent.append(buffer)
            if comm.rank == receiver:
                buffer = make(comm, count, offset=number % 2)
                todo.calls.append(partial(comm.recv, buffer.array, sender))
                todo.finds.append((buffer, data))
        return todo

    return scenario


def several(scenarios: Sequence[Scenario]) -> Scenario:
    """One after the other."""

    def scenario(comm: Any, make: Make) -> Todo:
        whole = Todo()
        for each in scenarios:
            todo = each(comm, make)
            whole.calls += todo.calls
            whole.finds += todo.finds
            whole.sent += todo.sent
        return whole

    return scenario


def places_of(rng: random.Random, counts: Sequence[int], gaps: bool) -> tuple[list[int], int]:
    """Where segments begin, in any order with gaps or packed, and the size of the whole."""
    if not gaps:
        return [0, *accumulate(counts)][: len(counts)], sum(counts)
    order = list(range(len(counts)))
    rng.shuffle(order)
    places, at = [0] * len(counts), rng.randrange(4)
    for number in order:
        places[number] = at
        at += counts[number] + rng.randrange(5)
    return places, at


def laid_out(parts: Sequence[np.ndarray], places: Sequence[int], whole: np.ndarray) -> np.ndarray:
    """The whole with parts at their places."""
    whole = whole.copy()
    for part, place in zip(parts, places, strict=True):
        whole[place : place + part.size] = part
    return whole


def poison(count: int, dtype: str = "int32") -> np.ndarray:
    kind = dtype_of(dtype).numpy
    return np.full(count * kind.itemsize, POISON, np.uint8).view(kind)


def all_gather_v(
    counts: Sequence[int], seed: int, *, gaps: bool, in_place: bool, symmetric: bool, **how: Any
) -> Scenario:
    def scenario(comm: Any, make: Make) -> Todo:
        rng, me = random.Random(seed), comm.rank
        places, size = places_of(rng, counts, gaps)
        parts = [values(seed, rank, count=count) for rank, count in enumerate(counts)]
        slot = laid_out([parts[me]], [places[me]], poison(size))
        whole = make(comm, slot if in_place else size, symmetric=symmetric)
        mine = None if in_place else make(comm, parts[me], offset=1)
        displs = places if gaps else None

        def call() -> None:
            given = None if mine is None else mine.array
            comm.all_gather_v(given, whole.array, counts, displs, **how)

        return Todo([call], [(whole, laid_out(parts, places, poison(size)))])

    return scenario


def reduce_scatter_v(
    counts: Sequence[int],
    seed: int,
    *,
    op: str = "sum",
    dtype: str = "int32",
    in_place: bool,
    symmetric: bool,
    **how: Any,
) -> Scenario:
    def scenario(comm: Any, make: Make) -> Todo:
        me, size = comm.rank, sum(counts)
        inputs = [values(seed, rank, count=size, dtype=dtype) for rank in range(comm.nranks)]
        options = {**how, "op": ringcoll.premul_sum(me + 2) if op == "premul_sum" else op}
        factors = range(2, 2 + comm.nranks) if op == "premul_sum" else [1] * comm.nranks
        terms = [factor * given for factor, given in zip(factors, inputs, strict=True)]
        combine = np.maximum if op == "max" else np.add
        total = combine.reduce(terms).astype(inputs[0].dtype)
        first = sum(counts[:me])
        wanted = total[first : first + counts[me]]
        whole = make(comm, inputs[me], dtype, symmetric=symmetric)
        if in_place:
            call = lambda: comm.reduce_scatter_v(whole.array, None, counts, **options)  # noqa: E731
            return Todo([call], [(whole, laid_out([wanted], [first], inputs[me]))])
        out = make(comm, counts[me], dtype, offset=1)
        call = lambda: comm.reduce_scatter_v(whole.array, out.array, counts, **options)  # noqa: E731
        return Todo([call], [(out, wanted), (whole, inputs[me])])

    return scenario


def gather_v(
    counts: Sequence[int], root: int, seed: int, *, gaps: bool, in_place: bool
) -> Scenario:
    def scenario(comm: Any, make: Make) -> Todo:
        rng, me = random.Random(seed), comm.rank
        places, size = places_of(rng, counts, gaps)
        parts = [values(seed, rank, count=count) for rank, count in enumerate(counts)]
        mine = make(comm, parts[me], offset=me)
        if me != root:
            return Todo([lambda: comm.gather_v(mine.array, None, root=root)])
        slot = laid_out([parts[me]], [places[me]], poison(size))
        whole = make(comm, slot if in_place else size)

        def call() -> None:
            given = None if in_place else mine.array
            comm.gather_v(given, whole.array, counts, places, root)

        return Todo([call], [(whole, laid_out(parts, places, poison(size)))])

    return scenario


def scatter_v(counts: Sequence[int], root: int, seed: int, *, gaps: bool) -> Scenario:
    def scenario(comm: Any, make: Make) -> Todo:
        rng, me = random.Random(seed), comm.rank
        places, size = places_of(rng, counts, gaps)
        data = values(seed, count=size)
        wanted = data[places[me] : places[me] + counts[me]]
        out = make(comm, counts[me], offset=me)
        if me != root:
            call = lambda: comm.scatter_v(None, out.array, root=root)  # noqa: E731
            return Todo([call], [(out, wanted)])
        whole = make(comm, data)
        call = lambda: comm.scatter_v(whole.array, out.array, counts, places, root)  # noqa: E731
        return Todo([call], [(out, wanted), (whole, data)])

    return scenario


def all_to_all_v(counts: Sequence[Sequence[int]], seed: int, *, gaps: bool) -> Scenario:
    """Rank p sends ``counts[p][q]`` elements to rank q."""

    def scenario(comm: Any, make: Make) -> Todo:
        me, n = comm.rank, comm.nranks
        sends, receives = counts[me], [counts[p][me] for p in range(n)]
        sent_at = [places_of(random.Random(f"{seed} {p}"), counts[p], gaps) for p in range(n)]
        inputs = [values(seed, p, count=sent_at[p][1]) for p in range(n)]
        received_at, size = places_of(random.Random(f"to {seed} {me}"), receives, gaps)
        parts = [inputs[p][sent_at[p][0][me] : sent_at[p][0][me] + receives[p]] for p in range(n)]
        given, out = make(comm, inputs[me]), make(comm, size)
        call = lambda: comm.all_to_all_v(  # noqa: E731
            given.array, sends, out.array, receives, sent_at[me][0], received_at
        )
        return Todo([call], [(out, laid_out(parts, received_at, poison(size)))])

    return scenario


def counts_of(rng: random.Random, n: int, largest: int) -> list[int]:
    """A count a rank; some of them zero."""
    return [rng.choice([0, 1, rng.randrange(9), rng.randrange(largest)]) for _ in range(n)]


def unequal(nranks: int, largest: Sequence[int]) -> Iterator[Scenario]:
    """Every call with a count for each rank, in place and not, with gaps and packed."""
    for seed, most in enumerate(largest):
        rng = random.Random(seed)
        counts = counts_of(rng, nranks, most)
        root, gaps, in_place, symmetric = (
            rng.randrange(nranks),
            seed % 2 == 0,
            seed % 3 == 0,
            seed % 4 < 2,
        )
        how: dict[str, Any] = {"protocol": "Simple", "slices": 3} if seed % 2 else {}
        yield all_gather_v(counts, seed, gaps=gaps, in_place=in_place, symmetric=symmetric, **how)
        op = ("sum", "max", "premul_sum")[seed % 3]
        dtype = ("int32", "float32")[seed % 2]
        yield reduce_scatter_v(
            counts, seed, op=op, dtype=dtype, in_place=in_place, symmetric=symmetric, **how
        )
        yield gather_v(counts, root, seed, gaps=gaps, in_place=in_place)
        yield scatter_v(counts, root, seed, gaps=gaps)
        matrix = [counts_of(rng, nranks, most) for _ in range(nranks)]
        yield all_to_all_v(matrix, seed, gaps=gaps)
