"""The communicators of this process's ranks, and what ranks exchange between measurements."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ringcoll.bench.environment import gpus, wanted_device
from ringcoll.communicator.public import Communicator
from ringcoll.communicator.setup.start import init, init_all, spawn

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """Makes communicators with options, one after the other, always of the same ranks.

    ``threads`` of 1: this process is one rank of its launcher's.
    """

    threads: int = 1
    device: str = "auto"
    timeout: float | None = None

    def run(
        self, function: Callable[[Communicator, Communicator], T], **options: object
    ) -> list[T]:
        """Call ``function(control, comm)`` on every rank of this process; what each returned.

        ``comm`` is what is measured. ``control``, a plain one of the same ranks on the CPU, is for
        barriers and results: no pace and no algorithm touches it.
        """
        given: dict[str, Any] = {
            name: value for name, value in options.items() if value is not None
        }
        plain: dict[str, Any] = {"timeout": self.timeout}
        if self.threads > 1 or self.device.isdecimal():
            return self._threads(function, plain, given)
        with init(device="cpu", **plain) as control:
            if not (given or self._on_gpus(control)):
                return [function(control, control)]
            with init(device=self.device, **plain, **{"kernel_wait": math.inf, **given}) as comm:
                return [function(control, comm)]

    def on_gpu(self) -> bool:
        """Whether this process would have its ranks on GPUs."""
        wanted = wanted_device(self.device, os.environ)
        return wanted != "cpu" and (wanted != "auto" or gpus() > 0)

    def _on_gpus(self, control: Communicator) -> bool:
        """Whether all ranks would be on GPUs; collective."""
        return all(row[0] for row in gather_numbers(control, [self.on_gpu()]))

    def _threads(
        self,
        function: Callable[[Communicator, Communicator], T],
        plain: dict[str, Any],
        given: dict[str, Any],
    ) -> list[T]:
        if self.device.isdecimal():
            ordinals = [int(self.device)] * self.threads
            comms = init_all(ordinals, device="cuda", **plain, **given)
        else:
            comms = init_all(self.threads, device=self.device, **plain, **given)

        def work(control: Communicator) -> T:
            comm = comms[control.rank]
            try:
                return function(control, comm)
            except BaseException as error:
                comm.abort(f"{type(error).__name__}: {error}")
                raise

        try:
            results: list[T] = spawn(work, self.threads, device="cpu", **plain)
        finally:
            for comm in comms:
                comm.close()
        return results


def gather_numbers(comm: Communicator, numbers: Sequence[float]) -> list[list[float]]:
    """Every rank's numbers, in rank order; each rank brings equally many."""
    mine = np.array(numbers, np.float64)
    every = np.zeros((comm.nranks, mine.size), np.float64)
    comm.all_gather(mine, every.reshape(-1))
    rows: list[list[float]] = every.tolist()
    return rows


def gather_bytes(comm: Communicator, payload: bytes) -> list[bytes]:
    """Every rank's bytes, in rank order; lengths may differ."""
    lengths = [int(row[0]) for row in gather_numbers(comm, [len(payload)])]
    longest = max(lengths)
    mine = np.zeros(longest, np.uint8)
    mine[: len(payload)] = np.frombuffer(payload, np.uint8)
    every = np.zeros(comm.nranks * longest, np.uint8)
    comm.all_gather(mine, every)
    parts = every.reshape(comm.nranks, longest)
    return [part[:length].tobytes() for part, length in zip(parts, lengths, strict=True)]


def agree(comm: Communicator, number: int) -> int:
    """What rank 0 says; below 2⁵³."""
    return int(gather_numbers(comm, [number])[0][0])
