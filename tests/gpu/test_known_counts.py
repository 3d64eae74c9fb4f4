"""Calls of counts that have not come, launched by the compiled part; by fakes, without a GPU.

They must launch what a call prepared from the beginning launches: the same kernel on the same grid
with the same parameter, byte for byte.
"""

from __future__ import annotations

import ctypes
import gc
import math
import random
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

import ringcoll
from ringcoll.communicator.group import open_groups
from ringcoll.cuda.raw import from_pointer
from ringcoll.executors.cuda import launches as module
from ringcoll.executors.cuda.launches import MOST_LIKES, Launches
from ringcoll.executors.cuda.loader import Launchable
from ringcoll.executors.cuda.recounted import REPEATS

pytest.importorskip("cupy")

from tests.gpu.compiled_counts import Compiled, Kernel, x
from tests.gpu.fake_gpus import Launch
from tests.gpu.noted import Watched, noted
from tests.gpu.test_counts_not_seen import random_call

pytestmark = pytest.mark.skipif(
    module._launches is None, reason="the compiled part has not been built"
)


@pytest.fixture(params=[2, 3, 4])
def ranks(request, monkeypatch):
    """Ranks whose launches are only noted."""
    yield from noted(request.param, monkeypatch)


@pytest.fixture
def compiled(ranks, monkeypatch):
    """The first of them, with the compiled part."""
    comms, gpus = ranks
    return Compiled(comms[0], gpus, monkeypatch)


def told(prepared: Any) -> tuple[object, ...]:
    """What hosts and peers compare of a call."""
    call = prepared.call
    return (
        (prepared.signature_text, prepared.signature, prepared.number, prepared.slot),
        (prepared.timeout, prepared.large, prepared.total, prepared.choice, prepared.choice.why),
        (call.collective, call.count, call.nbytes, call.dtype, call.op, call.root, call.in_place),
    )


def test_what_is_launched_is_what_would_be_prepared_anew(compiled):
    """A thousand calls of random kinds: their counts grow, and jump, within and across sizes."""
    chance, compared = random.Random(7), Counter[str]()
    for _ in range(80):
        call = random_call(chance, compiled.comm, (0x6_0000_0000,))
        about = int(2 ** chance.uniform(0, 20))
        for _ in range(25):
            count = chance.choice([about + chance.randrange(40), 1 + chance.randrange(2 * about)])
            before = len(compiled.launched)
            try:
                call(count)
            except ringcoll.Error:
                break  # what this call never takes
            if len(compiled.launched) == before:
                continue
            made = compiled.rank.errors.last
            assert compiled.launched[-1] == compiled.by_python(call, count)
            assert told(made) == told(compiled.last)
            launch, call_of = made.choice.launch, made.call
            compared.update([launch.protocol, call_of.collective])
            compared.update(["in place"] if call_of.in_place else [])
            compared.update([f"whole {made.recounter.recounts.whole}"])
    assert compared.total() > 1000
    wanted = {"LL", "LL128", "in place", "whole True", "whole False", "all_reduce", "all_gather"}
    assert wanted <= {*compared}
    assert compiled.rank.fabric.entered == len(compiled.launched) and not compiled.rank.failed


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_count_that_comes_often_is_prepared(compiled, monkeypatch):
    watched, comm = Watched(compiled.comm, monkeypatch), compiled.comm
    for count in (1000, 1002):  # the second is launched by Python, which learns what it is like
        comm.all_reduce(x(count))
    assert (watched.prepared, watched.once, compiled.launched) == (1, 1, [])
    for count in range(600, 980, 2):
        comm.all_reduce(x(count))
    assert (watched.prepared, watched.once, len(compiled.launched)) == (1, 1, 190)
    for _ in range(REPEATS):
        for count in range(600, 700, 2):
            comm.all_reduce(x(count))
    assert (watched.prepared, watched.once, watched.likes) == (1, 1, 50)
    assert compiled.known._launches.likes == 1
    assert len(compiled.launched) == 190 + (REPEATS - 1) * 50


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_segments_that_begin_at_half_a_word_are_of_another_kernel(compiled):
    """Of an all_to_all in place, whose argument has whole words for every count."""
    comm, odd = compiled.comm, Counter[int]()
    for count in (*range(1000, 1004), *range(700, 740)):
        before = len(compiled.launched)
        comm.all_to_all(x(2 * count))
        if len(compiled.launched) > before:
            call = compiled.by_python(lambda count: comm.all_to_all(x(2 * count)), count)
            assert compiled.launched[-1] == call
            odd[count % 2] += 1
    assert odd == {0: 20, 1: 20}


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_another_timeout_holds_for_its_call_alone(compiled):
    comm = compiled.comm
    for count in (1000, 1002):
        comm.all_reduce(x(count))
    comm.all_reduce(x(900), timeout=7)
    compiled.last.launchable.launch(0, compiled.addresses)  # which writes the same parameter
    comm.all_reduce(x(902))
    assert compiled.launched[-1] == compiled.by_python(lambda count: comm.all_reduce(x(count)), 902)


