"""Calls of a communicator on tensors, prepared once for each place in memory.

What is kept of a call is bound to addresses, a count and a type, and to nothing that owns them: a
tensor that is made later at the same place finds it, and is served by it as rightly as the first.
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
from ringcoll.torch.auto_register import LEAST, Returning
from ringcoll.torch.tensors import memory

__all__ = ["Calls"]

_log = logging.getLogger("ringcoll")

KEPT = 512
"""Calls that a communicator keeps prepared; the oldest goes first."""


class Calls:
    """The collectives of one communicator on dense tensors of its device.

    Args:
        comm: the communicator.
        registers: whether peers shall reach tensors that all_reduce meets again, where they can.

    """

    def __init__(self, comm: Communicator, *, registers: bool = False) -> None:
        state = comm._state
        self.comm = comm
        self.state: Any = state
        self._kept: dict[tuple[object, ...], Any] = {}
        self._symmetric = self.state.symmetric
        self._returning: Returning | None = None
        # The host tells copy engines where everything lies, and must know it of all ranks.
        if (
            registers
            and comm.nranks > 1
            and isinstance(state, CudaState)
            and (state.transport, state.config.engine) in (("p2p", None), ("p2p", "sm"))
        ):
            try:
                self._returning = Returning(state)
            except MachineError as error:  # on all ranks
                _log.warning("tensors that come back stay staged: %s", error)

    def ready(
        self,
        name: str,
        send: Any,
        recv: Any,
        op: str | ReduceOp | None,
        root: int,
        *,
        lasting: bool = False,
    ) -> Any:
        """What ``state.run`` takes: a checked call, bound to the memory of these tensors.

        Args:
            name: of the collective.
            send: dense tensor, or None.
            recv: dense tensor, or None: in place, or this rank receives nothing.
            op: the operator of a reducing collective.
            root: the root of a rooted one.
            lasting: whether ``send`` is the caller's own tensor, which may come back.

        """
        returning = self._counted(name, send)
        key = (
            name,
            None if send is None else (send.data_ptr(), send.numel(), send.dtype),
            None if recv is None else (recv.data_ptr(), recv.numel(), recv.dtype),
            op,
            root,
            0 if returning is None else returning.meet(send, lasting=lasting),
        )
        found = self._kept.get(key)
        # Memory that peers can reach may lie there now, or no longer.
        if found is not None and found.changes == self._symmetric.changes:
            return found
        return self._prepared(key, name, send, recv, op, root, None)

    def barrier(self, timeout: float | None) -> Any:
        """The same for a barrier, which may have a timeout of its own."""
        key = ("barrier", timeout)
        found = self._kept.get(key)
        if found is not None and found.changes == self._symmetric.changes:
            return found
        return self._prepared(key, "barrier", None, None, None, 0, timeout)

    def _prepared(
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
        asks = self._counted(name, send) is not None
        made = self.state.prepare(call, config, **({"asked": True} if asks else {}))
        self._kept.pop(key, None)
        while len(self._kept) >= KEPT:
            self._kept.pop(next(iter(self._kept)))
        self._kept[key] = made
        return made

    def _counted(self, name: str, send: Any) -> Returning | None:
        """Who counts such a call, of which hellos tell what peers reach; alike on all ranks."""
        return self._returning if name == "all_reduce" and send.nbytes >= LEAST else None

    def forget(self) -> None:
        """Keep no call any more, and no memory."""
        self._kept.clear()
        self._returning = None
