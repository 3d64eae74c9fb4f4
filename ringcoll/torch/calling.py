"""What all calls of a group have in common: an engine carries them out, a profiler is told."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ringcoll.errors import ArgumentError
from ringcoll.torch.profiled import profiler, recorded
from ringcoll.torch.tensors import single, written
from ringcoll.torch.untraced import untraced

__all__ = ["Calling", "first", "paired"]


@untraced
class Calling(dist.ProcessGroup):  # type: ignore[misc]
    """A group that says which engine serves a tensor."""

    _nranks: int
    _rank: int

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
        with recorded(name):
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
