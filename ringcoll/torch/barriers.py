"""Barriers of a group, which may open its GPU ranks."""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import BarrierOptions

from ringcoll.torch.device import Device
from ringcoll.torch.host import Host
from ringcoll.torch.meeting import SETTLED, Verdict, conclude, device_of, place
from ringcoll.torch.named import Named
from ringcoll.torch.overloads import options
from ringcoll.torch.point_to_point import Pairs
from ringcoll.torch.untraced import untraced
from ringcoll.torch.work import seconds_of

__all__ = ["Barriers"]

_log = logging.getLogger("ringcoll")
_TIMES = 8
"""Barriers at which ranks are asked for their GPUs: to ask takes as long as the barrier, and those
of a group that has none to say yet may use none at all."""


@untraced
class Barriers(Named):
    """A group that says how its ranks are opened."""

    _host: Host | None
    _device: Device | None
    _pairs: Pairs | None
    _failure: BaseException | None
    _turn: threading.Event | None = None
    """Of the last barrier: set when that has ended."""
    _settled = False
    """Whether barriers have nothing more to open; alike on all ranks."""
    _asked = 0

    @abstractmethod
    def _open_host(self) -> Host:
        """The engine of CPU tensors; collective."""

    @abstractmethod
    def _open_now(self, ordinal: int) -> Device:
        """The engine of CUDA tensors; collective."""

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
        ends, named = self._ends(), tuple(opts.device_ids)
        turn = self._turn = threading.Event()

        def body() -> None:
            try:
                for end in ends:
                    end.synchronize()
                host.barrier(seconds)
                if not self._settled:
                    self._settle(host, named)
            finally:
                turn.set()

        try:
            return self._run("barrier", host, body, later=opts.asyncOp)
        except BaseException:
            turn.set()  # the body may never have begun
            raise

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

    def _settle(self, host: Host, named: Sequence[int]) -> None:
        """Open the GPU ranks if each has a GPU of its own; all ranks conclude the same."""
        ordinal = device_of(named, self.bound_device_id)
        said = SETTLED if self._device is not None else place(ordinal)
        verdict = conclude(host.exchange(said, "barrier"))
        self._asked += 1
        self._settled = verdict is not Verdict.LATER or self._asked == _TIMES
        if verdict is not Verdict.OPEN or ordinal is None:
            return
        try:
            self._open_now(ordinal)
        except Exception:
            if self._failure is not None:
                raise
            _log.warning("barrier: the group's GPU ranks could not be opened", exc_info=True)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names the ranks that have not come: all of them, either way.

        Args:
            timeout: None: the group's.
            wait_all_ranks: nothing more is to be asked for.

        """
        self.barrier(timeout=timeout).wait()

    def _after_barrier(self) -> None:
        """Wait for the last barrier, which opens the GPU ranks behind it, perhaps on the worker."""
        turn = self._turn
        while turn is not None and not turn.wait(0.05):
            self._usable()
