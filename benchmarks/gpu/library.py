"""ringcoll as the bars time it: graphs and eager calls of symmetric and of plain memory, checked.

bfloat16 or float32, sums of small whole numbers, which are exact.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu.timer import Rendezvous, Timer, calls_of

__all__ = ["WORDS", "Ringcoll", "as_bits", "bits_of", "pattern"]

WORDS = {"bfloat16": "uint16", "float32": "uint32"}
"""By element type that of its bits."""

WIDE_INPUT, WIDE_OUTPUT = ("reduce_scatter", "all_to_all"), ("all_gather", "all_to_all")
"""What sends or receives a part for every rank."""

PIECE = 1 << 26
"""Elements that are made or compared at once."""

SETTLING = 6
"""Calls after which plain memory is registered and all ranks have SCRATCH of copy engines."""


def pattern(rank: int, count: int, seed: int, first: int = 0, xp: Any = None) -> Any:
    """Small whole numbers from element ``first`` on; ``xp`` makes them: CuPy, on the device."""
    if xp is None:
        import cupy

        xp = cupy
    index = xp.arange(first, first + count, dtype=xp.uint32)
    index *= xp.uint32(2654435761 + 2 * seed)
    number = ((index >> 13) * xp.uint32(rank + 3) >> 7) % xp.uint32(17)
    return number.astype(xp.float32) - 8


def as_bits(numbers: Any, dtype: str = "bfloat16") -> Any:
    """The bits, as an element type has them, of whole numbers up to 256."""
    bits = numbers.view("uint32")
    return bits if dtype == "float32" else (bits >> 16).astype("uint16")


@dataclass(frozen=True)
class Part:
    """Elements of an OUTPUT: the sum of what some ranks have from element ``source`` on."""

    first: int
    count: int
    source: int
    ranks: Sequence[int]

    def bits(self, seed: int, dtype: str, xp: Any = None) -> Any:
        """What is to be there, of inputs that are :func:`pattern`."""
        each = (pattern(rank, self.count, seed, self.source, xp) for rank in self.ranks)
        return as_bits(functools.reduce(operator.iadd, each), dtype)


def parts(name: str, rank: int, nranks: int, count: int) -> Iterator[Part]:
    """All that a rank receives, of ``count`` elements a segment.

    In parts of at most :data:`PIECE` elements, so that comparing needs little memory beside arrays
    of 4 GiB.
    """
    everyone, own = range(nranks), rank * count
    whole = {
        "broadcast": [Part(0, count, 0, (0,))],
        "all_gather": [Part(p * count, count, 0, (p,)) for p in everyone],
        "all_to_all": [Part(p * count, count, own, (p,)) for p in everyone],
        "reduce_scatter": [Part(0, count, own, everyone)],
        "reduce": [Part(0, count, 0, everyone)] if rank == 0 else [],
        "all_reduce": [Part(0, count, 0, everyone)],
    }
    for part in whole[name]:
        for at, size in pieces(part.count):
            yield Part(part.first + at, size, part.source + at, part.ranks)


def pieces(count: int) -> Iterator[tuple[int, int]]:
    """Where pieces of at most :data:`PIECE` elements begin, and how long they are."""
    for first in range(0, count, PIECE):
        yield first, min(PIECE, count - first)


def bits_of(array: Any) -> Any:
    """The memory of an array or a tensor of one of :data:`WORDS` as words of CuPy."""
    import cupy

    if isinstance(array, cupy.ndarray):
        words = cupy.uint16 if array.itemsize == 2 else cupy.uint32
        return cupy.ndarray(array.size, words, memptr=array.data)
    import torch

    if array.dtype == torch.float32:
        return cupy.asarray(array).view(cupy.uint32)
    return cupy.asarray(array.view(torch.int16)).view(cupy.uint16)


class Ringcoll:
    """Times the library on arrays of a type, one of :data:`WORDS`.

    They begin ``first`` elements behind the beginning of an allocation.
    """

    def __init__(self, rendezvous: Rendezvous, timer: Timer, dtype: str, first: int) -> None:
        import cupy
        import torch

        import ringcoll

        started = time.perf_counter()
        self.comm = ringcoll.init(rendezvous, device="cuda", timeout=20.0)
        self.init_seconds = time.perf_counter() - started
        self.rendezvous, self.timer, self.dtype = rendezvous, timer, dtype
        self._itemsize, self.first = np.dtype(WORDS[dtype]).itemsize, first
        timer.align = lambda stream: self.comm.barrier(stream=stream.ptr)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._torch_stream = torch.cuda.ExternalStream(self.stream.ptr)

    def rows(
        self, name: str, nbytes: int, *, plain: bool = False, **options: Any
    ) -> Iterator[dict[str, Any]]:
        """Out of place and, for all_reduce, in place; ``plain``: with plain memory of torch."""
        comm, n = self.comm, self.comm.nranks
        count = nbytes // self._itemsize // (n if name in WIDE_INPUT + WIDE_OUTPUT else 1)
        counts = (
            count * (n if name in WIDE_INPUT else 1),
            count * (n if name in WIDE_OUTPUT else 1),
        )
        send, recv = (self._empty(each, plain=plain) for each in counts)
        settling = SETTLING if plain or options else 0
        for in_place in (False, True) if name == "all_reduce" else (False,):
            call = functools.partial(self._call, name, send, recv, in_place, options)
            wrong = self._wrong(name, send, recv, count, in_place, options)
            with self._on_stream():
                for _ in range(settling):
                    call()
                self.stream.synchronize()
            if settling:
                wrong += self._wrong(name, send, recv, count, in_place, options)
            with self._on_stream():
                bits_of(send)[:] = 0  # sums in place would overflow
                call()
                self.stream.synchronize()
                calls = calls_of(nbytes)
                self.stream.begin_capture()
                for _ in range(calls):
                    call()
                graph = self.stream.end_capture()
                replay = functools.partial(graph.launch, self.stream)
                seconds = self.timer.median(replay, calls, self.stream)
                more = self.timer.eager(call, calls, self.stream)
            comm.synchronize()
            yield {
                "lib": "ringcoll plain" if plain else "ringcoll",
                "collective": name,
                "bytes": nbytes,
                "dtype": self.dtype,
                "first": self.first,
                "in_place": in_place,
                "us": round(seconds, 2),
                "wrong": wrong,
                **more,
                **({"options": options} if options else {}),
            }

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """The stream is CuPy's current one, and torch's."""
        import torch

        with self.stream, torch.cuda.stream(self._torch_stream):
            yield

    def _empty(self, count: int, *, plain: bool) -> Any:
        """An array in symmetric memory, or a tensor in plain memory."""
        import torch

        count += self.first
        if plain:
            made = torch.empty(count, dtype=getattr(torch, self.dtype), device="cuda")
        else:
            made = self.comm.empty(count, self.dtype)
        return made[self.first :]

    def _call(
        self, name: str, send: Any, recv: Any, in_place: bool, options: dict[str, Any]
    ) -> None:
        comm = self.comm
        if name == "broadcast":
            comm.broadcast(send if comm.rank == 0 else None, recv, **options)
        elif name == "reduce":
            comm.reduce(send, recv if comm.rank == 0 else None, **options)
        else:
            getattr(comm, name)(*((send,) if in_place else (send, recv)), **options)

    def _wrong(
        self, name: str, send: Any, recv: Any, count: int, in_place: bool, options: dict[str, Any]
    ) -> int:
        """Wrong elements of three calls on fresh inputs."""
        import cupy

        comm, wrong = self.comm, 0
        negative = 1 << (8 * self._itemsize - 1)  # two zeros are one value
        for _ in range(3):
            seed = int(self.rendezvous.allgather(os.urandom(2))[0].hex(), 16)
            with self._on_stream():
                sent = bits_of(send)
                for first, size in pieces(sent.size):
                    numbers = pattern(comm.rank, size, seed, first)
                    sent[first : first + size] = as_bits(numbers, self.dtype)
                bits_of(recv)[:] = 0xA5A5
                self._call(name, send, recv, in_place, options)
                received = sent if in_place else bits_of(recv)
                for part in parts(name, comm.rank, comm.nranks, count):
                    got = received[part.first : part.first + part.count]
                    right = part.bits(seed, self.dtype)
                    unequal = (got != right) & ~((got | right) == negative)
                    wrong += int(cupy.count_nonzero(unequal))
            comm.synchronize()
        return sum(json.loads(part) for part in self.rendezvous.allgather(str(wrong).encode()))

    def host_cost(self) -> dict[str, float]:
        """Microseconds of the host: a call, and a bare launch of the same kernel."""
        comm = self.comm
        x = comm.empty(128, "bfloat16")
        bits_of(x)[:] = 0
        best: dict[str, float] = {}
        with self._on_stream():
            comm.all_reduce(x)
            checked = next(reversed(comm._engine.calls._checked.values()))
            prepared = next(iter(checked.prepared.values()))
            pointer = self.stream.ptr
            for name, call in (
                ("call", lambda: comm.all_reduce(x)),
                ("bare launch", lambda: prepared.launchable.launch(pointer, prepared.addresses)),
            ):
                for _ in range(5):
                    self.stream.synchronize()
                    self.timer.line.wait()
                    started = time.perf_counter()
                    for _ in range(200):
                        call()
                    each = (time.perf_counter() - started) / 200 * 1e6
                    best[name] = round(min(each, best.get(name, each)), 2)
        comm.synchronize()
        return best
