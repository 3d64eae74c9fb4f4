"""What symmetric memory of hosts and of devices have in common: how ranks agree on blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from ringcoll.errors import ArgumentError, ArgumentTypeError, ClosedError, MismatchError
from ringcoll.fabric import each, thread_fabrics
from ringcoll.symmetric.host import SymmetricMemory
from tests.gpu.conftest import stand_in

__all__ = ["stand_in"]


@dataclass(frozen=True)
class Kind:
    make: Callable[[Any], Any]
    address: Callable[[Any], int]

    def together(self, nranks, function):
        """Every rank's result of ``function(fabric, memory)``."""
        return each(thread_fabrics(nranks, 20), lambda f: function(f, self.make(f)))

    def place(self, memory, array):
        return memory.lookup(self.address(array), array.nbytes)


@pytest.fixture(params=["host", "device"])
def kind(request):
    if request.param == "host":
        return Kind(SymmetricMemory, lambda array: array.ctypes.data)
    request.getfixturevalue("stand_in")(1)
    from ringcoll.symmetric.device import CudaSymmetricMemory

    return Kind(lambda fabric: CudaSymmetricMemory(fabric, 0), lambda array: array.data.ptr)


def test_a_block_is_used_again_when_every_rank_has_freed_it(kind):
    def work(fabric, memory):
        first = memory.empty(1000, "float32")
        start = kind.address(first)
        view = first.reshape(10, 100)[3:]
        del first
        second = memory.empty(1000, "float32")  # a view of the first is alive
        assert kind.place(memory, second) == (2, 0)
        if fabric.rank == 0:
            del view
        third = memory.empty(1000, "float32")  # alive on rank 1 only
        assert kind.place(memory, third) == (3, 0)
        view = None
        fourth = memory.empty(1001, "float32")  # of as many pages
        assert kind.place(memory, fourth) == (1, 0)
        return kind.address(fourth) == start

    assert kind.together(2, work) == [True, True]


def test_different_bytes_are_shown_from_both_sides(kind):
    def work(fabric, memory):
        with pytest.raises(MismatchError) as caught:
            memory.empty(10 + fabric.rank // 2, "float32")
        # Nothing is out of step: the next one works.
        return str(caught.value), kind.place(memory, memory.empty(2, "int8"))

    for message, where in kind.together(3, work):
        assert "rank 0 asks for (10,) float32 (40 bytes)" in message
        assert "rank 2 for (11,) float32 (44 bytes)" in message
        assert where == (1, 0)


def test_arrays_without_elements_and_bad_requests(kind):
    def work(fabric, memory):
        assert memory.empty((0, 3), "float64").shape == (0, 3)
        assert memory.empty((), "float64").shape == ()
        with pytest.raises(ArgumentError, match="negative"):
            memory.empty(-1, "float32")
        with pytest.raises(ArgumentTypeError, match=r"cannot be shared|is not one of"):
            memory.empty(1, object)
        memory.close()
        memory.close()
        with pytest.raises(ClosedError):
            memory.empty(1, "float32")
        return True

    assert kind.together(2, work) == [True, True]
