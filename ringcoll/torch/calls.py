"""The cache of prepared calls on tensors, one for each address range.

A cached call depends on addresses, a count and a type, and keeps no tensor alive: a later tensor at
the same address uses it as rightly as the first.
"""

from __future__ import annotations

import logging
from typing import Any

from ringcoll.arguments.calls import prepare
from ringcoll.collectives import COLLECTIVES
from ringcoll.communicator.gpu import CudaState
from ringcoll.communicator.public import Communicator
from ringcoll.config import Config, resolve
from ringcoll.dtypes import ReduceOp
from ringcoll.errors import MachineError
from ringcoll.torch.auto_register import MIN_BYTES, AutoRegistration
from ringcoll.torch.tensors import memory

__all__ = ["CallCache"]

_log = logging.getLogger("ringcoll")

MAX_CACHED = 512
"""Calls that a communicator caches; the oldest is dropped first."""


class CallCache:
    """Prepares and caches the collectives of one communicator on dense tensors.

    Args:
        comm: the communicator.
        auto_register: whether all_reduce registers the tensors that it sees repeatedly.

    """

    def __init__(self, comm: Communicator, *, auto_register: bool = False) -> None:
        state = comm._state
        self.comm = comm
        self.state: Any = state
        self._cache: dict[tuple[object, ...], Any] = {}
        self._symmetric = self.state.symmetric
        self._registration: AutoRegistration | None = None
        # Copy engines need all ranks' addresses on the host, which hellos do not give.
        if (
            auto_register
            and comm.nranks > 1
            and isinstance(state, CudaState)
            and (state.transport, state.config.engine) in (("p2p", None), ("p2p", "sm"))
        ):
            try:
                self._registration = AutoRegistration(state)
            except MachineError as error:  # on all ranks
                _log.warning(
                    "automatic registration is off, all_reduce stages its tensors: %s", error
                )

    def cached(
        self,
        name: str,
        send: Any,
        recv: Any,
        op: str | ReduceOp | None,
        root: int,
        *,
        caller_owned: bool = False,
    ) -> Any:
        """The call that ``state.run`` takes, checked and prepared for these tensors.

        Args:
            send: dense tensor, or None.
            recv: dense tensor; None: in place, or this rank receives nothing.
            caller_owned: False where ``send`` is a temporary copy.

        """
        registration = self._registration_for(name, send)
        key = (
            name,
            None if send is None else (send.data_ptr(), send.numel(), send.dtype),
            None if recv is None else (recv.data_ptr(), recv.numel(), recv.dtype),
            op,
            root,
            0 if registration is None else registration.count_use(send, caller_owned=caller_owned),
        )
        found = self._cache.get(key)
        # Memory may have been registered there since, or unregistered.
        if found is not None and found.changes == self._symmetric.changes:
            return found
        return self._prepare(key, name, send, recv, op, root, None)

    def cached_barrier(self, timeout: float | None) -> Any:
        """A barrier, with its own timeout if one is given."""
        key = ("barrier", timeout)
        found = self._cache.get(key)
        if found is not None and found.changes == self._symmetric.changes:
            return found
        return self._prepare(key, "barrier", None, None, None, 0, timeout)

    def _prepare(
        self,
        key: tuple[object, ...],
        name: str,
        send: Any,
        recv: Any,
        op: str | ReduceOp | None,
        root: int,
        timeout: float | None,
    ) -> Any:
        reduces = COLLECTIVES[name].reduces
        call = prepare(
            name,
            rank=self.comm.rank,
            nranks=self.comm.nranks,
            sendbuf=None if send is None else memory(send, name, reduces=reduces),
            recvbuf=None if recv is None else memory(recv, name, reduces=reduces),
            op=op,
            root=root,
        )
        config = self.state.config
        if timeout is not None:
            config = resolve(config, Config(timeout=timeout), {}, name)
        registers = self._registration_for(name, send) is not None
        made = self.state.prepare(call, config, **({"hellos_decide": True} if registers else {}))
        self._cache.pop(key, None)
        while len(self._cache) >= MAX_CACHED:
            self._cache.pop(next(iter(self._cache)))
        self._cache[key] = made
        return made

    def _registration_for(self, name: str, send: Any) -> AutoRegistration | None:
        """The registration if it applies to such a call; equal on all ranks."""
        return self._registration if name == "all_reduce" and send.nbytes >= MIN_BYTES else None

    def forget(self) -> None:
        """Drop all cached calls, and unregister nothing more."""
        self._cache.clear()
        self._registration = None
