"""A rank whose launches are noted, and what the compiled part knows of its calls."""

from __future__ import annotations

from array import array
from typing import Any

from ringcoll.cuda.raw import RawArray
from ringcoll.cuda.readers import Library
from ringcoll.dtypes import dtype_of
from ringcoll.executors.cuda.launches import Launches, StreamOwners
from ringcoll.executors.cuda.params import Parameter
from tests.gpu.noted_rank import STREAM, NotedRank

DEVICE = 1
WORDS = 8
HELD = (((1, 0), (4, 24)), ((2, 0),), (), ())
"""Words of a parameter with INPUT and OUTPUT, and what each adds."""


class Stream:
    """CuPy's current one."""

    ptr = STREAM


class Kernel:
    """Notes its launches by Python, with the words of its parameter."""

    function, blocks, locals, threads, pointers = 1 << 41, 3, 2, 512, 1 << 40

    def __init__(self, rank: NotedRank) -> None:
        self.parameter = Parameter(array("Q", [7] * WORDS), HELD)
        self._noted = rank.noted

    def enqueue(self, stream: int, pointers: int, extra: int) -> None:
        assert (pointers, extra) == (1 << 40, 0)
        self._noted.append((stream, *self.parameter.words))


class Prepared:
    """A call that was launched before."""

    def __init__(self, rank: NotedRank) -> None:
        self.kernel, self.slot, self.number, self.any_class = Kernel(rank), 1, 3, True
        self.taken = 0


class Known(NotedRank):
    """A rank, and what the compiled part knows of its calls."""

    def __init__(self) -> None:
        super().__init__(DEVICE)
        self.stream = Stream()
        self.owners, self.groups = StreamOwners({STREAM: self.stream}), set[Any]()
        libraries: Any = dict.fromkeys((RawArray, Foreign), Library(None, None))  # type: ignore[arg-type]
        self.launches = Launches(self.path, self.owners, self.groups, libraries)
        self.make = self.launches.make

    def add(
        self,
        first: Any,
        second: Any = None,
        *,
        name: str = "all_reduce",
        op: Any = "sum",
        root: int = 0,
        places: tuple[int, int, int, int] | None = None,
    ) -> Prepared:
        """Let a call on these arrays be one that was launched before."""
        prepared = Prepared(self)
        places = places or (0, 0, 0 if second is None else 1, 0)
        nbytes = tuple(0 if x is None else x.size * x.dtype.itemsize for x in (first, second))
        self.launches.add((name, first, second, op, root), prepared, places, nbytes)  # type: ignore[arg-type]
        return prepared


class Foreign:
    """An array that only Python can read."""

    size, dtype = 8, dtype_of("float32")


def x(address: int, count: int = 8, kind: str = "float32", device: int = DEVICE) -> RawArray:
    return RawArray(address, (count,), dtype_of(kind), device)


def words(stream: int, sent: int, received: int) -> tuple[int, ...]:
    """What is noted of a launch."""
    return stream, 7, sent, received, 7, sent + 24, 7, 7, 7
