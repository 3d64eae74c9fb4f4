"""Barriers of a group, and whether they open its communicator of GPU ranks, as NCCL's do.

All ranks take part in a barrier, so calls behind it may be of some ranks only. But a barrier must
not create a CUDA context on a GPU that a process does not use, nor bind a rank to another GPU than
its tensors'. So a rank has a device if the barrier or the group names one, or torch has memory
reserved on exactly one. The ranks exchange their devices behind the barrier, and since all see the
same list, all decide the same.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch._C._distributed_c10d import BarrierOptions

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

_log = logging.getLogger("ringcoll")
_TIMES = 8
"""Barriers at which ranks are asked for their GPUs: to ask takes as long as the barrier, and those
of a group that has none to say yet may use none at all."""

SETTLED = "settled"
"""Said by a rank whose group's GPU ranks are open, or that can never be one of them."""

_LATER = "later"


class Verdict(Enum):
    """What the ranks conclude."""

    OPEN = "open now"
    LATER = "ask again at the next barrier"
    SETTLED = "never ask again"


def device_of(named: Sequence[int], bound: Any) -> int | None:
    """The GPU of this rank; None where that is not known.

    Args:
        named: what the barrier says, torch's ``device_ids``.
        bound: what the group was made with, torch's ``device_id``, or None.

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


def place(ordinal: int | None) -> str:
    """What a rank says of its device: where it is, the same in every process."""
    if not torch.cuda.is_available():
        return SETTLED
    if ordinal is None:
        return _LATER
    found = devices()
    if available() is not None or not 0 <= ordinal < len(found):
        return SETTLED
    return f"{identity()['boot']} {found[ordinal].pci}"


def conclude(said: Sequence[str]) -> Verdict:
    """The verdict of all ranks, from what each has said."""
    if SETTLED in said:
        return Verdict.SETTLED
    if _LATER in said:
        return Verdict.LATER
    return Verdict.OPEN if len({*said}) == len(said) else Verdict.SETTLED


@compile_disabled
class Barriers(Collectives):
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
