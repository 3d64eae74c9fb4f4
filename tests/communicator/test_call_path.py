"""The way of a call: composed of an engine, and short where all is prepared."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

import ringcoll
from ringcoll.communicator.cpu.engine import CpuEngine

PACKAGE = Path(ringcoll.__file__).parent


def functions(call) -> list[str]:
    """The functions of the package that a call enters on this thread."""
    entered = dict[str, None]()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and Path(code.co_filename).is_relative_to(PACKAGE):
            entered[f"{Path(code.co_filename).relative_to(PACKAGE)}: {code.co_name}"] = None

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return list(entered)


def fewest(comm, call) -> list[str]:
    """The functions of rank 0's call where it waits for nobody: the least of several calls."""
    call()
    found: list[list[str]] = []
    for _ in range(20):
        if comm.rank:
            call()
        else:
            time.sleep(0.01)  # the other rank is there first, most times
            found.append(functions(call))
    return min(found, key=len, default=[])


@pytest.mark.parametrize("kind", ["same", "fresh", "option", "timeout", "two arrays"])
def test_a_warm_call_enters_at_most_15_functions(kind):
    def work(comm):
        x, y = np.ones(2), np.ones(2)
        calls = {
            "same": lambda: comm.all_reduce(x),
            "two arrays": lambda: comm.all_reduce(x, y),
            "fresh": lambda: comm.all_reduce(x[:]),
            "option": lambda: comm.all_reduce(x, tag="x"),
            "timeout": lambda: comm.all_reduce(x, timeout=50),
        }
        return fewest(comm, calls[kind])

    way = ringcoll.spawn(work, 2)[0]
    assert 10 < len(way) <= 15, way
    assert way[:2] == [
        "communicator/collectives.py: all_reduce",
        "communicator/cpu/engine.py: collective",
    ]


def test_calls_are_made_by_an_engine_and_no_method_is_replaced():
    [comm] = ringcoll.init_all(1)
    assert isinstance(comm._engine, CpuEngine)
    assert [name for name in vars(comm) if callable(getattr(type(comm), name, None))] == []
    source = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    assert "method-assign" not in source


def test_an_engine_goes_with_its_communicator():
    [comm] = ringcoll.init_all(1)
    comm.all_reduce(np.ones(3))
    gone = weakref.ref(comm._engine)
    gc.disable()
    try:
        del comm
        assert gone() is None
    finally:
        gc.enable()
