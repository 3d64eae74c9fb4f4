"""Tensors that all_reduce meets again and again: memory that peers reach without being asked to.

DDP hands over its buckets at the same places in every step, and whoever knows nothing of ringcoll
registers none of them. So a group that was made with ``register=True`` does it by itself, from the
third time on. Whether a place is one that comes back only its own rank knows: in windows of calls,
which all ranks count alike, each says so of the tensor at hand, and it is registered if all say
yes. Later calls need not agree: of each the ranks' hellos say whether peers reach it.

It is no default, because in a window a call waits for the other ranks' hosts, which a program may
hold up until this call has returned: one that sends a message to the CPU of a rank behind it.

On 2 H200 a bucket of 25 MiB took 86 us where peers reached it, 109 to 113 where it was staged.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ringcoll.communicator.gpu import CudaState
from ringcoll.errors import MachineError
from ringcoll.transports.cuda.arrays import DeviceArray, device_array

__all__ = ["LEAST", "Returning"]

LEAST = 1 << 20
"""Bytes from which a tensor is counted: smaller ones go in lines, which nobody need reach."""

FIRST, WINDOW, FACTOR = 16, 64, 8
"""Calls before the first window and in each; the next begins at so many times as many. DDP makes
its last buckets after the first step: up to 20 of them all return within the first window."""

TIMES = 2
"""How often a place has come before it is taken for one that comes back."""

_PLACES = 4096
"""Places that are counted at most."""

_log = logging.getLogger("ringcoll")

Place = tuple[int, int]


@dataclass(slots=True, eq=False)
class _Seen:
    """A place that has come, and whether what lay there still does: later tensors may."""

    storage: StorageWeakRef
    times: int = 0


class Returning:
    """What comes back to the all_reduce of one group.

    Args:
        state: of the group's communicator, of GPU ranks on one node.
        capturing: whether the current stream is being captured.

    """

    def __init__(
        self,
        state: CudaState,
        capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ) -> None:
        self._state, self._capturing = state, capturing
        self._seen: dict[Place, _Seen] = {}
        self._kept: dict[Place, tuple[Any, DeviceArray]] = {}
        self._calls, self._begin = 0, FIRST
        self._mapped = True  # until memory turns out to be of a kind that peers cannot map
        self.reaches = False
        """Whether something has been registered: then calls ask hellos; alike on all ranks."""

    def meet(self, tensor: Any, *, lasting: bool) -> None:
        """Count a call; before every all_reduce of LEAST bytes on all ranks, collective in windows.

        Args:
            tensor: dense, on the ranks' devices.
            lasting: whether it is the caller's own, and no copy that was made for the call.

        Raises:
            DeadlineError: a rank makes no such call, in a window.

        """
        place = tensor.data_ptr(), tensor.nbytes
        again = self._count(place, tensor) if lasting else 0
        number = self._calls
        self._calls += 1
        if number < self._begin or not self._mapped:
            return
        if number >= self._begin + WINDOW:
            self._begin *= FACTOR
            return
        self._let_go()
        state = self._state
        if number == self._begin and self.reaches:
            state.together(state.symmetric.sweep)
        wanted = again >= TIMES and not self._capturing() and not self._reached(place)
        said = state.together(
            lambda: state.fabric.allgather(
                bytes([wanted]), what="all_reduce of a tensor that may come back"
            )
        )
        if all(part == b"\1" for part in said):
            self._keep(place, tensor.detach())

    def _count(self, place: Place, tensor: Any) -> int:
        """How often this memory has come to all_reduce before."""
        seen = self._seen.pop(place, None)
        if seen is None or seen.storage.expired():
            seen = _Seen(StorageWeakRef(tensor.untyped_storage()))
            while len(self._seen) >= _PLACES:
                self._seen.pop(next(iter(self._seen)))
        self._seen[place] = seen
        seen.times += 1
        return seen.times - 1

    def _reached(self, place: Place) -> bool:
        return self._state.symmetric.lookup(*place, own=True) is not None

    def _keep(self, place: Place, tensor: Any) -> None:
        """Register a tensor, which is not freed meanwhile; collective."""
        state, ordinal = self._state, tensor.get_device()
        array = device_array(tensor, argument="tensor", where="all_reduce", ordinal=ordinal)
        # Calls that are on their way come before the collective one on every rank.
        state.synchronize()
        try:
            self._mapped = state.together(lambda: state.symmetric.register(array, own=True))
        except MachineError as error:  # on all ranks alike; the call goes another way
            _log.warning("all_reduce: a tensor that comes back is not registered: %s", error)
            self._mapped = False
        if self._mapped:
            # Peers' hellos may name it to a replay of a graph, before which nothing is prepared.
            state.cuda.mappings.update()
            self.reaches = True
            self._kept[place] = tensor, array

    def _let_go(self) -> None:
        """Forget what nobody else has any more; its memory is free once all ranks have said so."""
        storages = {place: tensor.untyped_storage() for place, (tensor, _) in self._kept.items()}
        ours = Counter(storage._cdata for storage in storages.values())
        for place, storage in storages.items():
            tensor, array = self._kept[place]
            users = torch._C._storage_Use_Count(storage._cdata)  # these and the storages' own
            if users <= ours[storage._cdata] + 1 or tensor.data_ptr() != place[0]:
                del self._kept[place]
                self._state.symmetric.unregister(array, own=True)
