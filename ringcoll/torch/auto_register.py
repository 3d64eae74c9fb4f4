"""Automatic registration: the third all_reduce of a tensor of 1 MiB and more registers its memory.

DDP reduces its buckets at the same addresses in every step, and a user who knows nothing of
ringcoll registers none of them. Each rank publishes such memory, and its peers map it when they
poll (:mod:`ringcoll.executors.cuda.auto_register`). No rank waits and none has to agree: a call
runs zero-copy as soon as the hellos of all ranks carry mapped addresses, and staged until then.

On 2 H200 a captured step of a GPT took 0.97 of NCCL's time
(``benchmarks/results/training_graphs_2_register.json``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ringcoll.communicator.gpu import CudaState

__all__ = ["MIN_BYTES", "AutoRegistration"]

MIN_BYTES = 1 << 20
"""Smaller tensors are not counted: they use LL, which stages; over NVLink those of up to 4 MiB
do."""

USES_BEFORE = 2
"""Uses of a tensor before the one that registers it."""

_NEVER = -(1 << 60)
"""The count of memory that peers cannot map: it is not tried again."""

_MAX_COUNTED = 4096
"""Address ranges that are counted at most; the least recently used is dropped."""

_log = logging.getLogger("ringcoll")

Range = tuple[int, int]


@dataclass(slots=True, eq=False)
class _Counted:
    """Uses of an address range by one storage: another storage at this address counts anew."""

    storage: StorageWeakRef
    times: int = 0


class AutoRegistration:
    """Counts and registers the tensors that one group reduces; creating one is collective."""

    def __init__(
        self,
        state: CudaState,
        capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ) -> None:
        self._registry = state.together(state.cuda.open_auto_register)
        self._symmetric, self._capturing = state.symmetric, capturing
        self._seen: dict[Range, _Counted] = {}

    def count_use(self, tensor: Any, *, caller_owned: bool) -> int:
        """Count a use; before each all_reduce of MIN_BYTES bytes, on all ranks, under the lock.

        Args:
            tensor: dense, on the ranks' devices.
            caller_owned: False for a temporary copy, which is never registered.

        Returns:
            The address that hellos carry, 0 if unregistered.

        """
        self._registry.poll()
        range_ = tensor.data_ptr(), tensor.nbytes
        address = self._registry.mapped_address(*range_)
        if (
            address
            or not caller_owned
            or self._capturing()
            or self._symmetric.lookup(*range_) is not None
        ):
            return address
        self._count(range_, tensor)
        return 0

    def _count(self, range_: Range, tensor: Any) -> None:
        """Count one use, and register the memory on the third."""
        seen = self._seen.pop(range_, None)
        if seen is None or seen.storage.expired():
            seen = _Counted(StorageWeakRef(tensor.untyped_storage()))
            while len(self._seen) >= _MAX_COUNTED:
                self._seen.pop(next(iter(self._seen)))
        self._seen[range_] = seen
        seen.times += 1
        if seen.times > USES_BEFORE:
            seen.times = 0  # after it is unmapped, count anew
            if not self._registry.register(range_[0]):
                _log.info("all_reduce: a tensor stays unregistered: peers cannot map its memory")
                seen.times = _NEVER
