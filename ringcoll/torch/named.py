"""What a group says of itself, by the names under which torch asks for it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ringcoll.torch.collectives import Collectives
from ringcoll.torch.untraced import untraced

__all__ = ["Named"]


@functools.partial(untraced, simple=("rank", "size", "name"))
class Named(Collectives):
    """A group with its name, its place and its size."""

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