def test_a_buffer_may_lie_at_an_offset_in_its_argument(ranks, monkeypatch):
    """In place, of the last rank: its segment lies behind those of the others."""
    comms, gpus = ranks
    comm, n = comms[-1], len(comms)
    compiled, made = Compiled(comm, gpus, monkeypatch), list[int]()
    compiled.rank.here.get = lambda: n - 1

    def y(count: int) -> Any:
        return from_pointer(1 << 32, count, "float32", n - 1)

    calls: list[Any] = [
        lambda count: comm.all_reduce(y(count)),
        lambda count: comm.all_gather(None, y(n * count)),
        lambda count: comm.reduce_scatter(y(n * count)),
        lambda count: comm.gather(None, y(n * count), root=n - 1),
        lambda count: comm.scatter(y(n * count), root=n - 1),
    ]
    for call in calls:
        for count in (1000, 1004, 904):
            before = len(compiled.launched)
            call(count)
            if len(compiled.launched) > before:
                assert compiled.launched[-1] == compiled.by_python(call, count)
        made.append(len(compiled.launched) - before)
    assert made == [1] * len(calls)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_kind_of_call_is_known_once(compiled):
    """Python launches some that are known, since it looks after peers now and then."""
    comm, timer = compiled.comm, compiled.rank.timer
    for count in range(600, 1000, 2):
        timer.due = -math.inf
        comm.all_reduce(x(count))
    assert compiled.known._launches.likes == 1 and compiled.launched == []
    timer.due = math.inf
    comm.all_reduce(x(520))
    assert len(compiled.launched) == 1


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_what_is_no_such_call_is_left_to_python(compiled):
    comm = compiled.comm
    for first in (1000, 1001):
        for more in (0, 2):
            comm.all_reduce(x(first + more))
            comm.all_gather(x(first + more), x(2 * (first + more), 1 << 33))
            comm.all_reduce(x(first + more), x(first + more))
    make, likes = compiled.known.make, compiled.known._launches.likes
    near, far = 1 << 33, 1 << 34
    for given in (
        ("all_reduce", x(2000), None, "sum", 0),  # of another size
        ("all_reduce", x(900), None, "max", 0),
        ("all_reduce", x(900), None, "sum", 1),
        ("all_reduce", x(900), None, "sum", True),
        ("all_reduce", x(900), None, "sum", 1 << 70),
        ("all_reduce", x(900), x(900, near), "sum", 0),
        ("all_reduce", x(900), x(900, (1 << 32) + 8), "sum", 0),
        ("all_reduce", x(900), x(902), "sum", 0),
        ("all_reduce", x(900, dtype="int32"), None, "sum", 0),
        ("all_reduce", x(900, (1 << 32) + 4), None, "sum", 0),
        ("all_reduce", from_pointer(1 << 32, 900, "float32", 1), None, "sum", 0),
        ("all_reduce", x(0), None, "sum", 0),
        ("all_gather", x(900, near), x(1801, far), None, 0),
        ("all_gather", x(900, near), x(1802, far), None, 0),
        ("all_gather", x(900, near), x(1800, near + 4), None, 0),
        ("all_gather", x(900, near + 3600), x(1800, near), None, 0),  # in place
        ("all_gather", x(900, near), None, None, 0),
    ):
        assert not make(*given), given
    assert compiled.launched == []
    assert make("all_reduce", x(900, far), None, "sum", 0)
    assert make("all_reduce", x(901, far), None, "sum", 0)
    assert make("all_gather", x(900, near), x(1800, far), None, 0)
    assert make("all_reduce", x(898, far), x(898, far), "sum", 0)
    assert (likes, len(compiled.launched)) == (6, 4)
    compiled.known.clear()
    assert not make("all_reduce", x(902), None, "sum", 0)
    assert compiled.known._launches.likes == 0


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_where_python_has_more_to_do_nothing_is_begun(compiled):
    comm, rank = compiled.comm, compiled.rank
    for count in (1000, 1002):
        comm.all_reduce(x(count))
    make, settled = compiled.known.make, rank.order.settled
    given = "all_reduce", x(900), None, "sum", 0
    seen = compiled.last.recounter.seen
    before, numbers = dict(seen._times), [*rank.path.records]

    def refused() -> bool:
        made = make(*given)
        return not made and (seen._times, [*rank.path.records]) == (before, numbers)

    rank.order.settled = settled + 1
    assert refused()
    rank.order.settled, rank.timer.due = settled, -math.inf
    assert refused()
    rank.timer.due, rank.report[0] = math.inf, 1
    assert refused()
    rank.report[0], rank.here.thread.bound = 0, False
    assert refused()
    rank.here.thread.bound, owners = True, compiled.engine._owners
    owners.now, kept = {}, owners.now
    assert refused()
    owners.now = kept
    with ringcoll.group():
        assert refused()
    assert make(*given) and len(compiled.launched) == 1


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_errors_are_raised_and_break_what_has_begun(compiled, monkeypatch):
    comm, rank = compiled.comm, compiled.rank
    for count in (1000, 1002):
        comm.all_reduce(x(count))
    make, recounter = compiled.known.make, compiled.last.recounter

    def broken(*_given: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(recounter, "_record", broken)
        with pytest.raises(ZeroDivisionError):
            make("all_reduce", x(900), None, "sum", 0)
    assert not rank.failed, "nothing of the call has begun"
    with monkeypatch.context() as patch:
        patch.setattr(Launch, "enqueue", broken)
        with pytest.raises(ZeroDivisionError):
            make("all_reduce", x(902), None, "sum", 0)
    assert [type(error) for error in rank.failed] == [ZeroDivisionError]
    assert make("all_reduce", x(904), None, "sum", 0), "the lock has been given back"
    assert rank.fabric.entered == 1


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_the_driver_is_given_the_grid_of_each_count(compiled, monkeypatch):
    """And Python, where the driver refuses and is asked again."""
    comm, found, again, status = compiled.comm, list[Any](), list[Any](), 0

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, *[ctypes.c_uint] * 7, *[ctypes.c_size_t] * 3)
    def launch(*given):
        found.append(given)
        return status

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
    def get_device(at):
        at[0] = 0
        return 0

    for count in (1000, 1002):
        comm.all_reduce(x(count))
    recounter, places = (
        compiled.last.recounter,
        {"cuLaunchKernel": launch, "cuCtxGetDevice": get_device},
    )
    monkeypatch.setattr(
        module, "address_of", lambda name: ctypes.cast(places[name], ctypes.c_void_p).value
    )
    monkeypatch.setattr("cupy.cuda.driver.launchKernel", lambda *given: again.append(given))
    words = recounter.launchable.parameter.words
    kernel = recounter.launchable = Launchable(7, 9, 1, 99, words)
    known = Launches(
        compiled.rank.path, compiled.engine._owners, open_groups, compiled.engine._libraries
    )
    known.add_like(
        ("all_reduce", x(1002), None, "sum", 0), recounter, (0, 0, 0, 0), (4008, 0), 1002
    )
    for status in (0, 2):
        for count in (600, 960):
            assert known.make("all_reduce", x(count), None, "sum", 0)
            _, blocks, threads, packed = compiled.by_python(lambda n: comm.all_reduce(x(n)), count)
            on = compiled.rank.order.settled
            grid = 7, blocks, 1, 1, threads, 1, 1, 0, on, kernel.pointers, 0
            assert found[-1] == grid and kernel.parameter.words.tobytes() == packed
            assert again[-1:] == ([grid] if status else [])


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_call_may_be_forgotten_while_it_is_made(compiled):
    comm, recounter = compiled.comm, None
    for count in (1000, 1002):
        comm.all_reduce(x(count))
    recounter = compiled.last.recounter
    begin = recounter._record

    def forgetting(*given: Any) -> Any:
        comm._engine.forget()
        recounter.launchable = None  # which the call alone keeps
        return begin(*given)

    recounter._record = forgetting
    assert compiled.known.make("all_reduce", x(900), None, "sum", 0)
    assert compiled.known._launches.likes == 0 and len(compiled.launched) == 1
    assert compiled.launched[-1] == compiled.by_python(lambda n: comm.all_reduce(x(n)), 900)


