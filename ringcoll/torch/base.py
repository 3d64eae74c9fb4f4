"""What every call of a group builds on: its rank, size and names, and how an engine runs a call."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringcoll.errors import ArgumentError
from ringcoll.torch.tensors import single, written
from ringcoll.torch.tracing import compile_disabled, profiler, profiler_event

__all__ = ["GroupBase", "first", "paired"]


@functools.partial(compile_disabled, simple=("rank", "size", "name"))
class GroupBase(dist.ProcessGroup):  # type: ignore[misc]
    """A group, by the names under which torch asks for its properties."""

    _nranks: int
    _rank: int
    _name: str
    _desc: str
    _store: Any

    def rank(self) -> int:
        """This rank in the group."""
        return self._rank

    def size(self) -> int:
        """How many ranks the group has."""
        return self._nranks

    def name(self) -> str:
        """The backend's name."""
        return "ringcoll"

    getRank, getSize, getBackendName = rank, size, name  # noqa: N815

    @property
    def group_name(self) -> str:
        """The name by which torch knows the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """The user's description of the group."""
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupName(self) -> str:  # noqa: N802
        """As :attr:`group_name`, for what is written in C++."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        """As :attr:`group_desc`, for what is written in C++."""
        return self._desc

    def get_group_store(self) -> Any:
        """The store in which the ranks of this group meet."""
        return self._store

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device(kind) for kind in self._kinds()]

    def _kinds(self) -> list[str]:
        return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

    # -- calls ----------------------------------------------------------------------------------

    @abstractmethod
    def _engine(self, tensor: Any) -> Any:
        """Who carries out calls on tensors of this device."""

    def _run(
        self,
        name: str,
        engine: Any,
        body: Callable[[], None],
        *,
        reads: Sequence[Any] = (),
        writes: Sequence[Any] = (),
        later: bool,
        receives: bool = True,
    ) -> Any:
        """Let an engine carry out a call; torch's profiler is told if it runs.

        Args:
            name: of the call.
            engine: carries it out.
            body: its parts.
            reads: tensors that it reads.
            writes: tensors that it writes.
            later: whether the caller waits for it later.
            receives: whether this rank's tensors change.

        Raises:
            ArgumentError: elements of a tensor that it would write share memory.

        """
        for tensor in writes if receives else ():
            written(tensor, name)
        if not profiler._is_profiler_enabled:
            return engine.run(body, reads=reads, writes=writes, later=later)
        with profiler_event(name):
            return engine.run(body, reads=reads, writes=writes, later=later)

    def _list(self, lists: Sequence[Sequence[Any]], name: str) -> list[Any]:
        tensors = list(single(lists, name))
        if len(tensors) != self._nranks:
            raise ArgumentError(
                f"ringcoll: {name} takes a list of {self._nranks} tensors, one for each rank, "
                f"not {len(tensors)}"
            )
        return tensors


def paired(outputs: Sequence[Any], inputs: Sequence[Any], name: str) -> list[tuple[Any, Any]]:
    """Outputs with their inputs.

    Raises:
        ArgumentError: there are not as many of both.

    """
    if len(outputs) != len(inputs):
        raise ArgumentError(
            f"ringcoll: {name} of {len(inputs)} inputs has {len(outputs)} outputs; pass as many"
        )
    return list(zip(outputs, inputs, strict=True))


def first(tensors: Sequence[Any], name: str) -> Any:
    """The tensor by whose device a call of several goes."""
    if not tensors:
        raise ArgumentError(f"ringcoll: {name} of no tensors; pass one at least")
    return tensors[0]
