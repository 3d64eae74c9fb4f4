"""What every call of a group builds on: its rank, size and names, and how an engine runs a call."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringcoll.errors import ArgumentError
from ringcoll.torch import bridge
from ringcoll.torch.tensors import check_writable, single
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

    def __init__(self, rank: int, size: int) -> None:
        self._start_in_bridge = bridge.start(self, rank, size)

    def rank(self) -> int:
        """This rank in the group."""
        return self._rank

    def size(self) -> int:
        """The number of ranks in the group."""
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
        """As :attr:`group_name`, for callers in C++."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        """As :attr:`group_desc`, for callers in C++."""
        return self._desc

    def get_group_store(self) -> Any:
        """The store of this group, under a prefix of its own."""
        return self._store

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device(kind) for kind in self._kinds()]

    def _kinds(self) -> list[str]:
        return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

    # -- calls ----------------------------------------------------------------------------------

    @abstractmethod
    def _engine(self, tensor: Any, name: str) -> Any:
        """The engine of a call on tensors of this device: a Host or a Device."""

    def _run(
        self,
        name: str,
        engine: Any,
        body: Callable[[], None],
        *,
        reads: Sequence[Any] = (),
        writes: Sequence[Any] = (),
        async_op: bool,
        receives: bool = True,
    ) -> Any:
        """Run the parts of a call on an engine, under an event of torch's profiler if that runs.

        ``receives`` is False where this rank's tensors do not change.

        Raises:
            ArgumentError: elements of a tensor that it would write share memory.

        """
        for tensor in writes if receives else ():
            check_writable(tensor, name)
        if not profiler._is_profiler_enabled:
            return engine.run(body, reads=reads, writes=writes, async_op=async_op)
        with profiler_event(name):
            return engine.run(body, reads=reads, writes=writes, async_op=async_op)

    def _list(self, lists: Sequence[Sequence[Any]], name: str) -> list[Any]:
        tensors = list(single(lists, name))
        if len(tensors) != self._nranks:
            raise ArgumentError(
                f"ringcoll: {name} takes a list of {self._nranks} tensors, one for each rank, "
                f"not {len(tensors)}"
            )
        return tensors


def paired(outputs: Sequence[Any], inputs: Sequence[Any], name: str) -> list[tuple[Any, Any]]:
    """Pairs of an output and its input.

    Raises:
        ArgumentError: their numbers differ.

    """
    if len(outputs) != len(inputs):
        raise ArgumentError(
            f"ringcoll: {name} of {len(inputs)} inputs has {len(outputs)} outputs; pass as many"
        )
    return list(zip(outputs, inputs, strict=True))


def first(tensors: Sequence[Any], name: str) -> Any:
    """The first of several tensors, whose device chooses the engine."""
    if not tensors:
        raise ArgumentError(f"ringcoll: {name} of an empty list; pass at least one tensor")
    return tensors[0]