@pytest.mark.parametrize("held_by", ["begin_new", "launchable", "op"])
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_cycle_through_what_is_known_is_collected(compiled, held_by):
    comm, path, engine = compiled.comm, compiled.rank.path, compiled.engine
    for count in (1000, 1002):
        comm.all_reduce(x(count))
    made, known = compiled.last.recounter, Launches(path, engine._owners, set(), engine._libraries)
    kernel, op = Kernel(made.recounts.words[:]), SimpleNamespace()
    own: Any = SimpleNamespace(
        taken=0, alike=made.alike, recounts=made.recounts, sizes=made.sizes, before=made.before,
        each=made.each, begin_new=SimpleNamespace(), launchable=kernel, number_at=made.number_at,
    )  # fmt: skip
    known.add_like(("all_reduce", x(1000), None, op, 0), own, (0, 0, 0, 0), (4000, 0), 1000)
    assert known._launches.likes == 1
    holder: Any = op if held_by == "op" else getattr(own, held_by)
    holder.known = known._launches
    gone = weakref.ref(kernel)
    del known, kernel, op, own, holder
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_looks_at_peers_take_no_room_for_other_arguments(compiled):
    """An operator that is made anew is known as another, as tensors and parameters of torch are."""
    comm, timer, (one, two) = compiled.comm, compiled.rank.timer, map(ringcoll.premul_sum, (2, 2))
    timer.due = -math.inf
    for count in range(1000, 1020, 2):
        comm.all_reduce(x(count), op=one)
    timer.due = math.inf
    for count in range(700, 720, 2):  # the first is launched by Python
        comm.all_reduce(x(count), op=two)
    assert len(compiled.launched) == 9


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_count_that_is_prepared_is_none_that_is_new(compiled):
    comm = compiled.comm
    for count in (1000, 1002, *[1000] * 5):
        comm.all_reduce(x(count))
    assert compiled.launched == []


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_as_many_kinds_are_known_as_may_be(compiled):
    comm, launches = compiled.comm, compiled.known._launches
    for factor in range(MOST_LIKES + 3):
        for count in (1000, 1002):
            comm.all_reduce(x(count, 1 << 32), op=ringcoll.premul_sum(1 + factor))
    assert 0 < launches.likes <= MOST_LIKES
