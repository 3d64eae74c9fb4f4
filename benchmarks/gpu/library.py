"""ringcoll as the bars time it: graphs and eager calls of symmetric and of plain memory, checked.

bfloat16 or float32, sums of small whole numbers, which are exact.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.gpu.timer import Rendezvous, Timer, calls_of

__all__ = ["WORDS", "Ringcoll", "as_bits", "bits_of", "pattern"]

WORDS = {"bfloat16": "uint16", "float32": "uint32"}
"""By element type that of its bits."""

WIDE_INPUT, WIDE_OUTPUT = ("reduce_scatter", "all_to_all"), ("all_gather", "all_to_all")
"""What sends or receives a part for every rank."""

SETTLING = 6
"""Calls after which plain memory is registered and all ranks have SCRATCH of copy engines."""


def pattern(rank: int, count: int, seed: int) -> Any:
    """Small whole numbers, on the device."""
    import cupy

    index = cupy.arange(count, dtype=cupy.uint32) * cupy.uint32(2654435761 + 2 * seed)
    number = ((index >> 13) * cupy.uint32(rank + 3) >> 7) % cupy.uint32(17)
    return number.astype(cupy.float32) - 8


def as_bits(numbers: Any, dtype: str = "bfloat16") -> Any:
    """The bits, as an element type has them, of whole numbers up to 256."""
    import cupy

    bits = numbers.view(cupy.uint32)
    return bits if dtype == "float32" else (bits >> 16).astype(cupy.uint16)


def wanted(name: str, rank: int, nranks: int, count: int, seed: int, dtype: str) -> Any:
    """What a rank must receive, in bits; None where it receives nothing."""
    import cupy

    wide = name in ("reduce_scatter", "all_to_all")
    sent = [pattern(peer, count * (nranks if wide else 1), seed) for peer in range(nranks)]
    own = slice(rank * count, (rank + 1) * count)
    if name == "broadcast":
        return as_bits(sent[0], dtype)
    if name == "all_gather":
        return as_bits(cupy.concatenate(sent), dtype)
    if name == "all_to_all":
        return as_bits(cupy.concatenate([numbers[own] for numbers in sent]), dtype)
    if name == "reduce" and rank:
        return None
    total = sent[0]
    for numbers in sent[1:]:
        total = total + numbers
    return as_bits(total[own] if name == "reduce_scatter" else total, dtype)


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
        for _ in range(3):
            seed = int(self.rendezvous.allgather(os.urandom(2))[0].hex(), 16)
            with self._on_stream():
                bits_of(send)[:] = as_bits(pattern(comm.rank, bits_of(send).size, seed), self.dtype)
                bits_of(recv)[:] = 0xA5A5
                self._call(name, send, recv, in_place, options)
                right = wanted(name, comm.rank, comm.nranks, count, seed, self.dtype)
                if right is not None:
                    got = bits_of(send if in_place else recv)
                    # Two zeros are one value.
                    negative = 1 << (8 * self._itemsize - 1)
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
