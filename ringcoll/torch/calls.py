"""The prepared calls of one group on tensors.

They are found by what a call depends on, as the communicator's own; no tensor is kept alive.
"""

from __future__ import annotations

from typing import Any

import torch

from ringcoll.arguments.calls import prepare
from ringcoll.collectives import COLLECTIVES
from ringcoll.communicator.call_cache import CallCache, CheckedCall
from ringcoll.communicator.cuda.state import CudaState
from ringcoll.communicator.public import Communicator
from ringcoll.config import Config, resolve
from ringcoll.dtypes import ReduceOp
from ringcoll.executors.contract import Given
from ringcoll.executors.cuda.auto_register import MIN_BYTES
from ringcoll.torch.tensors import memory
from ringcoll.tuner.predicted import power
from ringcoll.views import extent_of

__all__ = ["TensorCalls"]


class TensorCalls:
    """Prepares and caches the collectives of one communicator on dense tensors."""

    def __init__(self, comm: Communicator) -> None:
        state = comm._state
        self._rank, self._nranks, self._config = comm.rank, comm.nranks, state.config
        self._calls = self._large = CallCache(state)
        self._recounts = isinstance(state, CudaState)
        # Ranks may pass symmetric tensors and plain ones to one all_reduce. Copy engines need all
        # ranks' addresses on the host, which hellos do not give.
        if (
            isinstance(state, CudaState)
            and state.cuda.auto_register is not None
            and state.config.engine != "copy"
        ):
            self._large = CallCache(state, hellos_decide=True)

    def find(
        self,
        name: str,
        send: Any,
        recv: Any,
        op: str | ReduceOp | None,
        root: int,
    ) -> tuple[Any, Given]:
        """The call that ``state.run`` takes, and the addresses for its launch.

        Args:
            send: dense tensor, or None.
            recv: dense tensor; None: in place, or this rank receives nothing.

        """
        large = name == "all_reduce" and send.nbytes >= MIN_BYTES
        calls = self._large if large else self._calls
        first, second = _address(send), _address(recv)
        if first is None or second is None:
            return self._prepare(calls, None, name, send, recv, op, root)
        key = (
            *(name, op, root, first & 7, second & 7),
            None if send is None else (send.numel(), send.dtype),
            None if recv is None else (recv.numel(), recv.dtype),
        )
        found = calls.find(key, first, second)
        if found is not None:
            return found
        shape = None
        if self._recounts:
            sent, received = (0 if each is None else each.nbytes for each in (send, recv))
            kinds = (None if each is None else each.dtype for each in (send, recv))
            shape = *key[:5], *kinds, power(max(sent, received)), sent & 7, received & 7
            found = calls.find_like(key, shape, (first, sent), (second, received))
        return found or self._prepare(calls, key, name, send, recv, op, root, shape=shape)

    def find_kept(
        self, name: str, tensor: Any, op: str | ReduceOp | None, root: int
    ) -> tuple[Any, Given] | None:
        """A kept call in place on a dense tensor of this device; None for :meth:`find` to check."""
        try:
            address, kind, count = tensor.data_ptr(), tensor.dtype, tensor.numel()
            calls, key = self._where(name, address, count, kind, op, root)
            checked = calls.checked(key)
            # One for its memory's class is looked up under the lock, behind posted messages.
            found = None if checked is None else checked.any_class  # once: it may be evicted
            if (
                checked is None
                or found is None
                or not tensor.is_contiguous()
                or tensor.is_neg()
                or (kind.is_complex and tensor.is_conj())
            ):
                return None
            end = tensor.storage_offset() * kind.itemsize + checked.nbytes[0]
            if not address or end > tensor.untyped_storage().nbytes():
                return None
        except RuntimeError:  # a sparse tensor, which has no address
            return None
        return (found, (address, address, 0, 0)) if checked.alone else calls.find(key, address, 0)

    def find_sum(self, address: int, count: int, kind: torch.dtype) -> tuple[Any, Given] | None:
        """A kept all_reduce of a sum, in place on a dense tensor that lies there; or None."""
        calls, key = self._where("all_reduce", address, count, kind, "sum", 0)
        return calls.find(key, address, 0)

    def checked(self, address: int, count: int, kind: torch.dtype, op: str) -> CheckedCall | None:
        """A checked all_reduce, in place on a dense tensor that lies there; or None."""
        calls, key = self._where("all_reduce", address, count, kind, op, 0)
        return calls.checked(key)

    def _where(
        self,
        name: str,
        address: int,
        count: int,
        kind: torch.dtype,
        op: str | ReduceOp | None,
        root: int,
    ) -> tuple[CallCache, tuple[object, ...]]:
        """The cache of a call in place, and the key that :meth:`find` gives it there."""
        large = name == "all_reduce" and count * kind.itemsize >= MIN_BYTES
        key = name, op, root, address & 7, 0, (count, kind), None
        return self._large if large else self._calls, key

    def find_barrier(self, timeout: float | None) -> tuple[Any, Given]:
        """A barrier, with its own timeout if one is given."""
        key = ("barrier", timeout)
        found = self._calls.find(key, 0, 0)
        return found or self._prepare(self._calls, key, "barrier", None, None, None, 0, timeout)

    def _prepare(
        self,
        calls: CallCache,
        key: tuple[object, ...] | None,
        name: str,
        send: Any,
        recv: Any,
        op: str | ReduceOp | None,
        root: int,
        timeout: float | None = None,
        shape: tuple[object, ...] | None = None,
    ) -> tuple[Any, Given]:
        reduces = COLLECTIVES[name].reduces
        first, second = (
            None if tensor is None else memory(tensor, name, reduces=reduces)
            for tensor in (send, recv)
        )
        call = prepare(
            name,
            rank=self._rank,
            nranks=self._nranks,
            sendbuf=first,
            recvbuf=second,
            op=op,
            root=root,
        )
        config = self._config
        if timeout is not None:
            config = resolve(config, Config(timeout=timeout), {}, name)
        return calls.add(key, call, config, extent_of(first), extent_of(second), shape)

    def forget(self) -> None:
        """Drop all cached calls."""
        self._calls.clear()
        self._large.clear()


def _address(tensor: Any) -> int | None:
    """Where a tensor lies, 0 without elements; None if its storage has been resized to less."""
    if tensor is None or not tensor.nbytes:
        return 0
    end = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
    if end > tensor.untyped_storage().nbytes():
        return None
    address: int = tensor.data_ptr()
    return address
