"""Views of device memory show where it is, and read nothing of it."""

from __future__ import annotations

import logging
import reprlib
from types import SimpleNamespace

import numpy as np

from ringcoll.arguments.calls import prepare
from ringcoll.dtypes import dtype_of
from ringcoll.executors.cuda_nodes.exchange import RailLimits
from ringcoll.executors.cuda_nodes.phases import Phases
from ringcoll.views import device_view

NOWHERE = 0x7000  # within the first pages, which no process may read


def test_nothing_that_shows_a_view_reads_it(caplog):
    view = device_view(NOWHERE, 4000, np.float32)
    wanted = "<device memory at 0x7000: 1000 of float32>"
    assert [repr(view), str(view), f"{view}", f"{view!r:}"] == [wanted] * 4
    assert repr(view[10:20]) == "<device memory at 0x7028: 10 of float32>"
    checked = prepare("all_reduce", rank=0, nranks=2, sendbuf=view, op="sum")
    assert repr(checked.send) == wanted
    assert repr(checked).startswith("Call(collective='all_reduce', rank=0, count=1000, ")
    assert reprlib.repr(view).endswith("of float32>")
    with caplog.at_level(logging.ERROR):
        logging.getLogger("ringcoll").error("%s", view)
    assert wanted in caplog.text


def test_a_view_is_an_array_of_its_memory():
    there = np.arange(6, dtype=np.int32)
    view = device_view(there.ctypes.data, there.nbytes, np.int32)
    assert view.ctypes.data == there.ctypes.data
    view[1] = 9
    assert there[1] == 9
    assert device_view(0, 0, np.int64).shape == (0,)


def test_a_call_that_is_kept_shows_no_memory_that_may_be_gone():
    there = np.full(3, 77.0, np.float32)
    assert "77" not in repr(prepare("all_reduce", rank=0, nranks=1, sendbuf=there, op="sum"))


def test_scratch_of_calls_in_layers_is_not_read_either():
    phases = object.__new__(Phases)
    phases.__dict__.update(
        _memory=SimpleNamespace(pointer=NOWHERE - 3 * RailLimits().share),
        local_nranks=1,
        exchanges=SimpleNamespace(limits=RailLimits()),
    )
    part = phases.scratch(2, 1000, dtype_of("float32"))
    assert repr(part[10:20]) == "<device memory at 0x7028: 10 of float32>"
