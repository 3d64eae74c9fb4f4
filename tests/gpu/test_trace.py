"""What kernels execute on a GPU is the lowered plan, row by row: through the public call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

import ringcoll
from ringcoll.algorithms import build
from ringcoll.collectives import Collective
from ringcoll.dtypes import dtype_of
from ringcoll.encode import encode
from ringcoll.errors import OutOfMemory
from ringcoll.executors.cuda.trace import HEAD, ROW, Recorder
from ringcoll.launch import Launch, Layout
from ringcoll.lower import lower
from ringcoll.plan import Block
from ringcoll.tuner.choice import Choice, Grid
from tests.communicator.cases import ROOTED, SHAPES, Case
from tests.communicator.traces import check_rows
from tests.gpu.ranks import close, run_in_groups
from tests.gpu.stand_in import write


@pytest.fixture
def ranks() -> Iterator[list]:
    """Three that share device 0."""
    comms = ringcoll.init_all([0] * 3, device="cuda", timeout=20, debug="trace")
    yield comms
    close(comms)


@pytest.mark.gpu
@pytest.mark.parametrize("collective", SHAPES)
def test_kernels_execute_the_lowered_plan(ranks, collective):
    kinds: Counter[object] = Counter()
    for options, symmetric in (
        ({"protocol": "LL"}, False),
        ({"protocol": "LL128"}, False),
        ({"protocol": "Simple"}, True),
        ({"protocol": "Simple", "slices": 3}, True),
        ({"protocol": "Simple", "slices": 5}, False),
    ):
        root = 2 if collective in ROOTED else 0
        case = Case(collective, 20_001, root=root, symmetric=symmetric, options=options)
        assert run_in_groups(ranks, [case]) == 1
        found = [comm._state.traced() for comm in ranks]
        # Root and others alike have arrays that peers reach, or none has.
        choice = ranks[0]._state.cuda.async_errors.last.choice.variants[-1]
        lowered = lower(choice.plan, choice.launch)
        check_rows([row for own in found for row in own], lowered, choice.layout)
        kinds["in lines"] += choice.launch.in_band
        kinds["mapped"] += bool(choice.launch.mapped)
        kinds["credits"] += choice.launch.slices > choice.launch.window
        kinds["replicas"] += choice.grid.replicas > 1
    assert min(kinds.values()) >= 1


def choice() -> Choice:
    """A broadcast to one other rank."""
    plan, launch = build("broadcast", "all_pairs", 2), Launch(protocol="LL", mapped=frozenset())
    layout = Layout(Collective("broadcast", 2), (6,))
    return Choice(plan, encode(plan, launch), launch, layout, Grid(1, 1, 64))


def left(recorder: Recorder, rows: list[tuple[int, int, int, int]], more: int = 0) -> None:
    """What a kernel would have left there."""
    write(recorder.address, np.uint64(len(rows) + more).tobytes())
    write(recorder.address + HEAD.itemsize, np.array(rows, ROW).tobytes())


def test_a_record_is_read_once(stand_in):
    stand_in()
    recorder, what = Recorder(0, 4096), choice()
    dtype = dtype_of("float32")
    assert recorder.rows(0, what, dtype) == []
    left(recorder, [(0, 0, 1, 2), (0, 0, 2, 2), (0, 0, 0, 2)])  # three places of row 0
    assert recorder.rows(0, what, dtype) == [(Block(0), 0, 0, 6)]
    assert recorder.rows(0, what, dtype) == []
    recorder.close()


def test_a_record_that_is_full_says_so(stand_in):
    stand_in()
    recorder = Recorder(0, 4096)
    left(recorder, [(0, 0, 1, 2)], more=1 << 20)
    with pytest.raises(OutOfMemory, match="room for 87380 rows, 1048577 were executed"):
        recorder.rows(0, choice(), dtype_of("float32"))
    assert recorder.rows(0, choice(), dtype_of("float32")) == []
    recorder.close()
