"""Barriers of a group, and whether they open its communicator of GPU ranks, as NCCL's do.

All ranks take part in a barrier, so calls behind it may be of some ranks only. But a barrier must
not create a CUDA context on a GPU that a process does not use, nor bind a rank to another GPU than
its tensors'. So a rank has a device if the barrier or the group names one, or torch has memory
reserved on exactly one. The ranks exchange their devices behind the barrier, and since all see the
same list, all decide the same.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch._C._distributed_c10d import BarrierOptions

from ringcoll import log
from ringcoll.cuda.device import available, devices
from ringcoll.fabric.identity import identity
from ringcoll.torch.device import Device
from ringcoll.torch.host import Host
from ringcoll.torch.list_collectives import Collectives
from ringcoll.torch.options import options
from ringcoll.torch.point_to_point import Pairs
from ringcoll.torch.tracing import compile_disabled
from ringcoll.torch.work import seconds_of

__all__ = ["Barriers"]

_log = log.logger()
_MAX_EXCHANGES = 8
"""Barriers at which ranks exchange their devices: an exchange takes as long as the barrier, and a
group whose ranks have no device yet may never use one."""

SETTLED = "settled"
"""Sent by a rank whose GPU communicator is open, or that can never be part of one."""

_LATER = "later"


class Decision(Enum):
    """What the ranks decide."""

    OPEN = "open now"
    LATER = "exchange again at the next barrier"
    SETTLED = "never exchange again"


def device_of(named: Sequence[int], bound: Any) -> int | None:
    """The GPU of this rank; None where that is not known.

    Args:
        named: the barrier's ``device_ids``.
        bound: the ``device_id`` of ``init_process_group``, or None.

    """
    if named:
        return named[0]
    if bound is not None:
        index: int | None = bound.index
        return index
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    # Not the current one, which is 0 in a process that names a device with each tensor; nor where
    # it has a context, which it may also have where its peers' memory lies.
    reserved = torch.cuda.memory_reserved
    found = [ordinal for ordinal in range(torch.cuda.device_count()) if reserved(ordinal)]
    return found[0] if len(found) == 1 else None


def device_key(ordinal: int | None) -> str:
    """The host and PCI address of a device: the same in every process."""
    if not torch.cuda.is_available():
        return SETTLED
    if ordinal is None:
        return _LATER
    found = devices()
    if available() is not None or not 0 <= ordinal < len(found):
        return SETTLED
    return f"{identity()['boot']} {found[ordinal].pci}"


def decide(keys: Sequence[str]) -> Decision:
    """The decision of all ranks, from the keys of their devices."""
    if SETTLED in keys:
        return Decision.SETTLED
    if _LATER in keys:
        return Decision.LATER
    return Decision.OPEN if len({*keys}) == len(keys) else Decision.SETTLED


@compile_disabled
class Barriers(Collectives):
    """The barriers of a group, which says how its communicators are opened."""

    _host: Host | None
    _device: Device | None
    _pairs: Pairs | None
    _failure: BaseException | None
    _last_barrier: threading.Event | None = None
    """Set when the last barrier has ended."""
    _gpus_decided = False
    """Whether barriers have nothing left to open; equal on all ranks."""
    _exchanges = 0

    @abstractmethod
    def _open_host(self, name: str) -> Host:
        """The engine of CPU tensors; collective."""

    @abstractmethod
    def _open_now(self, ordinal: int, name: str) -> Device:
        """The engine of CUDA tensors; collective."""

    @abstractmethod
    def _launch(self) -> None:
        """Launch the messages of CUDA tensors that were posted."""

    @abstractmethod
    def _usable(self) -> None:
        """Raise if the group takes no more calls."""

    @abstractmethod
    def _after_failure(self) -> BaseException:
        """The error of calls after one that failed."""

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Wait for this call on all ranks, and for the work enqueued on this rank's GPU."""
        opts = options(BarrierOptions, opts, timeout)
        if self._failure is not None:
            raise self._after_failure()
        host, seconds = self._host or self._open_host("barrier"), seconds_of(opts.timeout)
        ends, named = self._pending_events(), tuple(opts.device_ids)
        ended = self._last_barrier = threading.Event()

        def body() -> None:
            try:
                for end in ends:
                    end.synchronize()
                host.barrier(seconds)
                if not self._gpus_decided:
                    self._open_gpus(host, named)
            finally:
                ended.set()

        try:
            return self._run("barrier", host, body, async_op=opts.asyncOp)
        except BaseException:
            ended.set()  # the body may never have begun
            raise

    def _pending_events(self) -> list[Any]:
        """Events behind the work of this rank's GPU; posted messages are launched first."""
        self._launch()
        engines = [] if self._device is None else [self._device]
        if self._pairs is not None:
            engines += self._pairs.devices()
        if engines:
            return [end for engine in engines for end in engine.pending_events()]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            return [torch.cuda.current_stream().record_event()]
        return []

    def _open_gpus(self, host: Host, named: Sequence[int]) -> None:
        """Open the GPU ranks if each has a GPU of its own; all ranks decide the same."""
        ordinal = device_of(named, self.bound_device_id)
        keys = SETTLED if self._device is not None else device_key(ordinal)
        decision = decide(host.exchange(keys, "barrier"))
        self._exchanges += 1
        self._gpus_decided = decision is not Decision.LATER or self._exchanges == _MAX_EXCHANGES
        if decision is not Decision.OPEN or ordinal is None:
            return
        try:
            self._open_now(ordinal, "barrier")
        except Exception:
            if self._failure is not None:
                raise
            _log.warning(
                "barrier: cannot open the group's communicator of GPU ranks; the first call on "
                "CUDA tensors tries again",
                exc_info=True,
            )

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names all missing ranks, whatever ``wait_all_ranks`` is."""
        self.barrier(timeout=timeout).wait()

    def _after_barrier(self) -> None:
        """Wait for the last barrier: its worker may be opening the GPU ranks."""
        ended = self._last_barrier
        while ended is not None and not ended.wait(0.05):
            self._usable()
