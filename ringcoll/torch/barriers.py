"""Barriers of a group."""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import Any

import torch
from torch._C._distributed_c10d import BarrierOptions

from ringcoll.torch.device import Device
from ringcoll.torch.host import Host
from ringcoll.torch.named import Named
from ringcoll.torch.overloads import options
from ringcoll.torch.pairs import Pairs
from ringcoll.torch.untraced import untraced
from ringcoll.torch.work import seconds_of

__all__ = ["Barriers"]


@untraced
class Barriers(Named):
    """A group that says how its ranks are opened."""

    _host: Host | None
    _device: Device | None
    _pairs: Pairs | None
    _failure: BaseException | None
    _turn: threading.Event | None = None
    """Of the last barrier: set when that has ended."""

    @abstractmethod
    def _open_host(self) -> Host:
        """The engine of CPU tensors; collective."""

    @abstractmethod
    def _launch(self) -> None:
        """Launch the messages of CUDA tensors that were posted."""

    @abstractmethod
    def _usable(self) -> None:
        """Raise if the group takes no more calls."""

    @abstractmethod
    def _after_failure(self) -> BaseException:
        """What calls raise after one that has failed."""

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Return when all ranks have come, and the work before it on this rank's GPU has ended."""
        opts = options(BarrierOptions, opts, timeout)
        if self._failure is not None:
            raise self._after_failure()
        host, seconds = self._host or self._open_host(), seconds_of(opts.timeout)
        ends = self._ends()
        turn = self._turn = threading.Event()

        def body() -> None:
            try:
                for end in ends:
                    end.synchronize()
                host.barrier(seconds)
            finally:
                turn.set()

        return self._run("barrier", host, body, later=opts.asyncOp)

    def _ends(self) -> list[Any]:
        """Events behind the work of this rank's GPU, once what was posted is launched."""
        self._launch()
        engines = [] if self._device is None else [self._device]
        if self._pairs is not None:
            engines += self._pairs.devices()
        if engines:
            return [end for engine in engines for end in engine.ends()]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            return [torch.cuda.current_stream().record_event()]
        return []

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names the ranks that have not come: all of them, either way.

        Args:
            timeout: None: the group's.
            wait_all_ranks: nothing more is to be asked for.

        """
        self.barrier(timeout=timeout).wait()

    def _after_barrier(self) -> None:
        """Wait for the last barrier, which may be under way on the worker."""
        turn = self._turn
        while turn is not None and not turn.wait(0.05):
            self._usable()
