"""The engine of a communicator: how one rank makes its calls.

A call goes one way on every device. Its arguments are checked, which gives a ``Call``; once for its
shape what it runs is chosen and prepared; the prepared call is launched at the addresses at hand.
``CpuEngine`` of :mod:`.cpu_engine` launches on the caller's thread or on a worker,
``CudaEngine`` of :mod:`.cuda_engine` on the caller's stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ringcoll.arguments.calls import Call, prepare_recv, prepare_send, prepare_sendrecv
from ringcoll.arguments.vector import VCall
from ringcoll.communicator.call_cache import CallCache, comparable, prepare_collective
from ringcoll.communicator.rank import RankState
from ringcoll.communicator.vector import as_collective, as_pairs
from ringcoll.communicator.work import Work
from ringcoll.config import Config, resolve
from ringcoll.errors import ArgumentTypeError
from ringcoll.options import checked_async_op

Check = Callable[..., Call]
"""(name, arguments, rank, nranks, send, recv) -> the checked call."""


class Engine(ABC):
    """Checks, prepares and launches the calls of one rank."""

    device = "cpu"
    """Where the rank computes, such as ``"cpu"`` or ``"cuda:0"``."""
    xp: Any
    """The module of the arrays that it takes, numpy or CuPy."""

    def __init__(self, state: RankState, nranks: int) -> None:
        self._state: Any = state
        self._rank, self._nranks = state.fabric.rank, nranks
        self.calls = CallCache(state)

    @abstractmethod
    def collective(
        self,
        name: str,
        sendbuf: Any,
        recvbuf: Any,
        op: Any,
        root: int,
        how: dict[str, Any],
        check: Check = prepare_collective,
        arguments: tuple[Any, ...] = (),
    ) -> Work | None:
        """Find a call by its shape, or check and prepare it, and launch it.

        The callee may remove options from ``how``: it belongs to this call. ``check`` makes the
        call of the buffers and its other ``arguments``, by default operator and root. Of other
        arguments ``op`` is what calls are compared by.
        """

    def counted(
        self,
        name: str,
        check: Callable[..., VCall],
        sendbuf: Any,
        recvbuf: Any,
        arguments: tuple[Any, ...],
        how: dict[str, Any],
    ) -> Work | None:
        """A collective with a count for each rank; ``arguments`` are those behind the buffers."""
        compared, given = comparable(arguments), (check, arguments)
        return self.collective(name, sendbuf, recvbuf, compared, 0, how, self.check_counted, given)

    @staticmethod
    def check_counted(
        _name: str, arguments: tuple[Any, ...], rank: int, nranks: int, send: Any, recv: Any
    ) -> Call:
        """Check a collective with a count for each rank."""
        check, rest = arguments
        return as_collective(check(send, recv, *rest, rank=rank, nranks=nranks))

    @abstractmethod
    def pairs(
        self, name: str, calls: list[Call], how: dict[str, Any], alive: tuple[object, ...], /
    ) -> Work | None:
        """Launch checked sends and receives together; ``alive``: their buffers."""

    def message(
        self, name: str, sendbuf: Any, dest: Any, recvbuf: Any, source: Any, exact: Any, how: Any
    ) -> Work | None:
        """Check and launch ``send``, ``recv`` or ``sendrecv``; None for what it does not take."""
        check_tag(name, self._rank, how)
        calls = self._check_message(name, sendbuf, dest, recvbuf, source, exact)
        return self.pairs(name, calls, how, (sendbuf, recvbuf))

    def _check_message(
        self, name: str, sendbuf: Any, dest: Any, recvbuf: Any, source: Any, exact: Any
    ) -> list[Call]:
        ranks: dict[str, Any] = {"rank": self._rank, "nranks": self._nranks}
        if name == "send":
            (send,) = self.views(name, buf=sendbuf)
            return [prepare_send(send, dest, **ranks)]
        if name == "recv":
            (recv,) = self.views(name, buf=recvbuf)
            return [prepare_recv(recv, source, exact, **ranks)]
        send, recv = self.views(name, sendbuf=sendbuf, recvbuf=recvbuf)
        return [*prepare_sendrecv(send, dest, recv, source, exact, **ranks)]

    def exchange(
        self,
        name: str,
        check: Callable[..., VCall],
        sendbuf: Any,
        recvbuf: Any,
        arguments: tuple[Any, ...],
        how: dict[str, Any],
    ) -> Work | None:
        """A v-variant that runs as sends and receives; ``arguments`` as in :meth:`counted`."""
        calls = self._check_exchange(name, check, sendbuf, recvbuf, arguments)
        return self.pairs(name, calls, how, (sendbuf, recvbuf))

    def _check_exchange(
        self, name: str, check: Callable[..., VCall], sendbuf: Any, recvbuf: Any, arguments: Any
    ) -> list[Call]:
        send, recv = self.views(name, sendbuf=sendbuf, recvbuf=recvbuf)
        checked = check(send, recv, *arguments, rank=self._rank, nranks=self._nranks)
        return as_pairs(checked, self._nranks)

    @abstractmethod
    def views(self, name: str, /, **buffers: Any) -> list[Any]:
        """The buffers as the checks take them."""

    def _options(self, name: str, how: dict[str, Any]) -> tuple[Config, Any, bool]:
        """The options of a call, its stream, and whether it returns a Work."""
        if not how:
            return self._state.config, None, False
        options = dict(how)
        where = f"{name} on rank {self._rank}"
        stream, later = options.pop("stream", None), options.pop("async_op", False)
        later = checked_async_op(later, where)
        given = options.pop("config", None)
        return resolve(self._state.config, given, options, where), stream, later

    def forget(self) -> None:
        """Drop all prepared calls."""
        self.calls.clear()

    def close(self) -> None:
        """Drop all prepared calls, and free what the rank has; not collective."""
        self.forget()
        self._state.close()


def check_tag(name: str, rank: int, how: dict[str, Any]) -> None:
    """Refuse MPI's tags."""
    if how and not isinstance(how.get("tag"), (str, type(None))):
        raise ArgumentTypeError(
            f"{name} on rank {rank}: tag={how['tag']!r}: messages have no tags, they are "
            f"matched in order; leave it out, or pass a word, which errors show as a label"
        )
