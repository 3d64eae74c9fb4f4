"""Views of memory by its address, and the same call on other arrays."""

from __future__ import annotations

import ctypes
from dataclasses import fields

import numpy as np
import pytest

from ringcoll.arguments.calls import Call
from ringcoll.dtypes import DTYPES
from ringcoll.views import address_of, start_of, view_at


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 7, 4096])
def test_a_view_of_an_address_is_the_memory_there(dtype, count):
    x = np.arange(count).astype(dtype.numpy)
    seen = view_at(start_of(x), x.nbytes, dtype.numpy)
    assert (seen.dtype, seen.shape, seen.nbytes) == (x.dtype, x.shape, x.nbytes)
    assert seen.tobytes() == x.tobytes()
    assert start_of(seen) == start_of(x)
    seen[:] = np.ones(count).astype(dtype.numpy)
    assert seen.tobytes() == x.tobytes()


def test_views_of_many_sizes_make_no_types():
    """ctypes has a type for each length of an array, which takes longer to make than the view."""
    x = np.zeros(1000, np.uint8)
    before = len(ctypes.Array.__subclasses__())
    for nbytes in range(1, 999):
        assert view_at(address_of(x), nbytes, np.uint8).size == nbytes
    assert len(ctypes.Array.__subclasses__()) <= before + 1


def test_addresses_of_arrays_of_any_kind():
    x = np.arange(10.0)
    fixed = x.copy()
    fixed.flags.writeable = False
    for array in (x, x[3:], fixed, fixed[2:]):
        assert start_of(array) == address_of(array) == array.__array_interface__["data"][0]
    assert start_of(np.empty(0)) == start_of(None) == 0


def test_a_call_on_other_arrays_is_the_same_in_all_else():
    call = Call(*(object() for _ in fields(Call)))  # type: ignore[arg-type]
    one, two = np.ones(1), np.ones(2)
    other = call.on(one, two)
    assert (other.send, other.recv) == (one, two)
    rest = {field.name for field in fields(Call)} - {"send", "recv"}
    assert all(getattr(other, name) is getattr(call, name) for name in rest)
